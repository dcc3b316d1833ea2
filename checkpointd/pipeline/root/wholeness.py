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
from types import MappingProxyType
from typing import Literal

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, NotFoundError, StoreError, UnreadableError
from checkpointd.layout.keys import (
    COORDINATOR,
    SERVICE,
    AttemptId,
    holder_of,
    holds_bytes,
    index_name,
    index_rank,
    object_key,
    object_rank,
)
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import Vote
from checkpointd.phrases import listed
from checkpointd.pipeline.root import ballots, root_view
from checkpointd.pipeline.root.ballots import ballot_key, joint_plan_key
from checkpointd.pipeline.root.root_view import AttemptView, Checkpoint
from checkpointd.pipeline.root.tag_directories import abandoned, files_of, is_gone
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience
from checkpointd.store.showing import plain_files_of

log = logging.getLogger("checkpointd")

Votes = Mapping[int, Vote | str]
"""By rank; in place of an unreadable vote, the reason."""
NO_VOTES: Votes = MappingProxyType({})


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
        return COORDINATOR if name.startswith(("ballot-", "plan-")) else object_rank(name)


def directory_of(at: str) -> Lost:
    """The loss of the directory `at`, which somebody has removed."""
    return Lost(key=at, removed=at, is_directory=True)


class Wholeness:
    """Finds what is missing, given `attempts` that were listed a moment ago.

    If an object seems to be gone, its attempt is listed once more, since a checkpoint may be removed in between.
    """

    def __init__(self, store: Store, attempts: Iterable[AttemptView] = ()) -> None:
        self._store = store
        self._listed: dict[str, Mapping[str, int]] = {a.prefix: a.sizes for a in attempts if a.is_looked}
        self._again: dict[str, Mapping[str, int]] = {}
        self._abandoned: set[str] | None = None
        self._tags: frozenset[str] | None = None

    async def abandoned(self) -> set[str]:
        """The checkpoints (`<tag>/<attempt>`) whose directory somebody has removed. The first call looks, and the others repeat
        what it found. Raises StoreError if the storage cannot be read.
        """
        if self._abandoned is None:
            self._abandoned = await abandoned(self._store, restores=False)
        return self._abandoned

    async def seen_abandoned(self) -> set[str]:
        """The same for those who only report: empty if the storage cannot be read."""
        try:
            return await self.abandoned()
        except StoreError as error:
            log.info("cannot tell whether directories of checkpoints were removed: %s", error)
            return set()

    async def lost(self, attempt: AttemptView, votes: Votes = NO_VOTES) -> tuple[Lost, ...]:
        """What is missing of `attempt`, which is committed; empty if nothing is, or if the storage cannot be read now.

        `votes` name the index and the chunks objects of their ranks. Without a rank's vote, only a missing index is noticed,
        and an older attempt of which no chunks object is left. If nobody has looked at the objects of `attempt`, only a tag
        is noticed of which nothing is left.
        """
        try:
            return await self._lost_of(attempt, votes)
        except StoreError as error:
            log.info("%s: cannot tell whether it is whole: %s", attempt.prefix, error)
            return ()

    async def lost_now(self, attempt: LoggedAttempt) -> tuple[Lost, ...]:
        """What is missing of this checkpoint by a look at its objects now, and at those that its votes name.

        Raises StoreError if the storage cannot be read, since the caller loads or removes something because of the answer.
        """
        if attempt.commit is None or attempt.status != "checkpoint":
            return ()
        view = await root_view.with_objects(self._store, AttemptView(attempt))
        self._listed[view.prefix] = view.sizes
        self._again.pop(view.prefix, None)
        return await self._lost_of(view, await counted_votes(self._store, attempt.commit))

    async def _lost_of(self, attempt: AttemptView, votes: Votes) -> tuple[Lost, ...]:
        if attempt.commit is not None and attempt.commit.shown_at and attempt.prefix in await self.abandoned():
            return (directory_of(attempt.commit.shown_at),)
        return await self._looked(attempt, votes)

    async def _looked(self, attempt: AttemptView, votes: Votes) -> tuple[Lost, ...]:
        needed = _needed(attempt, votes) if attempt.is_looked else await self._of_gone_tags(attempt)
        doubtful = {key: size for key, size in needed.items() if not _is_there(self._listed, key, size)}
        for prefix in {holder_of(key) for key in doubtful} - self._again.keys():
            self._again[prefix] = {entry.name: entry.size for entry in await root_view.objects_of(self._store, prefix)}
        gone = [key for key, size in doubtful.items() if not _is_there(self._again, key, size)]
        if not gone:
            return ()
        now = await root_view.logged(self._store, attempt.tag, attempt.attempt)
        if now is None or now.status != "checkpoint":
            return ()
        return tuple([await self._lost(key) for key in sorted(gone)])

    async def _of_gone_tags(self, attempt: AttemptView) -> dict[str, int | None]:
        """Its own objects, and those to which it refers, whose tags are not at the root."""
        if self._tags is None:
            self._tags = frozenset(await root_view.tags(self._store))
        names = (attempt.prefix, *attempt.logged.holders)
        return {f"{one}/": None for one in names if one.rpartition("/")[0] not in self._tags}

    async def _lost(self, key: str) -> Lost:
        prefix, name = holder_of(key), key.rpartition("/")[2]
        left = self._again[prefix].get(name)
        if left is not None:
            return Lost(key=key, removed="", bytes_left=left)
        key = key.rstrip("/")
        if self._again[prefix]:
            return Lost(key=key, removed=key)
        tag = prefix.rpartition("/")[0]
        attempts = [entry for entry in await self._store.list(tag) if entry.is_prefix and AttemptId.parse(entry.name)]
        return Lost(key=key, removed=prefix if attempts else tag)


def _is_there(listed: Mapping[str, Mapping[str, int]], key: str, size: int | None) -> bool:
    name = key.rpartition("/")[2]
    there = listed.get(holder_of(key), {})
    if not name:
        return any(map(holds_bytes, there))
    found = there.get(name)
    return found is not None and size in (None, found)


def _needed(attempt: AttemptView, votes: Votes) -> dict[str, int | None]:
    """The keys that `attempt` needs, with their sizes in bytes where these are known. `<tag>/<attempt>/` stands for any chunks
    object of another attempt.
    """
    commit = attempt.commit
    assert commit is not None
    needed: dict[str, int | None] = {ballot_key(commit): commit.ballot.size}
    if commit.plan is not None:
        needed[joint_plan_key(commit)] = commit.plan.size
    referred: set[str] = set()
    known = {rank: vote for rank, vote in votes.items() if isinstance(vote, Vote)}
    for vote in known.values():
        if vote.index is not None:
            needed[object_key(attempt.prefix, vote.index.name)] = vote.index.size
        needed |= {object_key(attempt.prefix, ref.name): ref.size for ref in vote.objects}
        referred |= set(vote.refers)
    indexed = {index_rank(name) for name in attempt.sizes}
    for rank in range(commit.world_size):
        if rank not in known and rank not in indexed:
            needed[object_key(attempt.prefix, index_name(rank))] = None
    if len(known) < commit.world_size:
        referred |= {f"{holder}/" for holder in commit.holders}
    return needed | dict.fromkeys(referred)


async def counted_votes(store: Store, commit: CommitRecord) -> dict[int, Vote | str]:
    """The votes that `commit` counted, by rank; in place of an unreadable vote, the reason."""
    try:
        votes = await ballots.votes_of(store, commit)
    except (DamagedError, NotFoundError, UnreadableError) as error:
        return dict.fromkeys(range(commit.world_size), str(error))
    return {rank: str(vote) if isinstance(vote, DamagedError) else vote for rank, vote in votes.items()}


async def check_whole(store: Store, checkpoint: Checkpoint, patience: Patience) -> None:
    """Raise DamagedError if anything is missing that `checkpoint` needs, before a load fills anything."""
    with patience.looks() as looks:
        while True:
            try:
                now = await root_view.logged(store, checkpoint.tag, checkpoint.attempt)
                lost = () if now is None else await Wholeness(store).lost_now(now)
            except UnreadableError as error:
                await looks.unreadable(error)
                continue
            if not lost:
                return
            if await looks.is_lost(lost[0].key):
                advice = lost_advice(store.url, checkpoint.tag, lost)
                message = f"{checkpoint.tag} is not whole: {lost_text(lost)}{_of_ranks(lost)}; {advice}"
                raise DamagedError(message, key=lost[0].key, rank=lost[0].rank)


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


async def without_directory(store: Store, checkpoints: Collection[Checkpoint], absence_s: float) -> set[str]:
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
