"""Host memory that is pinned as the arena's is: allocated by the kernel first, and then registered with the device."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from checkpointd_client import devices


@dataclass(frozen=True)
class Registered:
    """`memory`, and the error code of the driver: 0 if it is pinned, None if torch offers no call for this kind of device."""

    memory: torch.Tensor
    code: int | None


@contextmanager
def registered(nbytes: int, device: torch.device) -> Iterator[Registered]:
    """`nbytes` of zeros in host memory, pinned for `device` where that works, until the block ends."""
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    memory.zero_()  # so that the kernel allocates the pages now
    torch.accelerator.set_device_index(device)
    pinning = devices.PINNING.get(device.type)
    code = pinning.register(memory.data_ptr(), nbytes) if pinning else None
    try:
        yield Registered(memory, code)
    finally:
        torch.accelerator.synchronize(device)
        if pinning and code == 0:
            pinning.unregister(memory.data_ptr())
