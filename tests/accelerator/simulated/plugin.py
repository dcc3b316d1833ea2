"""The simulated device as the plug-in of a vendor: the device, pinning for it, and collectives."""

from __future__ import annotations

import os
from pathlib import Path

from checkpointd_client import devices


def load() -> None:
    """Give this process the device. torch calls it in every process whose PYTHONPATH has what `make_plugin` wrote."""
    from tests.accelerator.simulated import process_group, simulator

    devices.PINNING["sim"] = devices.Pinning(simulator.host_register, simulator.host_unregister)
    assert process_group.BACKEND  # its import was all that is needed
    if "SIM_CHAOS" in os.environ:  # a seed: all that this process does is in an order that it and the rank choose
        simulator.spare_freed_memory()
        simulator.chaos(2 * int(os.environ["SIM_CHAOS"]) + int(os.environ.get("RANK", "0"))).__enter__()


def make_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes `import torch` load the device, as packages of other devices do."""
    info = folder / "simulated_device-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-device\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsim = tests.accelerator.simulated.plugin:load\n")
    return folder
