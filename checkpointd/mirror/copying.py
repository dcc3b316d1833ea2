"""Copies one checkpoint from the origin to the mirror, object by object, in the order of docs/ORDERING.md.

Invariants
  MIRRORCOPY-1  The outcome is put last, and only if this process still holds the mirror, and everything that the checkpoint
      needs is durable there: its own objects, and the objects of older attempts that its indexes name.
  MIRRORCOPY-2  Each piece of an object that an index names was compared with its digest: when it was copied, when it was found
      at the mirror and read there, or for an earlier checkpoint of the mirror that names the same piece. Earlier ones prove
      nothing about what is healed, nor about objects of attempts that a damaged checkpoint of the mirror needs.
  MIRRORCOPY-3  Indexes come first. So collections at the mirror keep the objects of older attempts that they name, and once all
      objects are there, the copy checks that no earlier mark condemned one (as DEDUP-3 for a save).
  MIRRORCOPY-4  An object at the mirror is removed to be copied again only if its attempt has no commit there, nor had one by
      what the catalog says, no checkpoint there refers to it, its bytes are not whole, and this process holds the mirror. An
      earlier process that mirrored cannot commit any more then: it looks for a newer start after its last object and before its
      outcome.
  MIRRORCOPY-5  Any other object that is not whole is replaced (TRANSFER-3), and only if the origin's has every piece whole that
      the checkpoint needs, and every other one that an attempt at the mirror names and that may be whole there. So no
      checkpoint at the mirror loses what it has.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError, NotFoundError, RootGoneError, StoreError, UnreadableError
from checkpointd.layout.ballot import BallotTable, table_bytes
from checkpointd.layout.indexes import Index
from checkpointd.layout.joint_plan import joint_plan_ref
from checkpointd.layout.keys import (
    BALLOT,
    JOINT_PLAN,
    OUTCOME,
    AttemptId,
    holder_of,
    object_key,
    vote_name,
)
from checkpointd.layout.manifest import LISTING_BYTES_MAX, ObjectRef, Outcome, Vote, decode
from checkpointd.mirror import bare_holders
from checkpointd.mirror.hold import Hold
from checkpointd.mirror.named_pieces import named_pieces
from checkpointd.mirror.pieces import StoredPiece, pieces_by_object
from checkpointd.mirror.provenance import is_same
from checkpointd.mirror.transfer import copied, is_whole
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.ballots import ballot_ref, put_for_commit
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog, note_outcome, record_of
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
    """A checkpoint is not copied now; the others are. `holder`: an attempt at the mirror that is not as its catalog says, and
    that it needs.
    """

    def __init__(self, why: Why, words: str, *, holder: str = "") -> None:
        super().__init__(words)
        self.why: Why = why
        self.holder = holder


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


@dataclass(slots=True, eq=False)
class CheckpointCopy:
    """One checkpoint on its way to the mirror. `proof`: the newest checkpoint there. `outcomes`: the commits that the origin
    knows, by attempt. `on_bytes` is called with the bytes of chunks objects that were copied or compared.

    `heals`: the mirror has the checkpoint already, and something of it is damaged there. `had`: the checkpoints of the mirror
    as its catalog says. `coming`: those of the origin that the mirror may get, if it does not have them. `doubted`: attempts of
    whose objects at the mirror one may be damaged.
    """

    origin: Store
    mirror: Store
    checkpoint: Checkpoint
    hold: Hold
    proof: Checkpoint | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    on_bytes: Callable[[int], None] = lambda _: None
    heals: bool = False
    had: Container[str] = ()
    coming: Container[str] = ()
    doubted: Container[str] = ()
    amount: Amount = field(default_factory=Amount)
    _needed: dict[str, set[str]] = field(default_factory=dict)
    """The names of the objects of each holder that the checkpoint needs."""
    _commits: dict[str, Checkpoint] = field(default_factory=dict)
    """The holders that are checkpoints at the mirror."""
    _bare: set[str] = field(default_factory=set)
    """The holders whose records must name what was copied into them."""
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
        outcome, key = self.checkpoint.outcome, f"{self.prefix}/{OUTCOME}"
        data = await self._source.get(key)
        if not is_same(decode(data, Outcome, key), outcome):
            raise LeftOut("unreadable", f"{key} changed while it was looked at")
        ballot, parts, votes = await self._ballot()
        plan = await self._joint_plan()
        for name in (name for vote in votes for name in vote.refers):
            self._needed.setdefault(holder_of(name), set()).add(name.rpartition("/")[2])
        await self.hold.check()
        if not self.heals:
            await self._announce()
        for holder in sorted(self._needed):
            await self._ready(holder)
        await run_workers([partial(self._copy_rank, vote) for vote in votes], RANKS_AT_ONCE)
        await self._check_holders()
        await self._put_votes(parts)
        await self._put(BALLOT, ballot)
        if plan:
            await self._put(JOINT_PLAN, plan)
        await self.hold.reach(outcome.order)
        await self.hold.check()  # MIRRORCOPY-1, MIRRORCOPY-4
        await (self._commit_again(data) if self.heals else self._commit(data))
        for holder in sorted(self._bare):
            tag, _, attempt = holder.rpartition("/")
            await bare_holders.note_kept(self.mirror, tag, _attempt(attempt))

    # --- what the origin has --------------------------------------------------------------------------------------

    async def _check_there(self) -> None:
        """Raise LeftOut if the origin does not have the checkpoint any more, and RootGoneError if it has nothing any more."""
        view = await catalog.view(self.origin, self.checkpoint.tag, self.checkpoint.attempt)
        if not view.sizes and not await self.origin.list(""):
            raise RootGoneError(f"{self.origin.url} shows nothing any more: was it unmounted, or removed?")
        if view.state == "deleted" or not view.sizes:
            raise LeftOut("removed", f"{self.checkpoint.tag} was removed at {self.origin.url} while it was copied")

    async def _ballot(self) -> tuple[bytes, list[memoryview], list[Vote]]:
        """The ballot, the bytes of its votes by rank, and the votes, all checked."""
        outcome, key = self.checkpoint.outcome, f"{self.prefix}/{BALLOT}"
        ref, ranks = ballot_ref(outcome), outcome.world_size
        data = await self._source.get(key, size_max=ref.size)
        view = memoryview(data)
        table = BallotTable.of(view[: table_bytes(ranks)], ranks, ref, key)
        if len(data) != ref.size:
            raise DamagedError(f"{key} has {len(data)} bytes, not {ref.size}", key=key)
        parts = [view[table.starts[rank] : table.starts[rank + 1]] for rank in range(ranks)]
        votes = uncollected(lambda: [table.vote(rank, part, self.prefix, key) for rank, part in enumerate(parts)])
        return data, parts, votes

    async def _joint_plan(self) -> bytes:
        """The joint plan; empty if the checkpoint has none."""
        ref, key = self.checkpoint.outcome.plan, f"{self.prefix}/{JOINT_PLAN}"
        if ref is None:
            return b""
        data = await self._source.get(key, size_max=LISTING_BYTES_MAX)
        if joint_plan_ref(data) != ref:
            raise DamagedError(f"{key} is damaged: its bytes are not those that the outcome names", key=key)
        return data

    # --- holders ----------------------------------------------------------------------------------------------------

    async def _ready(self, holder: str) -> None:
        """See to it that objects of `holder`, an older attempt, may lie at the mirror."""
        tag, _, name = holder.rpartition("/")
        view = await catalog.view(self.mirror, tag, _attempt(name))
        if view.state == "committed" and view.outcome is not None:
            self._commits[holder] = Checkpoint(tag, view.attempt, view.outcome, view.read_back)
            return
        is_lost = view.state == "in-doubt" and bool(view.sizes) and holder in self.had and holder in self.coming
        if is_lost or view.state in ("damaged", "unreadable"):
            fault = "gone" if is_lost else view.state
            raise LeftOut("blocked", f"the outcome of {holder} at {self.mirror.url}, which it needs, is {fault}", holder=holder)
        self._bare.add(holder)
        if view.state == "aborted" or (
            view.state == "deleted" and not await bare_holders.is_kept(self.mirror, holder, self._needed[holder])
        ):
            if self.heals:  # what is left of it may be all that the checkpoint has
                raise LeftOut("blocked", f"objects of {holder}, which it needs, were removed at {self.mirror.url}")
            await self._begin_again(tag, view.attempt, holder)
        elif view.state == "deleted":
            return
        there = await catalog.view(self.origin, tag, view.attempt)
        kept = await bare_holders.kept_at_origin(self.origin, there)
        known = self.outcomes.get(holder, there.outcome)
        await bare_holders.mark_bare(self.mirror, tag, view.attempt, {*kept, *self._needed[holder]}, known)

    async def _begin_again(self, tag: str, attempt: AttemptId, holder: str) -> None:
        """Forget a holder whose objects were given up at the mirror before this checkpoint needed them."""
        if not await bare_holders.is_free(self.mirror, holder, {self.prefix, holder}):
            raise LeftOut(
                "blocked",
                f"it needs objects of {holder} that were removed at {self.mirror.url}, while another checkpoint there needs "
                "others of them",
            )
        log.info("%s at %s was given up there, and is needed again: it is copied anew", holder, self.mirror.url)
        await self.hold.check()
        await bare_holders.forget(self.mirror, tag, attempt)

    async def _check_holders(self) -> None:
        """Check that all that the indexes name at older attempts is there and will stay (MIRRORCOPY-3)."""
        for holder, names in self._needed.items():
            if not await bare_holders.is_kept(self.mirror, holder, names):
                raise LeftOut("blocked", f"objects of {holder}, which it needs, were just removed at {self.mirror.url}")
            for name in names:
                if await self.mirror.stat(object_key(holder, name)) is None:
                    raise LeftOut("blocked", f"{object_key(holder, name)}, which it needs, is gone at {self.mirror.url}")

    # --- objects ----------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Announce the attempt at the mirror. If a recovery there gave up an earlier copy, forget that first."""
        tag, attempt, outcome = self.checkpoint.tag, self.checkpoint.attempt, self.checkpoint.outcome
        view = await catalog.view(self.mirror, tag, attempt)
        if view.state == "aborted":
            await bare_holders.forget(self.mirror, tag, attempt)
        intent = record_of("intent", tag, attempt, n=outcome.order[1], step=outcome.step)
        await CatalogLog(self.mirror).append(intent)

    async def _copy_rank(self, vote: Vote) -> None:
        """Copy the index of one rank, and the objects that it names."""
        ref = vote.index
        if ref is None:
            raise DamagedError(f"{self.prefix}/{vote_name(vote.rank)} names no index")
        key = object_key(self.prefix, ref.name)
        data = await self._source.get(key, size_max=ref.size)
        index = uncollected(lambda: catalog.index_in(data, self.prefix, vote, ref))
        await self._put(key.removeprefix(f"{self.prefix}/"), data)
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
        replaces = False
        if size is not None:
            if size == named.size and await self._settled_whole(key, pieces):
                self.amount.found += needed
                return
            replaces = self.heals or named.held_by in self._commits or (not named.held_by and self.prefix in self.had)
            replaces = replaces or await bare_holders.is_needed(self.mirror, key)
            await self.hold.check()
            if replaces:
                await self._replace(key, named.size, pieces)
            else:
                await self.mirror.delete(key)
        if not replaces:
            await self.hold.check()
            await self._transfer(key, named.size, pieces)
        self.amount.copied += named.size

    async def _replace(self, key: str, size: int, pieces: Sequence[StoredPiece]) -> None:
        """Let a whole object take the place of a damaged one that a checkpoint at the mirror needs (MIRRORCOPY-5)."""
        blocked = f"it needs {key}, which is damaged at {self.mirror.url}, and "
        try:
            others = {*await named_pieces(self.mirror, key, self._source)}.difference(pieces)
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
            if replaces and not await bare_holders.is_kept(self.mirror, holder_of(key), {key.rpartition("/")[2]}):
                raise LeftOut("blocked", f"{key}, which it needs, was just removed at {self.mirror.url}")

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

    async def _put(self, name: str, data: bytes) -> None:
        """Make the small object `name` durable, which the outcome names, or a vote that it counts."""
        if not self.heals:
            await put_for_commit(self.mirror, self.prefix, name, data)
            return
        key = f"{self.prefix}/{name}"
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

    async def _commit_again(self, data: bytes) -> None:
        """Put the outcome if the one at the mirror is damaged, or cannot be read."""
        view = await catalog.view(self.mirror, self.checkpoint.tag, self.checkpoint.attempt)
        if view.state in ("damaged", "unreadable"):
            await self.mirror.put(f"{self.prefix}/{OUTCOME}", data)
        elif view.state != "committed":
            raise LeftOut("removed", f"{self.checkpoint.tag} was removed at {self.mirror.url} while it was copied again")

    async def _commit(self, data: bytes) -> None:
        """Put the outcome, and tell the catalog."""
        outcome, tag, attempt = self.checkpoint.outcome, self.checkpoint.tag, self.checkpoint.attempt
        if not await self.mirror.put_if_absent(f"{self.prefix}/{OUTCOME}", data):
            outcome = await catalog.read_outcome(self.mirror, tag, attempt)
            if not is_same(outcome, self.checkpoint.outcome):
                raise LeftOut("blocked", f"{self.prefix} was decided otherwise at {self.mirror.url}: {outcome.outcome}")
        first = self.checkpoint.outcome
        if first.world_size and (await catalog.view(self.mirror, tag, attempt)).state != "committed":
            raise StoreError(f"{self.prefix} was removed at {self.mirror.url} while it was copied")
        await note_outcome(self.mirror, outcome)


def _attempt(text: str) -> AttemptId:
    found = AttemptId.parse(text)
    if found is None:
        raise DamagedError(f"{text!r} is not an attempt")
    return found


class _Proved:
    """The pieces of one rank that checkpoints at the mirror name, so that they were compared before (MIRRORCOPY-2)."""

    def __init__(self, copy: CheckpointCopy, rank: int) -> None:
        self._copy, self._rank = copy, rank
        self._known: dict[str, set[StoredPiece]] = {}
        self._read: set[str] = set()

    async def covers(self, holder: str, key: str, pieces: Sequence[StoredPiece]) -> bool:
        """Whether all `pieces` of the object `key` of `holder` were compared before. That proves nothing while an object of the
        holder may be damaged: what was whole then may be wrong now.
        """
        if holder in self._copy.doubted:
            return False
        for checkpoint in filter(None, (self._copy.proof, self._copy._commits.get(holder))):
            if checkpoint.prefix not in self._read:
                self._read.add(checkpoint.prefix)
                await self._learn(checkpoint)
            if self._known.get(key, set()).issuperset(pieces):
                return True
        return False

    async def _learn(self, checkpoint: Checkpoint) -> None:
        if self._rank >= checkpoint.outcome.world_size:
            return
        try:
            index: Index = await read_index(self._copy.mirror, checkpoint, self._rank)
        except (DamagedError, UnreadableError) as error:
            log.warning("%s at the mirror proves nothing: %s", checkpoint.prefix, error)
            return
        for named, pieces in zip(index.objects, pieces_by_object(index), strict=True):
            self._known.setdefault(named.key(checkpoint.prefix), set()).update(pieces)
