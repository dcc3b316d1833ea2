"""Reads committed checkpoints back from the storage and records the result, before older ones may be removed.

Invariants
  READBACK-1  `verified` is put only after every chunk of every rank was read after the commit, past the cache, and verified
      along the chain of digests. Either one reader reads all of it, or each rank reads its own shard.
  READBACK-2  `damaged` is put here only on proof: bytes were read twice and are wrong, or an object is missing while the
      attempt still is a checkpoint. A storage that fails proves nothing. Of both records, the later one counts.
  READBACK-3  No checkpoint is removed in favour of another one (by retention, gc, or a new save of its tag) unless a checkpoint
      that stays has `verified` and no `damaged`, and no load has passed over it. This does not apply if a user deletes a
      checkpoint by name.
  READBACK-4  In the background, a rank reads its own shard only while no save of its writer is in flight, and if the writer is
      in the trainer's process, while it does not load. When a save or a load begins, at most one block is still being read.
      Reading takes at most SHARE of the time, and nobody waits for it.

Each rank reads its own shard, since one reader would have to read the shards of all ranks. The last rank to finish sees the
records of all ranks, puts `verified`, and removes the records, so that later listings are short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from checkpointd.commit.branches import commits_of
from checkpointd.commit.log import is_sound
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import object_key, read_back_name, read_back_rank
from checkpointd.layout.log_records import LoggedAttempt, VerifyRecord
from checkpointd.layout.manifest import ReadBack, decode, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.chunks import bytes_together, group_chunks, read_chunks
from checkpointd.pipeline.read.plan import rank_reads
from checkpointd.pipeline.read.verify import CheckpointVerdict, Damage, checked_index, record_verdict, verify_proved
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.wholeness import missing_of
from checkpointd.pipeline.workers import stopped
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

BLOCK = LoadConfig(reads=1, block_bytes=4 << 20, retry_s=30.0)
"""One small read at a time, so that a save that begins meanwhile waits only for a moment."""
QUIET_S = 1.0
"""The seconds after the last save or load before reading begins."""
SHARE = 0.25
"""The share of the time that reading may take."""
CLOSE_S = 10.0
PENDING_MAX = 8
"""The most checkpoints that wait to be read back. If there are more, the oldest are left out."""


async def survivor(store: Store, staying: Sequence[LoggedAttempt]) -> LoggedAttempt | None:
    """One of `staying` that was read back whole, so that others may go (READBACK-3); None if none can be proved whole. One of a
    branch that was left does not count, since no load takes it.

    If none is recorded as whole, they are read back now, newest first. Damaged ones are recorded.
    """
    attempts = (await root_view.state_of(store)).attempts
    known = (attempts.get(c.prefix) for c in commits_of(staying) if not c.left_behind)
    for one in sorted((one for one in known if one is not None and is_sound(one)), key=lambda one: not one.verified):
        if await missing_of(store, one) is None and (one.verified or (await read_back(store, one)).whole):
            return one
    return None


async def read_back(store: Store, checkpoint: LoggedAttempt) -> CheckpointVerdict:
    """Read all of `checkpoint` past the cache, and record the result."""
    verdict = await verify_proved(store, checkpoint, BLOCK)  # READBACK-2
    await record_verdict(store, checkpoint, verdict)
    if not verdict.whole:
        first = (verdict.damage or verdict.unreadable)[0].message
        log.error("%s was read back, and %s: %s", checkpoint.prefix, "is not whole" if verdict.damage else "cannot be", first)
    return verdict


# --- in the background --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BackgroundReadBack:
    """Reads back the shards that one rank has committed, in the background (READBACK-4), on the writer's loop.

    `on_damage` is called when a shard proves damaged, this rank's or another's of the same checkpoint.
    """

    store: Store
    on_damage: Callable[[], None] = lambda: None
    _pending: list[tuple[LoggedAttempt, int]] = field(default_factory=list)
    """Checkpoints with the rank whose shard to read, newest last."""
    _task: asyncio.Task[None] | None = None
    _busy: set[object] = field(default_factory=set)
    """A token for each save and load in flight."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _not_before_s: float = 0.0

    @property
    def is_paused(self) -> bool:
        return bool(self._busy)

    @property
    def has_work(self) -> bool:
        return self._task is not None and not self._task.done()

    def pause(self, token: object) -> None:
        """Pause reading until `resume` is called with the same token."""
        self._busy.add(token)
        self._idle.clear()

    def resume(self, token: object) -> None:
        """End the pause of `token`, if there is one."""
        self._busy.discard(token)
        self._wait_at_least(QUIET_S)
        if not self._busy:
            self._idle.set()

    def committed(self, checkpoint: LoggedAttempt, rank: int) -> None:
        """Read back the shard of `rank` in the committed `checkpoint` when there is time."""
        self._pending = [*self._pending, (checkpoint, rank)][-PENDING_MAX:]
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop reading, and drop the checkpoints that were not read yet. Waits at most CLOSE_S for the storage."""
        self._pending.clear()
        if self._task is not None and not await stopped([self._task], CLOSE_S):
            log.warning("%s has not answered for %g s, and is not waited for", self.store.url, CLOSE_S)

    async def _run(self) -> None:
        """Read the newest first, but finish each shard, so that frequent saves do not keep all of them unfinished."""
        while self._pending:
            await self._turn()
            if not self._pending:
                return
            checkpoint, rank = self._pending.pop()
            try:
                await self._read(checkpoint, rank)
            except CheckpointdError as error:
                log.warning("%s: rank %d cannot read its shard back: %s", checkpoint.prefix, rank, error)
            except Exception:  # a defect in checkpointd must not end the reader
                log.exception("%s: reading it back failed in an unforeseen way; please report it", checkpoint.prefix)

    async def _turn(self) -> None:
        """Return when reading is allowed."""
        loop = asyncio.get_running_loop()
        while self.is_paused or loop.time() < self._not_before_s:
            if self.is_paused:
                await self._idle.wait()
            else:
                await asyncio.sleep(self._not_before_s - loop.time())

    def _wait_at_least(self, seconds: float) -> None:
        self._not_before_s = max(self._not_before_s, asyncio.get_running_loop().time() + seconds)

    async def _read(self, checkpoint: LoggedAttempt, rank: int) -> None:
        one = await root_view.logged(self.store, checkpoint.prefix)
        name = object_key(checkpoint.prefix, read_back_name(rank))
        if one is None or one.status != "checkpoint" or one.verified or await self.store.stat(name) is not None:
            return  # the checkpoint was removed, or others have read it
        if one.damaged:  # another rank's shard is, and this one is not read any more
            self.on_damage()
            return
        nbytes, fault = await self._fault(checkpoint, rank)
        if fault is None:
            await _record_shard(self.store, checkpoint, rank, nbytes)
        elif await root_view.is_checkpoint(self.store, checkpoint.prefix):
            self.on_damage()
            log.error("%s: rank %d has read its shard back, and it is damaged: %s", checkpoint.prefix, rank, fault)
            verdict = CheckpointVerdict(checkpoint.tag, str(checkpoint.id), nbytes, [Damage.of(fault, rank)])
            await record_verdict(self.store, checkpoint, verdict)

    async def _fault(self, checkpoint: LoggedAttempt, rank: int) -> tuple[int, DamagedError | NotFoundError | None]:
        """Read the shard. Returns the number of bytes, and the first damage."""
        uncached, nbytes = PatientStore(self.store.uncached, Patience(BLOCK.retry_s, BLOCK.absence_s)), 0
        try:
            index = await _index(uncached, checkpoint, rank)
        except (DamagedError, NotFoundError) as error:
            return 0, error

        def count(read: int) -> None:
            nonlocal nbytes
            nbytes += read

        block_bytes, gap_bytes = bytes_together(uncached, BLOCK), uncached.capabilities.gap_bytes
        for group in group_chunks(rank_reads(checkpoint.prefix, index), block_bytes, gap_bytes):
            await self._turn()
            began = asyncio.get_running_loop().time()
            # Read twice, since a bit that flips during the transfer proves nothing about the stored bytes.
            found = await read_chunks(uncached, group.wanted, BLOCK, count)
            found = found and await read_chunks(uncached, group.wanted, BLOCK, count)
            if found:
                return nbytes, found[0]
            self._wait_at_least((asyncio.get_running_loop().time() - began) * (1 / SHARE - 1))
        return nbytes, None


async def _index(store: Store, checkpoint: LoggedAttempt, rank: int) -> Index:
    """The index of `rank`. If it is damaged, it is read once more (READBACK-2)."""
    try:
        return await checked_index(store, checkpoint, rank)
    except (DamagedError, NotFoundError):
        return await checked_index(store, checkpoint, rank)


async def _record_shard(store: Store, checkpoint: LoggedAttempt, rank: int, nbytes: int) -> None:
    """Record that the shard of `rank` is whole. If all shards are, record that the checkpoint is verified (READBACK-1)."""
    record = encode(ReadBack(rank=rank, nbytes=nbytes, writer=writer()))
    await store.put_if_absent(object_key(checkpoint.prefix, read_back_name(rank)), record, durable=False)
    one = await root_view.logged(store, checkpoint.prefix)
    if one is None or one.status != "checkpoint":
        return
    sizes = await root_view.sizes_of(store, checkpoint.prefix)
    records = [object_key(checkpoint.prefix, name) for name in sizes if read_back_rank(name) is not None]
    if len(records) < checkpoint.commit.world_size:
        return
    if one.read_back == "no":
        total = await _recorded_bytes(store, records)
        if total is None:
            return
        await RootLog.of(store).add(VerifyRecord(attempt=checkpoint.prefix, nbytes=total))
    for key in records:
        await store.delete(key, durable=False)


async def _recorded_bytes(store: Store, records: list[str]) -> int | None:
    """The bytes that `records` say were read back; None if one of them is gone or torn."""
    total = 0
    for key in records:
        try:
            total += decode(await store.get(key), ReadBack, key).nbytes
        except NotFoundError:
            return None  # another rank saw all records, too, and has removed them
        except DamagedError:
            await store.delete(key)  # a power cut tore it, so nothing shows that this shard was read back
            return None
    return total
