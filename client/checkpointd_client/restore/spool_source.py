"""The spool of this node as the source of a load: shards that are not at the root yet, and objects that need not be read there.

Invariants
  NEAR-1  A byte from the spool is used only after the check that a byte from the root has to pass: the chain of digests that
      begins at the commit in the log, or for an undecided attempt, at the record in the spool, which has a checksum.
  NEAR-2  An object that is missing in the spool, too short there, or cannot be read, is read at the root. If its bytes are
      wrong, all ranks load the same checkpoint once more, from the root alone.
  NEAR-3  An attempt that is not decided is loaded only if it may still commit: every rank has its shard in the spool of its
      node, the attempt is of the newest start or survives in it, and no rank has given it up.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from checkpointd.commit.facts import Order
from checkpointd.commit.log import is_admitted
from checkpointd.config import LoadConfig, Ranks
from checkpointd.daemon.spool.record import SPOOLED, SpoolRecord, decode_record
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, SidecarError, StoreError
from checkpointd.layout.indexes import Index, decode_index
from checkpointd.layout.keys import holds_bytes, object_key
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, LogState
from checkpointd.layout.manifest import LISTING_BYTES_MAX, BallotRef, digest
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.ranks.load_messages import Holding, SpooledOffer
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.store_source import StoredSource

log = logging.getLogger("checkpointd")
T = TypeVar("T")

LOOK_S = 30.0
"""How long the disk of the spool may take to tell what is in it."""


class SpoolFirst(PassingStore):
    """`root`, but the bytes of tensors are read from `spool` if they are there (NEAR-2)."""

    def __init__(self, root: Store, spool: Store) -> None:
        super().__init__(root)
        self._spool = spool
        self._absent: set[str] = set()
        """The objects that the spool lacks, or that it could not give."""
        self.nbytes = 0
        """The bytes that were read from the spool."""

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        if not await self._near(key, lambda: self._spool.get_range(key, offset, out), out.nbytes):
            await self._store.get_range(key, offset, out)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        if self._may_have(key):
            found: list[T] = []

            async def read() -> None:
                found.append(await self._spool.get_parts(key, offset, parts, then))

            if await self._near(key, read, sum(part.nbytes for part in parts)):
                return found[0]
        return await self._store.get_parts(key, offset, parts, then)

    def _may_have(self, key: str) -> bool:
        return holds_bytes(key.rpartition("/")[2]) and key not in self._absent

    async def _near(self, key: str, read: Callable[[], object], nbytes: int) -> bool:
        """Whether `read`, of the object `key`, has read it from the spool."""
        if not self._may_have(key):
            return False
        try:
            await read()  # type: ignore[misc]  # an awaitable of any kind
        except (NotFoundError, DamagedError, StoreError) as error:
            if not isinstance(error, NotFoundError):
                log.warning("%s is read at the root: %s", key, error)
            self._absent.add(key)
            return False
        self.nbytes += nbytes
        return True


@dataclass(slots=True)
class NodeSpoolView:
    """The shards in the spool of this node, in the directory `path` for one root. Writes nothing."""

    path: str
    writer: WriterThread
    store: PosixStore = field(init=False)
    _records: dict[tuple[str, int], SpoolRecord] = field(default_factory=dict)
    """By attempt (`<tag>/<attempt>`) and rank: the shards of undecided attempts."""
    _prefixes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store = PosixStore(self.path, anchor=os.path.dirname(self.path), read_only=True)

    def look(self) -> None:
        """Read what is in the spool. Raises nothing: what cannot be read is not there."""
        try:
            self.writer.call(self._look(), LOOK_S)
        except CheckpointdError as error:
            log.warning("the spool %s cannot be read: %s", self.path, error)

    async def _look(self) -> None:
        names = [entry.name for entry in await self.store.list(SPOOLED)]
        for name in [name for name in names if "." not in name]:
            key = f"{SPOOLED}/{name}"
            try:
                record = decode_record(await self.store.get(key), key)
            except NotFoundError:
                continue  # it was uploaded, and left the spool, after the listing
            except DamagedError as error:
                log.warning("a shard in the spool is not used: %s", error)
                continue
            if f"{name}.superseded" in names:
                continue
            self._prefixes.add(record.prefix)
            if f"{name}.committed" not in names:
                self._records[record.prefix, record.vote.rank] = record

    def offers(self, rank: int) -> tuple[SpooledOffer, ...]:
        """The undecided attempts of which the spool has the shard of `rank`."""
        records = [record for (_, of), record in self._records.items() if of == rank]
        return tuple(
            SpooledOffer(
                tag=record.vote.tag,
                attempt=record.vote.attempt,
                step=record.vote.step,
                order=record.order,
                world_size=record.vote.world_size,
                nonce=record.nonce,
            )
            for record in records
        )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The attempts (`<tag>/<attempt>`) of which it has any shard."""
        return tuple(sorted(self._prefixes))

    def view(self, prefix: str) -> CheckpointView:
        """The undecided attempt `prefix`, as far as its shards lie here. Raises DamagedError or NotFoundError."""
        records = {rank: record for (of, rank), record in self._records.items() if of == prefix}
        if not records:
            raise NotFoundError(f"the spool {self.path} has nothing of {prefix}")
        indexes = self.writer.call(self._indexes(records), LOOK_S)
        first = next(iter(records.values()))
        vote = first.vote
        commit = CommitRecord(
            attempt=prefix,
            n=first.order[1],
            step=vote.step,
            world_size=vote.world_size,
            save_latest=vote.save_latest,
            ballot=BallotRef(digest="", size=0),  # nobody has committed it; the view is of this load alone
            decided_by=vote.rank,
            writer=writer(),
        )
        return CheckpointView(LoggedAttempt.of(commit), dict(sorted(indexes.items())))

    async def _indexes(self, records: Mapping[int, SpoolRecord]) -> dict[int, Index]:
        found = {}
        for rank, record in records.items():
            ref = record.vote.index
            assert ref is not None  # `decode_record` takes no other
            key = object_key(record.prefix, ref.name)
            data = await self.store.get(key, size_max=LISTING_BYTES_MAX)
            if digest(data) != ref.digest:
                raise DamagedError(f"{key} in the spool is damaged", key=key, rank=rank)
            found[rank] = uncollected(lambda data=data, plan=ref.plan, key=key: decode_index(data, plan, key))  # type: ignore[misc]
        return found

    def close(self) -> None:
        self.writer.call(self.store.close(), LOOK_S)


@dataclass
class SpooledSource(StoredSource):
    """An undecided attempt, of which only this node's shards are known."""

    def _widen(self, ranks: Iterable[int]) -> None:
        if missing := set(ranks) - self._world.indexes.keys():
            raise SidecarError(f"the spool of this node has no shard of rank {min(missing)}")


def spooled_source(
    near: NodeSpoolView, root: Store, prefix: str, writer: WriterThread, config: LoadConfig, timeout_s: float, ranks: Ranks
) -> SpooledSource:
    """The source of the undecided attempt `prefix`. DamagedError, NotFoundError or SidecarError if this rank cannot load it."""
    view = near.view(prefix)
    if ranks.rank not in view.indexes:
        raise SidecarError(f"the spool of this node has no shard of rank {ranks.rank}")
    store = SpoolFirst(root, near.store)
    return SpooledSource(store, writer, config, timeout_s, ranks, view.checkpoint, kind="spool", known=view)


def in_every_spool(holdings: Mapping[int, Holding], ranks: Ranks) -> list[SpooledOffer]:
    """The undecided attempts of which every rank has its shard in the spool of its node, newest first (NEAR-3)."""
    if holdings.keys() != set(range(ranks.world_size)):
        return []
    everywhere = set.intersection(*({_identity(one) for one in note.spooled} for note in holdings.values()))
    fitting = [one for one in holdings[0].spooled if _identity(one) in everywhere and one.world_size == ranks.world_size]
    return sorted(fitting, key=_order, reverse=True)


def _identity(one: SpooledOffer) -> tuple[str, str, int, int, str]:
    return (one.tag, one.attempt, one.step, one.world_size, one.nonce)


def _order(one: SpooledOffer) -> Order:
    return one.order


def may_commit(state: LogState, offered: SpooledOffer) -> bool:
    """Whether the attempt may still commit at the root with this state of the log (NEAR-3). It may still be announced."""
    prefix = f"{offered.tag}/{offered.attempt}"
    one = state.attempts.get(prefix)
    if one is not None and one.status != "undecided":
        return False
    return is_admitted(state, prefix) and starts.is_taken(state, offered.order[0], offered.nonce)
