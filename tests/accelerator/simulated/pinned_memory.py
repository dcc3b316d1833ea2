"""Host memory that is pinned for the simulated device, as the arena's is."""

from __future__ import annotations

import weakref
from types import ModuleType

import numpy as np
import torch


def pinned(sim: ModuleType, count: int) -> torch.Tensor:
    """`count` float32 zeros, pinned until nothing uses them."""
    memory = np.zeros(count, dtype=np.float32)
    address = memory.ctypes.data
    assert sim.host_register(address, memory.nbytes) == 0
    weakref.finalize(memory, _unpinned, sim, address)
    return torch.from_numpy(memory)


def _unpinned(sim: ModuleType, address: int) -> None:
    try:
        sim.host_unregister(address)
    except RuntimeError:  # the test did it
        return
