"""Roots of any size, written by the pipelines that jobs use, and a disk that counts the calls it gets.

A root is built on a disk that leaves out fsync: its bytes are those of real saves, and 10,000 of them take minutes.
No object is made here. So a benchmark that uses these roots goes on working when the format changes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from typing_extensions import Buffer

from benchmarks.costs import Work
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.errors import NotFoundError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.keys import AttemptId, default_tag
from checkpointd.layout.log_records import AnnounceRecord
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.pages import page_buffer, page_up
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress, ShardTensor, aligned
from checkpointd.pipeline.write.dedup import Bases
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.rates import Rates
from checkpointd.store.base import Store
from checkpointd.store.posix.disk import Child, FileStatus, WritableFile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore

DEADLINE_S = 3600.0
ITEM = 4
LOOKS = 20_000


# --- counting ------------------------------------------------------------------------------------------------


class CountingDisk(OsDisk):
    """The file system, with a count of its calls in `work`. If not `durable`, nothing is synced."""

    def __init__(self, anchor: str, *, durable: bool = True) -> None:
        super().__init__(anchor)
        self.durable, self.work = durable, Work()

    async def create(self, path: str) -> WritableFile:
        self.work.opened += 1
        return CountedFile(await super().create(path), self)

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        data = await super().read(path, size_max, past_cache=past_cache)
        self._has_read(len(data))
        return data

    async def read_each(self, paths: Sequence[str], size_max: int) -> list[bytes | OSError]:
        found = await super().read_each(paths, size_max)
        for data in found:
            self._has_read(0 if isinstance(data, OSError) else len(data))
        return found

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        size = await super().read_at(path, offset, out, past_cache=past_cache)
        self._has_read(size)
        return size

    async def read_parts(self, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
        self._has_read(sum(part.nbytes for part in parts))
        return await super().read_parts(path, offset, parts, then)

    def _has_read(self, size: int) -> None:
        self.work.opened += 1
        self.work.read_bytes += size

    async def sync_file(self, path: str) -> None:
        self.work.fsyncs += 1
        if self.durable:
            await super().sync_file(path)

    async def sync_directory(self, path: str) -> None:
        self.work.fsyncs += 1
        if self.durable:
            await super().sync_directory(path)

    async def status(self, path: str) -> FileStatus:
        self.work.stats += 1
        return await super().status(path)

    async def status_each(self, paths: Sequence[str]) -> list[FileStatus]:
        self.work.stats += len(paths)
        return await super().status_each(paths)

    async def size(self, path: str) -> int:
        self.work.stats += 1
        return await super().size(path)

    async def children(self, path: str, *, links: bool = False, sizes: bool = True) -> list[Child]:
        found = await super().children(path, links=links, sizes=sizes)
        self.work.listings += 1
        self.work.stats += len(found) if sizes else 0
        return found


class CountedFile:
    """`file`, whose syncs count on `disk`."""

    def __init__(self, file: WritableFile, disk: CountingDisk) -> None:
        self._file, self._disk = file, disk

    async def write_at(self, offset: int, data: Buffer) -> None:
        await self._file.write_at(offset, data)

    async def reserve(self, size: int) -> None:
        await self._file.reserve(size)

    async def truncate(self, size: int) -> None:
        await self._file.truncate(size)

    async def sync(self) -> None:
        self._disk.work.fsyncs += 1
        if self._disk.durable:
            await self._file.sync()

    async def close(self) -> None:
        await self._file.close()


@asynccontextmanager
async def counted(path: Path, *, durable: bool = True) -> AsyncIterator[tuple[Store, Work]]:
    """The store at `path`, and the work that it causes from now on."""
    disk = CountingDisk(str(path), durable=durable)
    try:
        yield PosixStore(path, disk), disk.work
    finally:
        await disk.close()


# --- saves ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Saver:
    """Saves of `world_size` ranks in one start, with `tensors` float32 tensors that the ranks hold together by rows, each rank
    `row` elements of each. All values are `value`, so two saves of one value are equal.
    """

    store: Store
    start: int
    world_size: int = 1
    tensors: int = 4
    row: int = 16
    retention: Retention = field(default_factory=Retention)
    dedup: bool = False
    poll_s: tuple[float, float] = (0.001, 0.01)
    """How long the coordinator pauses between its looks, first and later: much shorter than in a job, to build quickly."""
    layouts: dict[int, tuple[ShardTensor, ...]] = field(default_factory=dict)
    """The tensors and the plans of each rank, which its saves share."""

    def as_job(self, store: Store) -> Saver:
        """The same on `store`, with the pauses that a job makes."""
        usual = CommitConfig()
        return replace(self, store=store, poll_s=(usual.poll_min_s, usual.poll_max_s))

    def writer(self) -> WriterState:
        """The state of a rank's writer that has just started."""
        commit = CommitConfig(
            timeout_s=DEADLINE_S,
            poll_min_s=self.poll_s[0],
            poll_max_s=self.poll_s[1],
            retention=self.retention,
            on_no_progress="ignore",
            read_back=False,
        )
        return WriterState(store=self.store, persist=self._persist, commit=commit)

    @property
    def _persist(self) -> PersistConfig:
        return PersistConfig(
            compression="none", dedup=self.dedup, chunk_bytes=1 << 20, block_bytes=1 << 20, budget_bytes=8 << 20
        )

    def info(self, number: int, rank: int = 0) -> AttemptInfo:
        """Save `number` of the start, at the tag of step `number`."""
        return AttemptInfo(
            tag=default_tag(number),
            attempt=AttemptId(self.start, 0),
            rank=rank,
            world_size=self.world_size,
            step=number,
            n=number,
        )

    @property
    def names(self) -> list[str]:
        """The names of the tensors in the model."""
        return [f"layer.{number}.weight" for number in range(self.tensors)]

    def box(self, rank: int) -> Box:
        """The rows of every tensor that `rank` holds."""
        return Box((rank, 0), (1, self.row))

    def shard(self, rank: int, value: float) -> Shard:
        """The snapshot of one rank."""
        buffer = page_buffer(page_up(aligned(self.row * ITEM) * self.tensors))
        buffer.view(np.float32)[:] = value
        model = tree.Dict("dict", tuple((name, tree.Tensor(f"model.{name}")) for name in self.names))
        seed = tree.Bytes(random.Random(rank).randbytes(32))  # as each rank has its own random-number generators
        root = tree.Dict("dict", (("state", tree.Dict("dict", (("model", model), ("seed", seed)))), ("client_state", None)))
        return Shard(buffer=buffer, tensors=self.layout(rank), tree=tree.encode(root))

    def layout(self, rank: int) -> tuple[ShardTensor, ...]:
        """The same tensors for each save of a rank."""
        if rank not in self.layouts:
            shape, size = (self.world_size, self.row), aligned(self.row * ITEM)
            scope, box = ("rank", whole(shape)) if self.world_size == 1 else ("global", self.box(rank))
            self.layouts[rank] = tuple(
                ShardTensor(f"model.{name}", "float32", shape, box, scope, number * size, self.row * ITEM, ITEM)  # type: ignore[arg-type]
                for number, name in enumerate(self.names)
            )
        return self.layouts[rank]

    async def vote(self, number: int, rank: int, value: float) -> None:
        """Everything that a rank writes before the attempt is decided."""
        info = self.info(number, rank)
        job = PersistJob(
            store=self.store,
            info=info,
            shard=self.shard(rank, value),
            config=self._persist,
            rates=Rates(),
            progress=ShardProgress(),
            stopped=lambda: False,
            base=await Bases(self.store).newest(info) if self.dedup else None,
        )
        await persist(job)

    async def votes(self, number: int, value: float) -> None:
        """The votes of all ranks but the coordinator's, after the announcement. Without it the attempt is a stranger's."""
        if self.world_size > 1:
            info = self.info(number, 0)
            await RootLog.of(self.store).add(AnnounceRecord(attempt=info.prefix, n=info.n, step=info.step))
        for rank in range(1, self.world_size):
            await self.vote(number, rank, value)

    async def coordinate(
        self, state: WriterState, number: int, value: float, on_phase: Callable[[Phase], None] = lambda _: None
    ) -> None:
        """The whole attempt of rank 0, which commits what the others have voted for."""
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        attempt = Attempt(state, self.info(number), deadline=deadline, on_phase=on_phase)
        await attempt.run(_ready(self.shard(0, value)))
        if attempt.error is not None:
            raise attempt.error

    async def save(self, state: WriterState, number: int) -> None:
        """One save of all ranks."""
        await self.votes(number, float(number))
        await self.coordinate(state, number, float(number))


async def _ready(shard: Shard) -> Shard:
    return shard


async def history(path: Path, tags: int, ranks: int = 1) -> None:
    """Make a root with `tags` checkpoints of `ranks` ranks each; the newest was read back."""
    async with counted(path, durable=False) as (store, _):
        start = (await starts.take(store, ranks)).start
        saver = Saver(store=store, start=start, world_size=ranks)
        state = saver.writer()
        for number in range(tags):
            await saver.save(state, number)
        await read_back(store, (await root_view.checkpoints(store))[0])


async def most_pending(path: Path, keep: int, saves: int) -> int:
    """The most attempts that had committed and were not over, of `saves` saves back to back whose retention keeps `keep`."""
    async with counted(path) as (store, _):
        start = (await starts.take(store, 1)).start
        saver = Saver(store=store, start=start, retention=Retention(keep_last=keep)).as_job(store)
        state, most, running = saver.writer(), 0, set[asyncio.Task[None]]()
        first = (await root_view.checkpoints(store))[0].commit.step + 1
        for number in range(first, first + saves):
            decided = asyncio.Event()
            work = saver.coordinate(state, number, float(number), lambda phase, d=decided: d.set() if phase in FINAL else None)  # type: ignore[misc]
            running.add(asyncio.create_task(work))
            await decided.wait()
            running = {task for task in running if not task.done()}
            most = max(most, len(running))
        await asyncio.gather(*running)
        await state.tidier.close()
    return most


async def removed(path: Path, tag: str) -> None:
    """Return once `tag` is not a checkpoint at `path` any more."""
    async with PosixStore(path, read_only=True) as store:
        for _ in range(LOOKS):
            try:
                await root_view.find(store, tag)
            except NotFoundError:
                return
            await asyncio.sleep(0.005)
    raise RuntimeError(f"{tag} should have been removed from {path}, and is still there")
