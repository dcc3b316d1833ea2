"""Finds missing objects of committed attempts from listings and votes; it reads no chunk and no index.

Newer checkpoints refer to objects of older tags. A person who removes files by hand may therefore break checkpoints of other
tags, and this must be seen at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.errors import StoreError
from checkpointd.layout.keys import BALLOT, AttemptId, holder_of, holds_bytes, index_name, index_rank, object_key
from checkpointd.layout.manifest import Vote
from checkpointd.phrases import listed
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.ballots import ballot_ref
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

Votes = Mapping[int, Vote | str]
"""By rank; in place of an unreadable vote, the reason."""
NO_VOTES: Votes = MappingProxyType({})


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """An object that a checkpoint needs and that is gone, or whose size has changed."""

    key: str
    removed: str
    """The largest thing that was removed with it: `<tag>`, `<tag>/<attempt>`, or the key itself. Empty if the object is
    still there, with another size."""
    bytes_left: int | None = None


class Wholeness:
    """Finds missing objects, given `attempts` that were listed a moment ago.

    If an object seems to be gone, its attempt is listed once more, since a checkpoint may be committed or removed in between.
    """

    def __init__(self, store: Store, attempts: Iterable[AttemptView]) -> None:
        self._store = store
        known = list(attempts)
        self._listed: dict[str, Mapping[str, int]] = {a.prefix: a.sizes for a in known if a.entry is None}
        self._recorded = {a.prefix for a in known if a.entry is not None}
        self._again: dict[str, Mapping[str, int]] = {}

    async def lost(self, attempt: AttemptView, votes: Votes = NO_VOTES) -> tuple[Lost, ...]:
        """The missing objects of `attempt`, which is committed; empty if none is missing or the storage cannot be read now.

        `votes` name the index and the chunks objects of their ranks. Without a rank's vote, only a missing index is noticed,
        and an older attempt of which no chunks object is left. If nobody has looked at the objects of `attempt`, only an older
        attempt that is gone is noticed.
        """
        try:
            return await self._looked(attempt, votes)
        except StoreError as error:
            log.info("%s: cannot tell whether it is whole: %s", attempt.prefix, error)
            return ()

    async def _looked(self, attempt: AttemptView, votes: Votes) -> tuple[Lost, ...]:
        needed = _needed(attempt, votes) if attempt.entry is None else self._of_unknown(attempt)
        doubtful = {key: size for key, size in needed.items() if not _is_there(self._listed, key, size)}
        for prefix in {holder_of(key) for key in doubtful} - self._again.keys():
            self._again[prefix] = {entry.name: entry.size for entry in await catalog.objects_of(self._store, prefix)}
        gone = [key for key, size in doubtful.items() if not _is_there(self._again, key, size)]
        if not gone or (await catalog.view(self._store, attempt.tag, attempt.attempt)).state != "committed":
            return ()
        return tuple([await self._lost(key) for key in sorted(gone)])

    def _of_unknown(self, attempt: AttemptView) -> dict[str, int | None]:
        """The objects to which it refers, of attempts that are not at the root."""
        holders = attempt.outcome.holders if attempt.outcome is not None else ()
        return {f"{one}/": None for one in holders if one not in self._recorded and one not in self._listed}

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
    outcome = attempt.outcome
    assert outcome is not None
    needed: dict[str, int | None] = {f"{attempt.prefix}/{BALLOT}": ballot_ref(outcome).size}
    referred: set[str] = set()
    known = {rank: vote for rank, vote in votes.items() if isinstance(vote, Vote)}
    for vote in known.values():
        if vote.index is not None:
            needed[object_key(attempt.prefix, vote.index.name)] = vote.index.size
        needed |= {object_key(attempt.prefix, ref.name): ref.size for ref in vote.objects}
        referred |= set(vote.refers)
    indexed = {index_rank(name) for name in attempt.sizes}
    for rank in range(outcome.world_size):
        if rank not in known and rank not in indexed:
            needed[object_key(attempt.prefix, index_name(rank))] = None
    if len(known) < outcome.world_size:
        referred |= {f"{holder}/" for holder in outcome.holders}
    return needed | dict.fromkeys(referred)


def lost_text(lost: Sequence[Lost]) -> str:
    """`it needs a/b/c, which is gone: somebody removed a`; empty if nothing is lost."""
    if not lost:
        return ""
    more = f" and {len(lost) - 1} other object{'s' if len(lost) > 2 else ''}" if len(lost) > 1 else ""
    removed = sorted({one.removed for one in lost if one.removed})
    if not removed:
        return f"it needs {lost[0].key}{more}, whose size was changed to {lost[0].bytes_left} bytes"
    are = "which are gone" if more else "which is gone"
    return f"it needs {lost[0].key}{more}, {are}: somebody removed {'it' if removed == [lost[0].key] else listed(removed, 4)}"


def lost_advice(root: str, tag: str, lost: Sequence[Lost]) -> str:
    """Advice for a checkpoint that is not whole any more."""
    things = sorted({one.removed or one.key for one in lost})
    what = things[0] if len(things) == 1 else "what is gone"
    return f"bring {what} back from a copy of the root, or remove what is left: {command('delete', *at_tag(root, tag))}"
