"""PERSIST-2 and PERSIST-3 of pipeline/write/persist.py: the byte budget holds, and nobody reads the snapshot once
`persist` has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import Buffer

from checkpointd.errors import StoreError
from checkpointd.pipeline.shard import ShardProgress
from checkpointd.pipeline.workers import Stopped
from checkpointd.pipeline.write import write_objects
from checkpointd.pipeline.write.encode import Encoded
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.rates import Rates
from checkpointd.store.memory import MemoryStore, MemoryWriter
from tests.builders import Save, make_shard, plan_save

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
SLACK = 12 * MIB
"""What an interpreter takes for itself meanwhile: thread stacks, free lists, the index."""


def growth(**options: object) -> int:
    """Bytes by which persisting in a fresh process lets its memory grow at most."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("persist_child.py"), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(
    "compression", ["planes", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("none", "zstd", "auto"))]
)
def test_persist_3_memory_beside_the_snapshot_stays_below_the_budget(compression: str) -> None:
    small = {"chunk_bytes": MIB, "block_bytes": 4 * MIB, "encoders": 4, "budget_bytes": 32 * MIB}
    assert growth(mib=256, compression=compression, **small) < 32 * MIB + SLACK


@pytest.mark.nightly
def test_persist_3_the_measure_sees_memory_where_it_is_taken() -> None:
    large = {"chunk_bytes": 16 * MIB, "block_bytes": 16 * MIB, "encoders": 4, "budget_bytes": 512 * MIB}
    assert growth(mib=256, compression="planes", **large) > 32 * MIB + SLACK


# --- PERSIST-2 ----------------------------------------------------------------------------------------------------------------


class Readers:
    """Counts who reads the buffer; lets the first `free` of them do so, and holds the others until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.begun = self.ended = 0
        self.free = free
        self.loop = asyncio.get_running_loop()
        self.reading = asyncio.Event()
        self.go = asyncio.Event()
        encode, hashes = Encoded.of, write_objects._hash_group
        monkeypatch.setattr(Encoded, "of", staticmethod(lambda *of: self._read(lambda: encode(*of))))
        monkeypatch.setattr(write_objects, "_hash_group", lambda *of: self._read(lambda: hashes(*of)))

    def _read(self, read: Callable[[], object]) -> object:
        """On a thread of the loop's executor."""
        return asyncio.run_coroutine_threadsafe(self._counted(read), self.loop).result()

    async def _counted(self, read: Callable[[], object]) -> object:
        self.begun += 1
        if self.begun > self.free:
            self.reading.set()
            await self.go.wait()
        found = read()
        self.ended += 1
        return found

    async def let_go_later(self) -> None:
        """Once somebody is held, and whoever does not wait for readers has had every chance to leave."""
        await self.reading.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        self.go.set()


class FailingStore(MemoryStore):
    """Fails every write of a chunks object, once `when` is set."""

    def __init__(self, when: asyncio.Event) -> None:
        super().__init__()
        self.when = when

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> MemoryWriter:
        return FailingWriter(self, key, size_hint)


class FailingWriter(MemoryWriter):
    async def write_at(self, offset: int, data: Buffer) -> None:
        assert isinstance(self._store, FailingStore)
        await self._store.when.wait()
        raise StoreError("the disk is gone")


def job(save: Save, stopped: Callable[[], bool]) -> PersistJob:
    return PersistJob(
        store=save.store,
        info=save.info(0),
        shard=make_shard({"w": np.random.default_rng(0).standard_normal((256, 64), dtype=np.float32)}),
        config=replace(save.persist, encoders=3),
        rates=Rates(disk_bps=1e6),
        progress=ShardProgress(),
        stopped=stopped,
    )


@pytest.mark.parametrize(("compression", "free"), [("none", 1), ("planes", 4)])
@pytest.mark.parametrize("end", ["return", "error", "stop", "cancel"])
async def test_persist_2_when_persist_has_ended_nobody_reads_the_image(
    compression: str, free: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(monkeypatch, free)
    store = FailingStore(readers.reading) if end == "error" else MemoryStore()
    save = await plan_save(store, compression=compression, world_size=1)
    letting_go = asyncio.ensure_future(readers.let_go_later())
    running = asyncio.ensure_future(persist(job(save, lambda: end == "stop" and readers.reading.is_set())))
    await readers.reading.wait()
    if end == "cancel":
        running.cancel()
    [result] = await asyncio.gather(running, return_exceptions=True)
    assert readers.begun == readers.ended > free
    await letting_go
    kind = {"return": object, "error": StoreError, "stop": Stopped, "cancel": asyncio.CancelledError}[end]
    assert isinstance(result, kind)
    assert isinstance(result, BaseException) == (end != "return")
