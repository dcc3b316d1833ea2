"""Copies one checkpoint from the origin to the mirror, object by object, in the order of docs/ORDERING.md.

Invariants
  MIRRORCOPY-1  The mirror's log gets an attempt as a whole, in one entry: its announcement, its commit, and a `hold` for each
      older attempt of which the log knew nothing. The entry is put only while the newest start is that of this process, and
      once everything that the checkpoint needs is durable: its own objects, and those of older attempts that its indexes name.
  MIRRORCOPY-2  Each piece of an object that an index names was compared with its digest: when it was copied, when it was found
      at the mirror and read there, or for an earlier checkpoint of the mirror that names the same piece. Earlier ones prove
      nothing about what is healed, nor about objects of attempts that a damaged checkpoint of the mirror needs.
  MIRRORCOPY-3  Nobody removes an object that the checkpoint needs while it is copied. What lies in an attempt of which the log
      knows nothing, nobody removes. Of attempts that it knows, only those objects are relied on that are of a checkpoint, or to
      which the base refers. The log takes the entry only if these are checkpoints still (LOG-10).
  MIRRORCOPY-4  An object that is not whole is replaced (TRANSFER-3), and only if the origin's has every piece whole that the
      checkpoint needs, and every other one that a checkpoint at the mirror names and that may be whole there. So no checkpoint
      at the mirror loses what it has.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from checkpointd.commit.log import check_all, may_be_held
from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError, NotFoundError, RootGoneError, UnreadableError
from checkpointd.layout.ballot import BallotTable, table_bytes
from checkpointd.layout.indexes import Index
from checkpointd.layout.joint_plan import joint_plan_ref
from checkpointd.layout.keys import holder_of, object_key, vote_name
from checkpointd.layout.log_records import AnnounceRecord, HoldRecord, LoggedAttempt, LogState, Record
from checkpointd.layout.manifest import LISTING_BYTES_MAX, ObjectRef, Vote
from checkpointd.mirror.hold import Hold
from checkpointd.mirror.named_pieces import named_pieces
from checkpointd.mirror.pieces import StoredPiece, pieces_by_object
from checkpointd.mirror.planning import doubted
from checkpointd.mirror.transfer import copied, is_whole
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import ballot_key, joint_plan_key, put_named, votes_of
from checkpointd.pipeline.root.indexes import index_in
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.workers import run_workers, uncollected
from checkpointd.store.base import SMALL_BYTES_MAX, Store, each
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")
T = TypeVar("T")

RANKS_AT_ONCE = 4
RETRY_S = 30.0
"""How long reads at the origin that fail are tried again, before the checkpoint is left for later."""

Why = Literal["removed", "damaged", "unreadable", "blocked"]
"""Why a checkpoint is not copied: it was removed at the origin; it is damaged there; it cannot be read there now; or the mirror
has what stands in its way."""


class LeftOut(Exception):
    """A checkpoint is not copied now; the others are."""

    def __init__(self, why: Why, words: str) -> None:
        super().__init__(words)
        self.why: Why = why


class OriginStore(PatientStore):
    """The origin, of which nothing is written. What cannot be read there leaves one checkpoint out, and ends no round."""

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        try:
            yield
        except UnreadableError as error:
            raise LeftOut("unreadable", str(error)) from error

    @property
    def uncached(self) -> Store:
        return OriginStore(self._store.uncached, self._patience, self._on_answer, self._on_absence)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        async with self._reading():
            return await super().get(key, size_max=size_max)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        async with self._reading():
            return await super().get_parts(key, offset, parts, then)


@dataclass(slots=True)
class Amount:
    """The bytes of chunks objects that were copied, and the needed ones of objects that were there already."""

    copied: int = 0
    found: int = 0


async def nothing_begins(_: Collection[str]) -> None:
    """Note nothing."""


@dataclass(slots=True, eq=False)
class CheckpointCopy:
    """One checkpoint on its way to the mirror, whose log has the state `ours`. `heals`: the mirror has the checkpoint already,
    and something of it is damaged there.

    `on_bytes` is called with the bytes of chunks objects that were copied or compared; `begins` with the attempts of which the
    mirror's log knows nothing, before the first object of them is put.
    """

    origin: Store
    mirror: Store
    checkpoint: LoggedAttempt
    hold: Hold
    ours: LogState
    on_bytes: Callable[[int], None] = lambda _: None
    begins: Callable[[Collection[str]], Awaitable[None]] = nothing_begins
    heals: bool = False
    amount: Amount = field(default_factory=Amount)
    _needed: dict[str, set[str]] = field(default_factory=dict)
    """The keys of the objects of each holder that the checkpoint needs."""
    _base: LoggedAttempt | None = None
    """The checkpoint at the mirror that keeps what the copy finds there of older attempts."""
    _source: OriginStore = field(init=False)

    def __post_init__(self) -> None:
        self._source = OriginStore(self.origin, Patience(RETRY_S, ABSENCE_S), on_absence=self._check_there)

    @property
    def prefix(self) -> str:
        """`<tag>/<attempt>`."""
        return self.checkpoint.prefix

    async def run(self) -> Amount:
        """Copy it. Raises LeftOut if it cannot be copied, FencedError if the mirror has another holder, and StoreError if the
        storage of the mirror fails.
        """
        try:
            await self._run()
        except NotFoundError as error:
            await self._check_there()
            raise LeftOut("damaged", f"{error} at {self.origin.url}") from error
        except DamagedError as error:
            raise LeftOut("damaged", str(error)) from error
        return self.amount

    async def _run(self) -> None:
        commit = self.checkpoint.commit
        ballot, parts, votes = await self._read_ballot()
        plan = await self._read_joint_plan()
        for key in (key for vote in votes for key in vote.refers):
            self._needed.setdefault(holder_of(key), set()).add(key)
        await self.hold.check()
        held = sorted(holder for holder in self._needed if may_be_held(self.ours, holder))
        if not self.heals:
            self._base = await self._chosen_base()
            await self.begins((self.prefix, *held))
        await run_workers([partial(self._copy_rank, vote) for vote in votes], RANKS_AT_ONCE)
        await self._put_votes(parts)
        await self._put(ballot_key(commit), ballot)
        if plan:
            await self._put(joint_plan_key(commit), plan)
        state = await self.hold.check()
        if not self.heals:
            await self._commit(held)
        elif state.attempts[self.prefix].status != "checkpoint":
            raise LeftOut("removed", f"{self.checkpoint.tag} was removed at {self.mirror.url} while it was copied again")

    # --- what the origin has --------------------------------------------------------------------------------------

    async def _check_there(self) -> None:
        """Raise LeftOut if the origin does not have the checkpoint any more, and RootGoneError if it has nothing any more."""
        state = await root_view.state_of(self.origin)
        if not state.number:
            raise RootGoneError(f"{self.origin.url} shows nothing any more: was it unmounted, or removed?")
        one = state.attempts.get(self.prefix)
        if one is None or one.status != "checkpoint":
            raise LeftOut("removed", f"{self.checkpoint.tag} was removed at {self.origin.url} while it was copied")

    async def _read_ballot(self) -> tuple[bytes, list[memoryview], list[Vote]]:
        """The ballot, the bytes of its votes by rank, and the votes, all checked."""
        commit = self.checkpoint.commit
        key, ref, ranks = ballot_key(commit), commit.ballot, commit.world_size
        data = await self._source.get(key, size_max=ref.size)
        view = memoryview(data)
        table = BallotTable.of(view[: table_bytes(ranks)], ranks, ref, key)
        if len(data) != ref.size:
            raise DamagedError(f"{key} has {len(data)} bytes, not {ref.size}", key=key)
        parts = [view[table.starts[rank] : table.starts[rank + 1]] for rank in range(ranks)]
        votes = uncollected(lambda: [table.vote(rank, part, self.prefix, key) for rank, part in enumerate(parts)])
        return data, parts, votes

    async def _read_joint_plan(self) -> bytes:
        """The joint plan; empty if the checkpoint has none."""
        ref, key = self.checkpoint.commit.plan, joint_plan_key(self.checkpoint.commit)
        if ref is None:
            return b""
        data = await self._source.get(key, size_max=LISTING_BYTES_MAX)
        if joint_plan_ref(data) != ref:
            raise DamagedError(f"{key} is damaged: its bytes are not those that the commit names", key=key)
        return data

    # --- holders ----------------------------------------------------------------------------------------------------

    async def _chosen_base(self) -> LoggedAttempt | None:
        """The newest checkpoint at the mirror that keeps what this one needs of attempts that are none there any more, and that
        refers to most others which it needs (MIRRORCOPY-3); None if there is none, and none is needed.
        """
        known = {holder for holder in self._needed if not may_be_held(self.ours, holder)}
        removed = {holder for holder in known if self.ours.attempts[holder].status != "checkpoint"}
        at_hand = [a for a in self.ours.attempts.values() if a.status == "checkpoint" and removed <= _reach(a)]
        at_hand.sort(key=lambda one: (len(known & _reach(one)), one.order), reverse=True)
        keys = {key for holder in removed for key in self._needed[holder]}
        for one in at_hand if known else ():
            if not keys or keys <= await self._referred(one):
                return one
        if keys:
            raise LeftOut("blocked", f"it needs {min(keys)}, which was removed at {self.mirror.url}")
        return None

    async def _referred(self, one: LoggedAttempt) -> set[str]:
        """The keys of older attempts' objects to which the checkpoint at the mirror refers, as far as that can be read."""
        try:
            votes = await votes_of(self.mirror, one.commit)
        except (DamagedError, NotFoundError, UnreadableError) as error:
            log.warning("%s at the mirror keeps nothing for others: %s", one.prefix, error)
            return set()
        return {key for vote in votes.values() if isinstance(vote, Vote) for key in vote.refers}

    # --- objects ----------------------------------------------------------------------------------------------------

    async def _copy_rank(self, vote: Vote) -> None:
        """Copy the index of one rank, and the objects that it names."""
        ref = vote.index
        if ref is None:
            raise DamagedError(f"{self.prefix}/{vote_name(vote.rank)} names no index")
        key = object_key(self.prefix, ref.name)
        data = await self._source.get(key, size_max=ref.size)
        index = uncollected(lambda: index_in(data, self.prefix, vote, ref))
        await self._put(key, data)
        proved = _Proved(self, vote.rank)
        for named, pieces in zip(index.objects, pieces_by_object(index), strict=True):
            await self._copy_object(named, pieces, proved)

    async def _copy_object(self, named: ObjectRef, pieces: Sequence[StoredPiece], proved: _Proved) -> None:
        key = named.key(self.prefix)
        size, needed = await self.mirror.stat(key), sum(piece.stop - piece.start for piece in pieces)
        is_known = size == named.size and named.held_by and not self.heals
        if is_known and await proved.covers(named.held_by, key, pieces):
            self.on_bytes(needed)
            self.amount.found += needed
            return
        if size == named.size and await self._settled_whole(key, pieces):
            self.amount.found += needed
            return
        await self.hold.check()
        await (self._transfer(key, named.size, pieces) if size is None else self._replace(key, named.size, pieces))
        self.amount.copied += named.size

    async def _replace(self, key: str, size: int, pieces: Sequence[StoredPiece]) -> None:
        """Let a whole object take the place of one that is not (MIRRORCOPY-4)."""
        blocked = f"it needs {key}, which is damaged at {self.mirror.url}, and "
        try:
            others = {*await named_pieces(self.mirror, self.ours, key, self._source)}.difference(pieces)
        except (DamagedError, NotFoundError) as error:
            raise LeftOut("blocked", f"{blocked}which parts of it others need there cannot be told: {error}") from error
        log.warning("%s is damaged at %s: it is copied again", key, self.mirror.url)
        stay = [piece for piece in others if await self._may_be_whole(key, piece)]
        try:
            await self._transfer(key, size, sorted([*pieces, *stay]), replaces=True)
        except DamagedError as error:
            if not await is_whole(self._source, key, pieces, lambda _: None):
                raise DamagedError(f"{key} at {self.origin.url} is damaged: its digests do not match", key=key) from error
            raise LeftOut("blocked", f"{blocked}a part that others need there is damaged at {self.origin.url}") from error

    async def _may_be_whole(self, key: str, piece: StoredPiece) -> bool:
        """Whether the mirror may have this piece. Two reads must agree that it is wrong, since a bit may flip on the way."""
        try:
            for _ in range(2):
                if await is_whole(self.mirror, key, [piece], lambda _: None):
                    return True
        except UnreadableError:
            return True
        return False

    async def _settled_whole(self, key: str, pieces: Sequence[StoredPiece]) -> bool:
        """Whether the object is whole at the mirror, and durable from now on: who copied it may have died before it was."""
        try:
            if not await is_whole(self.mirror, key, pieces, self.on_bytes):
                return False
        except UnreadableError:
            if not self.heals:
                raise
            return False  # part of a disk may be broken
        try:
            await self.mirror.settle(key)
        except NotFoundError:
            return False
        return True

    async def _transfer(self, key: str, size: int, pieces: Sequence[StoredPiece], *, replaces: bool = False) -> None:
        """Copy the object; if it is wrong, once more from the storage of the origin itself."""

        async def check() -> None:
            await self.hold.check()

        async def transfer(source: Store) -> None:
            passed = 0

            def count(nbytes: int) -> None:
                nonlocal passed
                passed += nbytes
                self.on_bytes(nbytes)

            try:
                await copied(source, self.mirror, key, size, pieces, check=check, on_bytes=count, replaces=replaces)
            except DamagedError:
                self.on_bytes(-passed)
                raise

        try:
            await transfer(self._source)
        except DamagedError as error:
            log.warning("%s is read again from the storage itself: %s", key, error)
            await transfer(self._source.uncached)

    async def _put(self, key: str, data: bytes) -> None:
        """Make the small object `key` durable, which the commit names, or a vote that it counts."""
        if not self.heals:
            await put_named(self.mirror, key, data)
            return
        with suppress(DamagedError, NotFoundError, UnreadableError):
            if await self.mirror.uncached.get(key, size_max=len(data)) == data:
                return
        log.warning("%s is damaged at %s: it is copied again", key, self.mirror.url)
        await self.hold.check()
        await self.mirror.put(key, data)

    # --- the commit -------------------------------------------------------------------------------------------------

    async def _put_votes(self, parts: Sequence[memoryview]) -> None:
        """Put the votes, which need not be durable, for people who ask what the ranks said."""

        async def put(rank: int) -> None:
            key = object_key(self.prefix, vote_name(rank))
            await self.mirror.put_if_absent(key, bytes(parts[rank]), durable=False)

        await each(put, range(len(parts)))

    async def _commit(self, held: Sequence[str]) -> None:
        """Put the entry that makes it a checkpoint (MIRRORCOPY-1). `held`: the older attempts of which the log knew nothing."""
        commit, base = self.checkpoint.commit, self._base.prefix if self._base is not None else ""
        announced = AnnounceRecord(attempt=self.prefix, n=commit.n, step=commit.step, base=base)
        records: list[Record] = [announced, commit, *(HoldRecord(attempt=holder) for holder in held)]

        def wanted(state: LogState) -> list[Record]:
            return records if self.hold.holds(state) and self.prefix not in state.attempts else []

        state = await RootLog.of(self.mirror).append(wanted)
        one = state.attempts.get(self.prefix)
        if one is None or one.status != "checkpoint":
            await self.hold.check()
            raise LeftOut("blocked", f"the log of {self.mirror.url} does not take it: {check_all(state, records)}")


def _reach(one: LoggedAttempt) -> set[str]:
    """The checkpoint `one`, and the attempts to which it refers."""
    return {one.prefix, *one.holders}


class _Proved:
    """The pieces of one rank that checkpoints at the mirror name, so that they were compared before (MIRRORCOPY-2)."""

    def __init__(self, copy: CheckpointCopy, rank: int) -> None:
        self._copy, self._rank = copy, rank
        self._doubted = doubted(copy.ours)
        self._known: dict[str, set[StoredPiece]] = {}
        self._read: set[str] = set()

    async def covers(self, holder: str, key: str, pieces: Sequence[StoredPiece]) -> bool:
        """Whether all `pieces` of the object `key` of `holder` were compared before. That proves nothing while an object of the
        holder may be damaged: what was whole then may be wrong now.
        """
        if holder in self._doubted:
            return False
        for one in filter(None, (self._copy._base, self._copy.ours.attempts.get(holder))):
            if one.status == "checkpoint" and one.prefix not in self._read:
                self._read.add(one.prefix)
                await self._learn(one)
            if self._known.get(key, set()).issuperset(pieces):
                return True
        return False

    async def _learn(self, checkpoint: LoggedAttempt) -> None:
        if self._rank >= checkpoint.commit.world_size:
            return
        try:
            index: Index = await read_index(self._copy.mirror, checkpoint, self._rank)
        except (DamagedError, UnreadableError) as error:
            log.warning("%s at the mirror proves nothing: %s", checkpoint.prefix, error)
            return
        for named, pieces in zip(index.objects, pieces_by_object(index), strict=True):
            self._known.setdefault(named.key(checkpoint.prefix), set()).update(pieces)
