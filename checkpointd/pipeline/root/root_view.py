"""What is at a root: its attempts and checkpoints, as its log has them, and the objects in their directories.

The log alone decides. A listing shows only which objects of an attempt are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from operator import attrgetter

from checkpointd.commands import at_tag, command
from checkpointd.commit.branches import commits_of
from checkpointd.commit.facts import STATES
from checkpointd.errors import DamagedError, LinkError, NotFoundError
from checkpointd.layout.keys import (
    LATEST,
    AttemptId,
    check_tag,
    group_of,
    group_prefix,
    is_group,
    is_tag,
)
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.layout.manifest import VOTE_BYTES_MAX, Vote, decode
from checkpointd.phrases import listed
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Entry, Store, each

LATEST_BYTES_MAX = 4096
LISTINGS = 16
"""The number of directories of an attempt that are listed at once."""

# --- the log --------------------------------------------------------------------------------------------------------


async def state_of(store: Store) -> LogState:
    """The state at the end of the root's log, or as far as it can be proved: then an error is logged."""
    return await RootLog.of(store).look()


async def logged(store: Store, prefix: str) -> LoggedAttempt | None:
    """The attempt `prefix` (`<tag>/<attempt>`) as the log has it now; None if the log does not know it."""
    return (await state_of(store)).attempts.get(prefix)


async def is_checkpoint(store: Store, prefix: str) -> bool:
    """Whether the attempt `prefix` is a checkpoint now."""
    one = await logged(store, prefix)
    return one is not None and one.status == "checkpoint"


def attempts_of(state: LogState, tag: str) -> list[LoggedAttempt]:
    """The attempts of `tag`, oldest first."""
    return sorted((one for one in state.attempts.values() if one.tag == tag), key=attrgetter("id"))


def checkpoints_of(attempts: Iterable[LoggedAttempt]) -> list[LoggedAttempt]:
    """The checkpoints among `attempts`, newest first: the newest commit of each tag."""
    newest: dict[str, LoggedAttempt] = {}
    for commit in commits_of(attempts):
        newest.setdefault(commit.tag, commit)
    return list(newest.values())


async def checkpoints(store: Store) -> list[LoggedAttempt]:
    """All checkpoints, newest first."""
    return checkpoints_of((await state_of(store)).attempts.values())


async def find(store: Store, tag: str) -> LoggedAttempt:
    """The checkpoint of `tag`. Raises NotFoundError, which says what is there instead, if there is none."""
    return found_in(await state_of(store), tag, store.url)


def found_in(state: LogState, tag: str, root: str) -> LoggedAttempt:
    """The same in `state`, which is that of `root`."""
    own = attempts_of(state, check_tag(tag))
    found = checkpoints_of(own)
    if found:
        return found[0]
    if own:
        states = ", ".join(f"{one.id} is {STATES[one.status]}" for one in own)
        raise NotFoundError(f"{tag} is not a checkpoint: {states}; {command('explain', *at_tag(root, tag))} says why")
    raise no_such_tag(state, tag, root, [one.tag for one in checkpoints_of(state.attempts.values())])


def no_such_tag(state: LogState, tag: str, root: str, known: Sequence[str]) -> NotFoundError:
    """The error that the log of `root` does not know `tag`, with the tags among `known` that are like it, and the
    checkpoints there.
    """
    similar = get_close_matches(tag, known, n=3, cutoff=0.4) or [name for name in known if name.endswith(tag)][:3]
    there = listed([one.tag for one in checkpoints_of(state.attempts.values())]) or "none"
    hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
    return NotFoundError(f"there is no tag {tag!r} at {root}{hint}; checkpoints are: {there}")


# --- objects ----------------------------------------------------------------------------------------------------------


async def tags(store: Store) -> list[str]:
    """The directories at the root that can be those of tags."""
    return [entry.name for entry in await store.list("") if entry.is_prefix and is_tag(entry.name)]


async def is_log_gone(store: Store, state: LogState) -> bool:
    """Whether the root has no log, of which the `state` is, although directories of attempts are there (LOG-8)."""
    return state.number == 0 and bool(await directories(store))


async def directories(store: Store) -> list[tuple[str, AttemptId]]:
    """The directories of attempts at the root, whether the log knows them or not."""
    at = await tags(store)
    found = await each(store.list, at)
    return [
        (tag, attempt)
        for tag, entries in zip(at, found, strict=True)
        for entry in entries
        if entry.is_prefix and (attempt := AttemptId.parse(entry.name)) is not None
    ]


async def objects_of(store: Store, prefix: str) -> list[Entry]:
    """The objects of the attempt `prefix` (`<tag>/<attempt>`), of all groups of ranks, sorted by name."""
    top = await store.list(prefix)
    groups = [int(entry.name) for entry in top if entry.is_prefix and is_group(entry.name)]
    return sorted([*_of_group(top, 0), *await objects_of_groups(store, prefix, groups)], key=lambda entry: entry.name)


async def objects_of_groups(store: Store, prefix: str, groups: Iterable[int]) -> list[Entry]:
    """The objects of these groups of ranks in the attempt `prefix`; group 0 has the objects of the whole attempt, too."""
    found: list[Entry] = []

    async def look(group: int) -> None:
        found.extend(_of_group(await store.list(group_prefix(prefix, group)), group))

    await run_workers([partial(look, group) for group in groups], LISTINGS)
    return found


async def sizes_of(store: Store, prefix: str) -> dict[str, int]:
    """The sizes in bytes of the objects of the attempt `prefix`, by name."""
    return {entry.name: entry.size for entry in await objects_of(store, prefix)}


def _of_group(entries: Iterable[Entry], group: int) -> list[Entry]:
    return [entry for entry in entries if not entry.is_prefix and group_of(entry.name) == group]


async def read_vote(store: Store, key: str) -> Vote:
    """The vote at `key`, of an attempt that is not committed. A commit counts the votes in its ballot (`ballots.py`)."""
    return decode(await store.get(key, size_max=VOTE_BYTES_MAX), Vote, key)


# --- latest, which others read ------------------------------------------------------------------------------------------


async def latest(store: Store) -> str | None:
    """The tag that `latest` names; None if there is no `latest`, or if another program wrote it.

    Raises DamagedError if it holds no tag, or is a symbolic link, which is never followed.
    """
    try:
        text = (await store.get(LATEST, size_max=LATEST_BYTES_MAX)).decode()
    except NotFoundError:
        return None
    except LinkError as error:
        raise DamagedError(f"the pointer {LATEST} names nothing: {error}", key=LATEST) from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"the pointer {LATEST} at {store.url} holds no text: {error}", key=LATEST) from error
    tag = text.removesuffix("\n")
    if not is_tag(tag):
        raise DamagedError(f"the pointer {LATEST} at {store.url} holds {tag!r}, which is not a tag", key=LATEST)
    return None if await is_of_another_program(store, text) else tag


async def readable_latest(store: Store) -> str | None:
    """The same, but None for a damaged `latest`, which the next start sets right."""
    try:
        return await latest(store)
    except DamagedError:
        return None


async def is_of_another_program(store: Store, text: str) -> bool:
    """Whether another program, such as DeepSpeed, wrote `text`, the content of `latest`: it does not end in a newline, as
    those of checkpointd do, and the directory that it names holds files; that of a tag of checkpointd holds only directories.
    """
    return is_tag(text) and any(not one.is_prefix and not one.name.startswith(".") for one in await store.list(text))
