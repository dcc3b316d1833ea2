"""Reports where `latest` points, and whether that is correct."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.root import catalog, starts
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.wholeness import Wholeness, is_removed, lost_text
from checkpointd.report.votes import votes_of
from checkpointd.store.base import Store


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """The tag that `latest` names. `damage`: it names no whole checkpoint. `behind`: `latest` should name a newer checkpoint.
    `unreadable`: the pointer, or the outcome of the tag that it names, cannot be read now.
    """

    tag: str | None
    damage: str = ""
    behind: str = ""
    unreadable: str = ""

    @property
    def problem(self) -> str:
        return self.damage or self.unreadable or self.behind


async def pointer(store: Store, checkpoints: Sequence[Checkpoint], wholeness: Wholeness | None = None) -> Pointer:
    """Read `latest` and compare it with `checkpoints`, a listing of a moment ago, newest first. With `wholeness`, also check
    whether all objects of the named checkpoint are there.
    """
    is_used = bool(checkpoints) or await _is_used(store)
    repair = f"the next start of the job, or {command('recover', store.url)}, sets it right"
    if not is_used:
        repair = f"no job ever saved at {store.url}, so another program has made it: give the root that the job was given"
    try:
        tag = await catalog.latest(store)
    except DamagedError as error:
        return Pointer(tag=None, damage=f"{error}; {repair}")
    except UnreadableError as error:
        return Pointer(tag=None, unreadable=f"{LATEST} cannot be read now: {error}")
    if tag is None and await _is_of_another_program(store):
        return Pointer(tag=None)
    named = next((c for c in checkpoints if c.tag == tag), None)
    if tag is not None and not is_used:
        return Pointer(tag=tag, damage=f"latest names {tag}, which is not a checkpoint: {repair}")
    if tag is not None and named is None:
        # It may have been committed after `checkpoints` were listed.
        return await _without_checkpoint(store, tag, repair)
    if named is not None and wholeness is not None and (damage := await _incomplete(store, named, wholeness)):
        return Pointer(tag=tag, damage=damage)
    due = next((c for c in checkpoints if c.may_be_latest), None)
    if due is None:
        return Pointer(tag=tag)
    if named is not None and named.left_behind:
        words = f"latest names {tag}, which was left behind: loads take {due.tag}, and {repair}"
        return Pointer(tag=tag, behind=f"{words}. {going_back(store.url, named.tag)}")
    if named is None or named.outcome.order < due.outcome.order:
        names = f"names {tag}" if tag else "does not exist"
        words = f"latest {names}, although {due.tag} was committed since: loads take {due.tag}"
        behind = f"{words}, and unless its job is just moving latest, {repair}"
        return Pointer(tag=tag, behind=behind if named is None else f"{behind}. {going_back(store.url, named.tag)}")
    return Pointer(tag=tag)


def going_back(root: str, tag: str) -> str:
    """What to do instead of writing `tag` into `latest`."""
    return (
        f"An edit of latest alone changes no load; to go back to {tag}, stop the job: {command('rollback', *at_tag(root, tag))}"
    )


async def _is_used(store: Store) -> bool:
    """Whether a job ever saved there. Only then can a recovery set `latest` right."""
    return bool(await starts.newest(store) or await catalog.scan(store))


async def _is_of_another_program(store: Store) -> bool:
    try:
        return await catalog.is_of_another_program(store, (await store.get(LATEST, size_max=catalog.LATEST_BYTES_MAX)).decode())
    except NotFoundError:
        return False


async def _without_checkpoint(store: Store, tag: str, repair: str) -> Pointer:
    try:
        await catalog.find(store, tag)
    except UnreadableError as error:
        return Pointer(tag=tag, unreadable=f"latest names {tag}, which cannot be read now: {error}")
    except (NotFoundError, DamagedError) as error:
        is_there = any(attempt.sizes for attempt in await catalog.attempts_of(store, tag))
        if is_there:
            return Pointer(tag=tag, damage=f"latest names {tag}, which cannot be loaded: {error}; {repair}")
        why = f"it is gone: somebody removed {tag}, or it was lost, and a restart loads an older checkpoint, or none"
        accepts = f"{command('recover', store.url)} lets latest name the newest checkpoint left, or removes latest"
        remedy = f"Bring {tag} back from a copy, or accept the loss: {accepts}"
        return Pointer(tag=tag, damage=f"latest names {tag}, which cannot be loaded: {why}. {remedy}")
    return Pointer(tag=tag)


async def _incomplete(store: Store, named: Checkpoint, wholeness: Wholeness) -> str:
    """A sentence if objects of the checkpoint that the pointer names are gone; empty if it is whole."""
    view = await catalog.view(store, named.tag, named.attempt)
    if view.state != "committed":
        return ""
    lost = await wholeness.lost(view, await votes_of(store, view))
    if not lost:
        return ""
    if is_removed(lost):
        return f"latest names {named.tag}, and {lost_text(lost)}: a restart loads an older checkpoint, or none"
    why = command("explain", *at_tag(store.url, named.tag))
    return f"latest names {named.tag}, which is not whole ({why} says why): a restart loads an older whole checkpoint, or none"
