"""Reads committed checkpoints back from the storage and records the result, before older ones may be removed.

Invariants
  READBACK-1  `verified` is put only after every chunk of every rank was read after the commit, past the cache, and agreed with
      its digests along outcome, vote and index: by one reader of all of it, or by each rank of its own shard.
  READBACK-2  `damaged` is put here only on proof: bytes that were read twice and are wrong, or a part that is not there while
      the attempt still is a checkpoint. A storage that fails proves nothing. Where both records are there, `damaged` counts.
  READBACK-3  No checkpoint goes for another one (retention, gc, a tag that was saved again) unless one of those that stay has
      `verified` and no `damaged`, and no load has passed it over. A user who deletes a checkpoint by name is not asked.
  READBACK-4  In the background a rank reads its own shard, while no save of its writer is in flight: at most one block is under
      way when one begins. It takes at most SHARE of the time, and nobody waits for it.

Each rank reads its own shard, since one reader of all would have to read as many times as much as a rank writes. The last rank
to finish sees the records of all, puts `verified` and removes them, so that they do not add to what a listing has to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError
from checkpointd.layout.keys import VERIFIED, AttemptId, read_back_name, read_back_rank
from checkpointd.layout.manifest import Index, Outcome, ReadBack, Verified, decode, encode
from checkpointd.pipeline.read.chunks import group_chunks, read_chunks
from checkpointd.pipeline.read.plan import rank_reads
from checkpointd.pipeline.read.verify import CheckpointVerdict, Damage, checked_index, record_verdict, verify_proved
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.identity import writer
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

BLOCK = LoadConfig(reads=1, block_bytes=4 << 20, retry_s=30.0)
"""One read at a time, so that what begins meanwhile waits for little. What cannot be read now is no damage, and is left."""
QUIET_S = 1.0
"""How long the last save has ended before anything is read."""
SHARE = 0.25
"""The share of the time that may go into reading."""
PENDING_MAX = 8
"""Checkpoints that wait to be read back; where there are more, the oldest are left out."""


async def survivor(store: Store, staying: Sequence[Checkpoint]) -> Checkpoint | None:
    """One of `staying` that was read back whole, so that others may go (READBACK-3); None where none can be proved whole.

    Where none has the record they are read back now, newest first; what is damaged is recorded and passed over.
    """
    newest_first = sorted(staying, key=lambda c: c.outcome.order, reverse=True)
    found = await recorded(store, newest_first)
    if found is not None:
        return found
    for checkpoint in newest_first:
        view = await catalog.view(store, checkpoint.tag, checkpoint.attempt)
        if view.state == "committed" and view.read_back == "no" and (await read_back(store, checkpoint)).whole:
            return checkpoint
    return None


async def recorded(store: Store, newest_first: Sequence[Checkpoint]) -> Checkpoint | None:
    """The first that was read back whole, by its record, and that no load has passed over; nothing else is read."""
    for checkpoint in newest_first:
        view = await catalog.view(store, checkpoint.tag, checkpoint.attempt)
        if view.state == "committed" and view.read_back == "whole" and not view.passed_over:
            return checkpoint
    return None


async def read_back(store: Store, checkpoint: Checkpoint) -> CheckpointVerdict:
    """Read all of `checkpoint` past the cache, and record what was found."""
    verdict = await verify_proved(store, checkpoint, BLOCK)  # READBACK-2
    await record_verdict(store, checkpoint, verdict)
    if not verdict.whole:
        first = (verdict.damage or verdict.unreadable)[0].message
        log.error("%s was read back, and %s: %s", checkpoint.prefix, "is not whole" if verdict.damage else "cannot be", first)
    return verdict


# --- in the background --------------------------------------------------------------------------------------------


class ReadBackStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's writer has read back: its own shards, since it began."""

    reading: str | None
    """The tag that is being read back now."""
    bytes_read: int
    whole: str | None
    """The newest tag of which this rank's shard was found whole."""
    damaged: tuple[str, ...]
    """Tags of which it was found damaged."""


@dataclass(eq=False)
class BackgroundReadBack:
    """Reads back the shards that one rank has committed, in the background (READBACK-4). All of it runs on the writer's loop.

    `on_damage` is called when a shard turns out to be damaged.
    """

    store: Store
    on_damage: Callable[[], None] = lambda: None
    _pending: list[tuple[Checkpoint, int]] = field(default_factory=list)
    """With the rank whose shard it is; the newest last."""
    _task: asyncio.Task[None] | None = None
    _saving: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _not_before_s: float = 0.0
    _reading: str | None = None
    _bytes_read: int = 0
    _whole: tuple[tuple[int, int], str] | None = None
    _damaged: tuple[str, ...] = ()

    @property
    def status(self) -> ReadBackStatus:
        """How far it has come; any thread may ask."""
        return ReadBackStatus(
            reading=self._reading,
            bytes_read=self._bytes_read,
            whole=self._whole[1] if self._whole else None,
            damaged=self._damaged,
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While a save is in flight, which the block is, nothing is read."""
        self._saving += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._saving -= 1
            self._wait_at_least(QUIET_S)
            if not self._saving:
                self._idle.set()

    def committed(self, checkpoint: Checkpoint, rank: int) -> None:
        """`rank` has stored a shard of `checkpoint`, which is committed: read it back when there is time."""
        self._pending = [*self._pending, (checkpoint, rank)][-PENDING_MAX:]
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Give up what is not read yet."""
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Newest first; what was begun is finished before, so that frequent saves do not keep all from being finished."""
        while self._pending:
            await self._turn()
            if not self._pending:
                return
            checkpoint, rank = self._pending.pop()
            self._reading = checkpoint.tag
            try:
                await self._read(checkpoint, rank)
            except CheckpointdError as error:
                log.warning("%s: rank %d cannot read back what it stored: %s", checkpoint.prefix, rank, error)
            except Exception:  # a defect of ours must not end it
                log.exception("%s: reading it back failed in an unforeseen way; please report it", checkpoint.prefix)
            finally:
                self._reading = None

    async def _turn(self) -> None:
        """Return when something may be read."""
        loop = asyncio.get_running_loop()
        while self._saving or loop.time() < self._not_before_s:
            if self._saving:
                await self._idle.wait()
            else:
                await asyncio.sleep(self._not_before_s - loop.time())

    def _wait_at_least(self, seconds: float) -> None:
        self._not_before_s = max(self._not_before_s, asyncio.get_running_loop().time() + seconds)

    async def _read(self, checkpoint: Checkpoint, rank: int) -> None:
        view = await catalog.view(self.store, checkpoint.tag, checkpoint.attempt)
        if view.state != "committed" or view.read_back != "no" or read_back_name(rank) in view.sizes:
            return  # it has gone, or was read by others
        nbytes, fault = await self._fault(checkpoint, rank)
        if fault is None:
            await _record_shard(self.store, checkpoint, rank, nbytes)
            if self._whole is None or self._whole[0] < checkpoint.outcome.order:
                self._whole = (checkpoint.outcome.order, checkpoint.tag)
        elif (await catalog.view(self.store, checkpoint.tag, checkpoint.attempt)).state == "committed":
            self.on_damage()
            log.error("%s: rank %d has read back what it stored, and it is not whole: %s", checkpoint.prefix, rank, fault)
            verdict = CheckpointVerdict(checkpoint.tag, str(checkpoint.attempt), nbytes, [Damage.of(fault, rank)])
            await record_verdict(self.store, checkpoint, verdict)
            self._damaged = (*self._damaged, checkpoint.tag)

    async def _fault(self, checkpoint: Checkpoint, rank: int) -> tuple[int, DamagedError | NotFoundError | None]:
        """Read the shard: how many bytes that was, and the first damage."""
        uncached, nbytes = PatientStore(self.store.uncached, Patience(BLOCK.retry_s, BLOCK.absence_s)), 0
        try:
            index = await _index(uncached, checkpoint, rank)
        except (DamagedError, NotFoundError) as error:
            return 0, error

        def count(read: int) -> None:
            nonlocal nbytes
            nbytes += read
            self._bytes_read += read

        for group in group_chunks(rank_reads(checkpoint.prefix, index), BLOCK.block_bytes):
            await self._turn()
            began = asyncio.get_running_loop().time()
            # Twice: a bit that flips on its way here says nothing of what is stored.
            found = await read_chunks(uncached, group.wanted, BLOCK, count)
            found = found and await read_chunks(uncached, group.wanted, BLOCK, count)
            if found:
                return nbytes, found[0]
            self._wait_at_least((asyncio.get_running_loop().time() - began) * (1 / SHARE - 1))
        return nbytes, None


async def _index(store: Store, checkpoint: Checkpoint, rank: int) -> Index:
    """The index of `rank`; where it is damaged, as it is when read once more (READBACK-2)."""
    try:
        return await checked_index(store, checkpoint, rank)
    except (DamagedError, NotFoundError):
        return await checked_index(store, checkpoint, rank)


async def _record_shard(store: Store, checkpoint: Checkpoint, rank: int, nbytes: int) -> None:
    """Record that the shard of `rank` is whole, and, where all others are, too, that the checkpoint is (READBACK-1)."""
    record = encode(ReadBack(rank=rank, nbytes=nbytes, writer=writer()))
    await store.put_if_absent(f"{checkpoint.prefix}/{read_back_name(rank)}", record)
    view = await catalog.view(store, checkpoint.tag, checkpoint.attempt)
    records = [f"{checkpoint.prefix}/{name}" for name in view.sizes if read_back_rank(name) is not None]
    if view.state != "committed" or len(records) < checkpoint.outcome.world_size:
        return
    if view.read_back == "no":
        try:
            total = sum([decode(await store.get(key), ReadBack, key).nbytes for key in records])
        except NotFoundError:
            return  # another rank was the last one, too
        verified = Verified(nbytes=total, uncached=True, writer=writer())
        await store.put_if_absent(f"{checkpoint.prefix}/{VERIFIED}", encode(verified))
    for key in records:
        await store.delete(key)


def checkpoint_of(outcome: Outcome) -> Checkpoint:
    """The checkpoint that `outcome`, a commit, makes."""
    attempt = AttemptId.parse(outcome.attempt)
    assert attempt is not None
    return Checkpoint(outcome.tag, attempt, outcome)
