"""Finds out what is missing of committed checkpoints, by listings and votes alone. It writes nothing, and reads no chunk and no
index.

A person may remove the directory of a checkpoint, or that of an older tag whose objects newer checkpoints refer to. Whoever
lists, loads or removes checkpoints looks here first, so all of them agree on what is left.

Invariants
  SHOWN-1  A job may be showing or replacing a checkpoint at this moment, so a difference counts only if looks spread over some
      seconds find it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, NotFoundError, StoreError, UnreadableError
from checkpointd.layout.keys import COORDINATOR, SERVICE, AttemptId, holder_of, object_key, object_rank
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import Vote
from checkpointd.phrases import listed
from checkpointd.pipeline.root import ballots, root_view
from checkpointd.pipeline.root.ballots import ballot_key
from checkpointd.pipeline.root.tag_directories import abandoned, files_of, is_gone
from checkpointd.store.base import Store, each
from checkpointd.store.patient import Patience
from checkpointd.store.showing import plain_files_of

log = logging.getLogger("checkpointd")


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """An object that a checkpoint needs and that is gone, or whose size has changed; or the directory that showed its files."""

    key: str
    removed: str
    """The largest thing that was removed with it: `<tag>`, `<tag>/<attempt>`, or the key itself. Empty if the object is
    still there, with another size."""
    bytes_left: int | None = None
    is_directory: bool = False
    """Whether it is the checkpoint's own directory, or the one that showed its files. Then the checkpoint counts as removed."""

    @property
    def rank(self) -> int | None:
        """The rank that wrote the object; None if that is not one object."""
        name = self.key.rpartition("/")[2]
        return COORDINATOR if name.startswith("ballot-") else object_rank(name)


def _directory(at: str) -> Lost:
    """The loss of the directory `at`, which somebody has removed."""
    return Lost(key=at, removed=at, is_directory=True)


async def lost(store: Store, attempt: LoggedAttempt, gone: Collection[str] | None = None) -> tuple[Lost, ...]:
    """What is missing of this checkpoint, by a look at its objects and at those that its votes name; nothing if it is no
    checkpoint any more. `gone`: what `abandoned` has just found, if the caller has looked.

    Raises StoreError if the storage cannot be read, since the caller loads or removes something because of the answer.
    """
    if attempt.status != "checkpoint":
        return ()
    commit = attempt.commit
    if commit.shown_at and attempt.prefix in (await abandoned(store, restores=False) if gone is None else gone):
        return (_directory(commit.shown_at),)
    needed = _needed(commit, await counted_votes(store, commit))
    sizes = {prefix: await root_view.sizes_of(store, prefix) for prefix in sorted(set(map(holder_of, needed)))}
    found = [await _lost(store, key, sizes[holder_of(key)]) for key in sorted(needed) if not _is_there(sizes, key, needed[key])]
    return tuple(found) if found and await root_view.is_checkpoint(store, attempt.prefix) else ()


async def seen_lost(store: Store, attempt: LoggedAttempt) -> tuple[Lost, ...]:
    """The same for those who only report: nothing if the storage cannot be read."""
    try:
        return await lost(store, attempt)
    except StoreError as error:
        log.info("%s: cannot tell whether it is whole: %s", attempt.prefix, error)
        return ()


async def lost_at_a_glance(store: Store, checkpoints: Iterable[LoggedAttempt]) -> dict[str, tuple[Lost, ...]]:
    """What is missing of `checkpoints`, by prefix, as far as one listing of the root shows: tags that they need, and
    directories that showed their files. Their objects are not looked at. Raises StoreError if the storage cannot be read.
    """
    tags, gone = set(await root_view.tags(store)), await abandoned(store, restores=False)
    found = {one.prefix: missing for one in checkpoints if (missing := _glanced(one, tags, gone))}
    removed = {one.removed for missing in found.values() for one in missing if not one.is_directory}
    await each(store.list, sorted(removed))  # raises for a symbolic link, which is not gone
    return {prefix: missing for prefix, missing in found.items() if await root_view.is_checkpoint(store, prefix)}


async def seen_at_a_glance(store: Store, checkpoints: Iterable[LoggedAttempt]) -> dict[str, tuple[Lost, ...]]:
    """The same for those who only report: nothing if the storage cannot be read."""
    try:
        return await lost_at_a_glance(store, checkpoints)
    except StoreError as error:
        log.warning("cannot tell whether anything was removed by hand at %s: %s", store.url, error)
        return {}


def _glanced(one: LoggedAttempt, tags: Collection[str], gone: Collection[str]) -> tuple[Lost, ...]:
    if one.prefix in gone:
        return (_directory(one.commit.shown_at),)
    needed = {prefix: prefix.rpartition("/")[0] for prefix in (one.prefix, *one.commit.holders)}
    return tuple(Lost(key=prefix, removed=tag) for prefix, tag in needed.items() if tag not in tags)


async def _lost(store: Store, key: str, there: Mapping[str, int]) -> Lost:
    prefix, name = holder_of(key), key.rpartition("/")[2]
    if name in there:
        return Lost(key=key, removed="", bytes_left=there[name])
    if there:
        return Lost(key=key, removed=key)
    tag = prefix.rpartition("/")[0]
    attempts = [entry for entry in await store.list(tag) if entry.is_prefix and AttemptId.parse(entry.name)]
    return Lost(key=key, removed=prefix if attempts else tag)


def _is_there(sizes: Mapping[str, Mapping[str, int]], key: str, size: int | None) -> bool:
    found = sizes[holder_of(key)].get(key.rpartition("/")[2])
    return found is not None and size in (None, found)


def _needed(commit: CommitRecord, votes: Mapping[int, Vote | str]) -> dict[str, int | None]:
    """The keys that the checkpoint needs, with their sizes in bytes where these are known. A load does without a joint plan."""
    needed: dict[str, int | None] = {ballot_key(commit): commit.ballot.size}
    referred: set[str] = set()
    for vote in votes.values():
        if not isinstance(vote, Vote):
            continue
        if vote.index is not None:
            needed[object_key(commit.attempt, vote.index.name)] = vote.index.size
        needed |= {object_key(commit.attempt, ref.name): ref.size for ref in vote.objects}
        referred |= set(vote.refers)
    return needed | dict.fromkeys(referred)


async def counted_votes(store: Store, commit: CommitRecord) -> dict[int, Vote | str]:
    """The votes that `commit` counted, by rank; in place of an unreadable vote, the reason."""
    try:
        votes = await ballots.votes_of(store, commit)
    except (DamagedError, NotFoundError, UnreadableError) as error:
        return dict.fromkeys(range(commit.world_size), str(error))
    return {rank: str(vote) if isinstance(vote, DamagedError) else vote for rank, vote in votes.items()}


async def check_whole(store: Store, checkpoint: LoggedAttempt, patience: Patience) -> None:
    """Raise DamagedError if anything is missing that `checkpoint` needs, before a load fills anything."""
    with patience.looks() as looks:
        while True:
            try:
                now = await root_view.logged(store, checkpoint.prefix)
                missing = () if now is None else await lost(store, now)
            except UnreadableError as error:
                await looks.unreadable(error)
                continue
            if not missing:
                return
            if await looks.is_lost(missing[0].key):
                advice = lost_advice(store.url, checkpoint.tag, missing)
                message = f"{checkpoint.tag} is not whole: {lost_text(missing)}{_of_ranks(missing)}; {advice}"
                raise DamagedError(message, key=missing[0].key, rank=missing[0].rank)


# --- in words ------------------------------------------------------------------------------------------------------


def lost_text(lost: Sequence[Lost]) -> str:
    """`it needs a/b/c, which is gone: somebody removed a`; empty if nothing is lost."""
    if not lost:
        return ""
    if is_removed(lost):
        return f"somebody removed its directory {lost[0].key}"
    more = f" and {len(lost) - 1} other object{'s' if len(lost) > 2 else ''}" if len(lost) > 1 else ""
    removed = sorted({one.removed for one in lost if one.removed})
    if not removed:
        return f"it needs {lost[0].key}{more}, whose size was changed to {lost[0].bytes_left} bytes"
    are = "which are gone" if more else "which is gone"
    return f"it needs {lost[0].key}{more}, {are}: somebody removed {'it' if removed == [lost[0].key] else listed(removed, 4)}"


def _of_ranks(lost: Sequence[Lost]) -> str:
    """` (rank 3 wrote it)`; empty if what is lost are no objects of ranks."""
    ranks = sorted({one.rank for one in lost if one.rank is not None})
    what = "it" if len(lost) == 1 else "them"
    return f" (rank{'s' if len(ranks) > 1 else ''} {listed(list(map(str, ranks)), 4)} wrote {what})" if ranks else ""


def is_removed(lost: Sequence[Lost]) -> bool:
    """Whether the directory of the checkpoint is missing, so that it counts as removed."""
    return any(one.is_directory for one in lost)


def lost_state(lost: Sequence[Lost]) -> Literal["incomplete", "removed"]:
    """The state of a checkpoint of which something is missing."""
    return "removed" if is_removed(lost) else "incomplete"


def lost_advice(root: str, tag: str, lost: Sequence[Lost]) -> str:
    """Advice for a checkpoint that is not whole any more."""
    things = sorted({one.removed or one.key for one in lost})
    what = things[0] if len(things) == 1 else "what is gone"
    if is_removed(lost):
        return f"bring it back from a copy, or remove what is left of it: {command('gc', root)}"
    if what == tag:
        what = "it"
    missing = [thing for thing in things if "/" not in thing and thing != tag]
    copied = f" (if only the directory of {tag} was copied here, copy the whole root instead)" if missing else ""
    return f"bring {what} back from a copy of the root{copied}, or remove what is left: {command('delete', *at_tag(root, tag))}"


# --- the directories that show files -------------------------------------------------------------------------------


async def without_directory(store: Store, checkpoints: Collection[LoggedAttempt], absence_s: float) -> set[str]:
    """The prefixes of the `checkpoints` whose directory is missing: somebody removed it, or it was never shown.

    A directory counts as missing if looks spread over `absence_s` seconds do not find it.
    """
    plain = plain_files_of(store)
    if plain is None:
        return set()
    files = [checkpoint for checkpoint in checkpoints if checkpoint.commit.shown_at]
    gone = await asyncio.gather(*(is_gone(plain, one.commit.shown_at, absence_s) for one in files))
    # While a file system is not mounted, everything is gone, this root as well.
    if not await plain.is_there(SERVICE):
        return set()
    return {checkpoint.prefix for checkpoint, missing in zip(files, gone, strict=True) if missing}


async def unlike(store: Store, outcome: CommitRecord, absence_s: float) -> str | None:
    """The files of the commit `outcome` that its directory does not show as they were stored, in words; None if it shows
    all."""
    plain = plain_files_of(store)
    if plain is None or not outcome.shown_at:
        return None
    files = await files_of(store, outcome)
    with Patience(absence_s, absence_s).looks() as looks:
        while changed := await plain.changed(outcome.shown_at, files):
            if await looks.is_lost(outcome.shown_at):
                named = listed([f"{name} ({what})" for name, what in sorted(changed.items())], 3)
                return f"{outcome.shown_at} does not show what was committed: {named}"
    return None
