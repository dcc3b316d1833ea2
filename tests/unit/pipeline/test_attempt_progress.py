"""Progress, in virtual time: at every moment it is what the store holds, and the time left is what it will be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from checkpointd.codec import Compression
from checkpointd.commit.machine import Phase, reached
from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.daemon.jobs import SaveJob
from checkpointd.daemon.status.model import SaveStatus
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress, Share
from checkpointd.store.base import ObjectWriter
from checkpointd.store.limited import LimitedStore, TokenBucket
from checkpointd.store.memory import MemoryStore, MemoryWriter
from checkpointd.testing import simloop
from tests.builders import begin_start, make_shard

MIB = 1 << 20
SHARD_BYTES = 64 * MIB
FSYNC_S = 5.0


class SlowWriter(MemoryWriter):
    """A disk that takes its time for what it is to make durable."""

    written = 0

    async def write_at(self, offset: int, data: object) -> None:
        await super().write_at(offset, data)  # type: ignore[arg-type]  # a buffer, as of its caller
        self.written += memoryview(data).nbytes  # type: ignore[arg-type]

    async def finish(self, size: int) -> None:
        await asyncio.sleep(FSYNC_S)
        await super().finish(size)


class SlowStore(MemoryStore):
    """Counts what was written, and keeps its writers."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[SlowWriter] = []

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        await super().open_writer(key, size_hint=size_hint, size_max=size_max)
        self.writers.append(SlowWriter(self, key, size_hint))
        return self.writers[-1]

    @property
    def written(self) -> int:
        return sum(writer.written for writer in self.writers)


@dataclass
class Look:
    """What is shown at one moment, and what is true then."""

    at: float
    shown: SaveStatus
    fraction: float
    written: int


@dataclass
class Saved:
    looks: list[Look] = field(default_factory=list)
    written_at: float = 0.0
    """When the last byte was in the store."""
    total: int = 0


def save_slowly(rate: float, compression: Compression, shard: Shard) -> Saved:
    """Save in the daemon's way at `rate` bytes per second, looking at it all the time."""
    store, saved = SlowStore(), Saved()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await begin_start(store, 1)
        state = WriterState(
            store=LimitedStore(store, TokenBucket(rate)),
            persist=PersistConfig(compression=compression),
            commit=CommitConfig(timeout_s=100_000.0),
        )
        info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=0, world_size=1, step=1, n=0)
        job = SaveJob("/root", "nonce", 0, state, info, left_s=100_000.0, on_change=lambda _: None)
        job.progress.clock = loop.time
        assert job._staged is not None
        job._staged.set_result(shard)
        while not reached(job.phase, Phase.PREPARED):
            status = job.status()
            saved.looks.append(Look(loop.time(), status, job.progress.fraction, store.written))
            await asyncio.sleep(0.05)
        await job.task
        assert job.phase is Phase.COMMITTED
        assert job.progress.raw_done == shard.nbytes

    simloop.run(1, main())
    saved.total = store.written
    saved.written_at = next(look.at for look in saved.looks if look.written == saved.total)
    return saved


@pytest.mark.parametrize(("rate", "compression"), [(2 * MIB, "none"), (16 * MIB, "zstd"), (16 * MIB, "planes")])
def test_progress_is_what_the_store_holds_and_the_time_left_is_what_it_takes(rate: int, compression: Compression) -> None:
    random = np.random.default_rng(3)
    weights = {f"w{number}": random.normal(size=SHARD_BYTES // 32).astype(np.float32) for number in range(8)}
    saved = save_slowly(rate, compression, make_shard(weights))
    assert max(look.fraction for look in saved.looks) < 1.0
    for look in saved.looks:
        true = look.written / saved.total
        # Of what is packed, a chunk shrinks more than another; and a few pieces are on their way.
        assert abs(look.shown.raw_done / SHARD_BYTES - true) < 0.05, (look.at, look.shown.raw_done, true)
        left_s = saved.written_at - look.at
        if 0.1 < true < 0.95:
            assert look.shown.eta_s is not None
            assert 0.5 < look.shown.eta_s / left_s < 2.0, (look.at, look.shown.eta_s, left_s)
        if look.at >= saved.written_at:
            assert look.shown.eta_s is None  # what is left is no longer a matter of bytes
            assert look.fraction == 0.99


def test_what_is_unchanged_counts_as_done_and_says_nothing_of_the_speed() -> None:
    now = [10.0]
    progress = ShardProgress(clock=lambda: now[0])
    progress.begin(1000)
    progress.keep(900)
    assert (progress.fraction, progress.speed_bps, progress.eta_s) == (0.9, None, None)
    now[0] = 20.0
    progress.add(50, 25)
    assert (progress.fraction, progress.speed_bps, progress.eta_s) == (0.95, 5.0, 10.0)
    progress.begin(1000)  # written anew: a reference was lost
    assert (progress.fraction, progress.speed_bps, progress.stored) == (0.0, None, 0)


def test_another_processs_progress_is_told_as_it_is() -> None:
    now = [100.0]
    progress = ShardProgress(clock=lambda: now[0])
    progress.mirror(raw_total=1000, raw_done=600, raw_kept=100, stored=50, writing_s=10.0)
    assert (progress.fraction, progress.speed_bps, progress.eta_s) == (0.6, 50.0, 8.0)
    progress.end()
    now[0] = 200.0
    progress.mirror(raw_total=1000, raw_done=1000, raw_kept=100, stored=90, writing_s=18.0)
    assert (progress.fraction, progress.speed_bps, progress.eta_s) == (0.99, 50.0, None)


def test_a_share_adds_up_to_all_of_it() -> None:
    progress = ShardProgress()
    share = Share(progress, raw=1000, nbytes=777)
    for nbytes in (1, 300, 400, 76):
        share.written(nbytes)
    assert (progress.raw_done, progress.stored) == (1000, 777)
