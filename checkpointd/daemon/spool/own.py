"""One rank's part of the spool: it takes snapshots in, so that their slots are free before the root has anything of them.

Invariants
  SPOOL-7  Taking a snapshot in needs nothing of the root: neither that it answers, nor that the attempt is announced there. A
      root that is away costs references to older chunks, and no save.
  SPOOL-8  If the spool has no room, or its disk fails, nothing of the snapshot stays in it, and the caller writes the snapshot
      to the root.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from checkpointd.commit.facts import Order
from checkpointd.config import CommitConfig
from checkpointd.daemon.spool.directory import SpoolDirectory
from checkpointd.daemon.spool.record import SpoolRecord, record_key
from checkpointd.daemon.spool.shards import RootSpool, SpooledShard, drop_record, put_record, rules_of
from checkpointd.errors import CheckpointdError, StoreError, StoreFullError
from checkpointd.layout.manifest import Vote
from checkpointd.phrases import byte_size
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import write_shard
from checkpointd.pipeline.write.vote import drop_shard, yes_vote
from checkpointd.store.base import Capabilities, Entry, ObjectWriter, Store
from checkpointd.store.passing import PassingStore

log = logging.getLogger("checkpointd")

MARGIN_BYTES = 1 << 20
"""The bytes beside the tensors for which a save reserves room, beside its state tree: the index, the record, directories."""


class SpooledWrites(PassingStore):
    """`root`, but the objects of one attempt are written to `spool`."""

    def __init__(self, root: Store, spool: Store, prefix: str) -> None:
        super().__init__(root)
        self._spool, self._below = spool, f"{prefix}/"

    @property
    def capabilities(self) -> Capabilities:
        return self._spool.capabilities

    def _of(self, key: str) -> Store:
        return self._spool if f"{key}/".startswith(self._below) else self._store

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await self._of(key).put_if_absent(key, data, durable=durable)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        return await self._of(key).open_writer(key, size_hint=size_hint, size_max=size_max)

    async def stat(self, key: str) -> int | None:
        return await self._of(key).stat(key)

    async def list(self, prefix: str) -> list[Entry]:
        return await self._of(prefix).list(prefix)

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self._of(key).delete(key, durable=durable)


@dataclass(eq=False, slots=True)
class OwnSpool:
    """The spool as the writer of one rank uses it for the saves of one start, with `nonce`. `uid`: the user whose they are."""

    directory: SpoolDirectory
    root: RootSpool
    nonce: str
    uid: int

    @property
    def timeout_s(self) -> float:
        return self.directory.config.timeout_s

    def left_s(self, shard: SpooledShard) -> float:
        """The seconds until a shard that an earlier process has left is given up: at least as long as any save has."""
        since_s = max(0.0, self.directory.clock() - shard.record.spooled_at)
        return max(self.timeout_s - since_s, shard.record.commit_timeout_s)

    def committed_at_root(self, info: AttemptInfo) -> None:
        """A save that asked for `latest`, and went straight to the root, has committed: older ones may go (QUEUE-3)."""
        key = (self.root.name, self.uid, info.rank)
        self.directory.drop_older(key, (info.attempt.start, info.n), info.prefix)

    async def take(self, job: PersistJob, commit: CommitConfig, keeps_before: Order) -> SpooledShard | None:
        """Make the snapshot of `job` durable in the spool. None if the spool has no room, or fails (SPOOL-8).

        Raises Stopped if the attempt was decided meanwhile.
        """
        counts, info = self.directory.counts, job.info
        nbytes = job.shard.nbytes + len(job.shard.tree) + MARGIN_BYTES
        try:
            if not await self.directory.reserve(nbytes):
                counts.direct_full += 1
                words = "%s: the spool %s has no room for %s; rank %d writes straight to the root"
                log.warning(words, info.prefix, self.directory.config.directory, byte_size(nbytes), info.rank)
                return None
        except StoreError as error:
            self._say_failed(info, error)
            return None
        try:
            return await self._taken(job, commit, keeps_before)
        except (CheckpointdError, OSError) as error:
            full = isinstance(error, StoreFullError)
            counts.direct_full += full
            if full:
                log.warning("%s: %s; rank %d writes straight to the root", info.prefix, error, info.rank)
            else:
                self._say_failed(info, error)
            await self._forget(info)
            return None
        except BaseException:
            await asyncio.shield(self._forget(info))
            raise
        finally:
            self.directory.give_back(nbytes)

    async def _taken(self, job: PersistJob, commit: CommitConfig, keeps_before: Order) -> SpooledShard:
        store = SpooledWrites(job.store, self.root.store, job.info.prefix)
        spooling, bps = replace(job, store=store), job.rates.disk_bps
        if job.base is not None and not job.base.is_read:
            spooling = spooling.in_full()  # its chunks would have to be read from the root first (DEDUP-4)
        try:
            stored = await write_shard(spooling)
        except CheckpointdError as error:
            if not spooling.makes_deltas or isinstance(error, StoreFullError):
                raise
            log.warning(
                "%s: rank %d cannot read older chunks, and writes all in full: %s", job.info.prefix, job.info.rank, error
            )
            await drop_shard(store, job.info)
            job.progress.begin(job.shard.nbytes)
            spooling = spooling.in_full()
            stored = await write_shard(spooling)
        job.rates.disk_bps = bps  # codecs are chosen for the root, which is slower
        spooling.check_stop()
        vote = await yes_vote(spooling, stored)
        record = self._record(job.info, vote, commit, keeps_before)
        shard = await put_record(self.root, record)
        self.directory.counts.spooled += 1
        return shard

    def _record(self, info: AttemptInfo, vote: Vote, commit: CommitConfig, keeps_before: Order) -> SpoolRecord:
        return SpoolRecord(
            url=self.root.url,
            nonce=self.nonce,
            uid=self.uid,
            vote=vote,
            required=info.required,
            keeps_before=keeps_before,
            commit_timeout_s=commit.timeout_s,
            on_no_progress=commit.on_no_progress,
            read_back=commit.read_back,
            retention=rules_of(commit.retention),
            spooled_at=self.directory.clock(),
            writer=writer(),
        )

    def _say_failed(self, info: AttemptInfo, error: BaseException) -> None:
        self.directory.counts.direct_failed += 1
        log.error("%s: the spool failed, so rank %d writes straight to the root: %s", info.prefix, info.rank, error)

    async def _forget(self, info: AttemptInfo) -> None:
        """Remove what was written of the shard, its record first (SPOOL-2): it may be there although its put has failed."""
        try:
            await drop_record(self.root.store, record_key(info.prefix, info.rank))
            await drop_shard(self.root.store, info)
        except CheckpointdError as error:
            log.warning("%s: leftovers stay in the spool until the next start: %s", info.prefix, error)
