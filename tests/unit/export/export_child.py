"""Save a model of random weights, then export it in a fresh process, and print by how much that one's memory grew at most.

`python export_child.py save ROOT MIB` and `python export_child.py export ROOT OUT '{"dtype": "bf16", ...Request}'`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from checkpointd.commit.machine import Phase
from checkpointd.export.consolidate import Container, ExportRequest, Safetensors, consolidate
from checkpointd.layout.boxes import Box
from checkpointd.store.posix.store import PosixStore

MIB = 1 << 20
COLUMNS = 1024


def memory(field: str) -> int:
    """Bytes of this process's memory by the kernel's count: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def begin() -> int:
    """Bytes of memory now; VmHWM counts from here (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


async def save(root: str, mib: int) -> None:
    """Four float32 tensors that two ranks hold by columns: every row of the export comes from both."""
    from tests.builders import Piece, phases, save_checkpoint

    rows = mib * MIB // 4 // 4 // COLUMNS
    random = np.random.default_rng(0)
    tensors = {f"model.t{n}": random.standard_normal((rows, COLUMNS), dtype=np.float32) for n in range(4)}

    def pieces(rank: int) -> list[Piece]:
        box = Box((0, rank * COLUMNS // 2), (rows, COLUMNS // 2))
        own = [Piece.own("small.w", np.zeros(8, np.float32))] if rank == 0 else []
        return [*own, *(Piece.part(fqn, tensor, box) for fqn, tensor in tensors.items())]

    async with PosixStore(root) as store:
        saved = await save_checkpoint(store, tensors=lambda _: {}, pieces=pieces, chunk_bytes=4 * MIB, timeout_s=600.0)
    assert set(phases(saved)) == {Phase.COMMITTED}


async def export(root: str, out: str, options: dict[str, Any]) -> None:
    def container() -> Container:
        made: Container = Safetensors(out, None)
        if out.endswith(".pt"):
            made = import_module("checkpointd_client.export.torch_file").TorchFile()
        return made

    async with PosixStore(root) as store:
        # Everything that is imported on the way is there before the measure begins.
        await consolidate(store, f"{out}.small", container(), ExportRequest(only="small", dtype="bf16"))
        before = begin()
        await consolidate(store, out, container(), ExportRequest(only="model", **options))
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    command, place, *rest = sys.argv[1:]
    asyncio.run(save(place, int(rest[0])) if command == "save" else export(place, rest[0], json.loads(rest[1])))
