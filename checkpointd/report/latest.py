"""Reports what `latest` names, and whether that is the newest checkpoint. No load reads `latest`: it is for people and other
programs.
"""

from __future__ import annotations

import msgspec

from checkpointd.commands import command
from checkpointd.commit.branches import newest_of
from checkpointd.errors import DamagedError, UnreadableError
from checkpointd.layout.keys import LATEST
from checkpointd.layout.log_records import LogState
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.latest import going_back
from checkpointd.store.base import Store


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """The tag that `latest` names; None if there is none, or if another program wrote it. `newest`: the one that loads try
    first. `note`: if they differ, what that means.
    """

    tag: str | None
    newest: str | None = None
    note: str = ""


async def pointer(store: Store, state: LogState, log_damage: str = "") -> Pointer:
    """Read `latest` and compare it with `state`. If the log is damaged, `latest` may know more, so nothing is said of it."""
    found = newest_of(state)
    newest = None if found is None else found.tag
    mends = f"the next commit, the next start of the job or {command('recover', store.url)} sets it right"
    if state.number == 0:
        mends = f"no job ever saved at {store.url}, so another program has made it: give the root that the job was given"
    try:
        tag = await root_view.latest(store)
    except DamagedError as error:
        return Pointer(tag=None, newest=newest, note=f"{error}; {mends}")
    except UnreadableError as error:
        return Pointer(tag=None, newest=newest, note=f"{LATEST} cannot be read now: {error}")
    if tag == newest or log_damage:
        return Pointer(tag=tag, newest=newest)
    if tag is None:
        if await store.stat(LATEST) is not None:  # of another program
            return Pointer(tag=None, newest=newest)
        return Pointer(tag=None, newest=newest, note=f"{LATEST} does not exist: loads take {newest}, and {mends}")
    takes = f"loads take {newest}" if newest is not None else "loads find none"
    if not any(one.tag == tag and one.status == "checkpoint" for one in state.attempts.values()):
        return Pointer(tag=tag, newest=newest, note=f"{LATEST} names {tag}, which is not a checkpoint: {takes}, and {mends}")
    note = (
        f"{LATEST} names {tag}, although {takes}: unless its job is just moving {LATEST}, {mends}. {going_back(store.url, tag)}"
    )
    return Pointer(tag=tag, newest=newest, note=note)
