"""Persist a shard into a store that throws everything away, and print by how much this process's memory grew.

`python persist_child.py '{"mib": 256, "compression": "planes", ...PersistConfig}'` prints the growth in bytes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import numpy as np
from typing_extensions import Buffer

from checkpointd.config import PersistConfig
from checkpointd.layout.boxes import whole
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.pages import page_buffer
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress, ShardTensor
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.rates import Rates
from checkpointd.store.memory import MemoryStore, MemoryWriter

MIB = 1 << 20


class Sink(MemoryWriter):
    """Takes its time with every part and keeps none, so that the writer runs ahead as far as it may."""

    async def write_at(self, offset: int, data: Buffer) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def finish(self, size: int) -> None:
        return


class SinkStore(MemoryStore):
    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> Sink:
        return Sink(self, key, 0)


def shard(nbytes: int) -> Shard:
    """Four float32 tensors of noise that is as hard to encode as weights are."""
    buffer, random = page_buffer(nbytes), np.random.default_rng(0)
    for start in range(0, nbytes, MIB):
        buffer[start : start + MIB] = (random.standard_normal(MIB // 4, dtype=np.float32) * 0.02).view(np.uint8)
    size = nbytes // 4
    shape = (size // 4,)
    tensors = tuple(ShardTensor(f"t{n}", "float32", shape, whole(shape), "rank", n * size, size, 4) for n in range(4))
    return Shard(buffer=buffer, tensors=tensors, tree=b"\xc0")


def memory(field: str) -> int:
    """Bytes of this process's memory by the kernel's count: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


async def main(mib: int, settings: dict[str, object]) -> None:
    job = PersistJob(
        store=SinkStore(),
        info=AttemptInfo(tag="tag", attempt=AttemptId(1, 0), rank=0, world_size=1, step=1, n=0),
        shard=shard(mib * MIB),
        config=PersistConfig(**settings),  # type: ignore[arg-type]  # the test names its fields
        rates=Rates(disk_bps=1e6),
        progress=ShardProgress(),
        stopped=lambda: False,
    )
    before = memory("VmRSS")
    await persist(job)
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    asyncio.run(main(options.pop("mib"), options))
