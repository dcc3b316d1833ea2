"""Load, verify and recover every hostile case in one process; ends with status 1 at the first that takes too much memory."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.unit.hostile_roots import DECIDED, ENTRIES, UNDECIDED
from tests.unit.test_hostile import decide, make_root, refuse, refuse_and_fall_back, refuse_entry

MIB = 1 << 20
GROWTH_MAX = 48 * MIB
"""Beyond what one harmless case takes. Every case that declares too much declares 256 MiB or more."""


def memory(field: str) -> int:
    """Bytes that this process has resident: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def run(name: str, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        if name in ENTRIES:
            asyncio.run(refuse_entry(Path(shutil.copytree(made, Path(folder) / "0")), ENTRIES[name]))
            return
        copies = [Path(shutil.copytree(made, Path(folder) / str(n))) for n in range(3)]
        refuse_and_fall_back(copies[0], DECIDED[name])
        asyncio.run(refuse(copies[1], DECIDED[name]))
        if name in UNDECIDED:
            asyncio.run(decide(copies[2], UNDECIDED[name]))


def main(path: Path) -> None:
    made = make_root(path)
    run("another version", made)
    start = memory("VmRSS")
    for name in (*DECIDED, *ENTRIES):
        run(name, made)
        growth = memory("VmHWM") - start
        if growth > GROWTH_MAX:
            raise SystemExit(f"{name}: memory grew by {growth / MIB:.0f} MiB")
        print(f"{name}: {growth / MIB:.0f} MiB")
    print(f"{len(DECIDED) + len(ENTRIES)} cases")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
