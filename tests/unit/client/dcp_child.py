"""Convert in a fresh process, and print by how much its memory grew at most.

`python dcp_child.py make DIRECTORY MIB`, `import DIRECTORY ROOT` and `export ROOT DIRECTORY`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from checkpointd_client.integrations.dcp import export_dcp, import_dcp
from tests.unit.pipeline.export_child import MIB, begin, memory

MEMORY_BYTES = 64 * MIB


def make(directory: str, mib: int) -> None:
    """One large tensor, and small ones."""
    large = torch.randn(mib * MIB // 4 // 1024, 1024)
    dcp.save({"large": large, "small": [torch.ones(3)] * 20}, storage_writer=FileSystemWriter(directory), no_dist=True)


def main() -> None:
    what, source, target = sys.argv[1:]
    if what == "make":
        make(source, int(target))
        return
    before = begin()
    if what == "import":
        import_dcp(source, target, "t", memory=MEMORY_BYTES)
    else:
        export_dcp(source, target, memory=MEMORY_BYTES)
    sys.stdout.write(f"{memory('VmHWM') - before}\n")


if __name__ == "__main__":
    main()
