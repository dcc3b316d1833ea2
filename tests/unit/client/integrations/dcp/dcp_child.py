"""Convert a DCP directory both ways in a fresh process, and print by how many bytes its memory grew at most, each way.

`python -m tests.unit.client.integrations.dcp.dcp_child DIRECTORY ROOT OUT`
"""

from __future__ import annotations

import sys

from checkpointd_client.integrations.dcp import export_dcp, import_dcp
from tests.unit.export.export_child import MIB, begin, memory

MEMORY_BYTES = 64 * MIB


def main() -> None:
    source, root, out = sys.argv[1:]
    before = begin()
    import_dcp(source, root, "t", memory=MEMORY_BYTES)
    imported = memory("VmHWM") - before
    before = begin()
    export_dcp(root, out, memory=MEMORY_BYTES)
    sys.stdout.write(f"{imported} {memory('VmHWM') - before}\n")


if __name__ == "__main__":
    main()
