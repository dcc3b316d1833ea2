"""A process that makes a checkpoint of DeepSpeed's, puts it together in all ways, and says how far its memory grew in each.

zero_child.py FOLDER MIB
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from checkpointd_client.integrations.deepspeed.offline import fp32
from checkpointd_client.integrations.deepspeed.offline.importing import import_deepspeed
from tests.unit.client.integrations.deepspeed.offline import handmade_zero

MIB = 1 << 20
PARAMETERS = 16


def in_memory(what: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024


def grown(call: Callable[[], object]) -> int:
    """How far memory grows while `call` runs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = in_memory("VmRSS")
    call()
    return in_memory("VmHWM") - before


def read_each(folder: Path) -> None:
    for tensor in fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True).values():
        tensor.contiguous()


def main(folder: Path, mib: int) -> None:
    rows = mib * MIB // 4 // 1024 // PARAMETERS
    handmade_zero.GROUPS = ({f"layer.{number}": (rows, 1024) for number in range(PARAMETERS)},)  # type: ignore[assignment]
    handmade_zero.SHARED.clear()
    handmade_zero.make(folder / "step5", 2, 2, torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "lazy": lambda: read_each(folder),
        "convert": lambda: fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "out"),
        "import": lambda: import_deepspeed(folder, folder / "root", memory=64 * MIB),
        "get": lambda: fp32.get_fp32_state_dict_from_zero_checkpoint(folder),
    }
    sys.stdout.write(json.dumps({name: grown(call) for name, call in calls.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
