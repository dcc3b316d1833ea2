"""Accelerators through torch's generic interfaces: `torch.accelerator`, `torch.Stream` and `torch.Event`.

The device of a tensor decides. A process whose tensors are all in host memory asks no accelerator anything, so it starts none.
`PINNING` holds the only call for which torch has no generic form. Add a kind of device there when its torch module can register
host memory; without an entry snapshots are right all the same, but the next step waits for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pinning:
    """How memory that was allocated elsewhere is pinned. Both calls return 0, or the error code of the device's driver."""

    register: Callable[[int, int], int]
    """Takes the address and the bytes. Runs on a thread whose current device is the one that will copy."""
    unregister: Callable[[int], int]
    """Takes the address."""


def _cuda_register(address: int, nbytes: int) -> int:
    return _forgotten(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)))


def _cuda_unregister(address: int) -> int:
    return _forgotten(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _forgotten(code: int) -> int:
    """`code`. If it is an error, make CUDA forget it: CUDA keeps it for the thread, and torch would raise it after the next
    kernel, which may be one of the training's.
    """
    if code:
        with suppress(RuntimeError):  # this is that kernel
            torch.zeros(1, device="cuda").add_(1)
    return code


PINNING: dict[str, Pinning] = {"cuda": Pinning(_cuda_register, _cuda_unregister)}
"""By `torch.device.type`; "cuda" is also what torch calls ROCm's devices."""


def has_streams(device: torch.device) -> bool:
    """Whether copies from and to `device` can be put in order by streams and events. False for host memory."""
    if device.type in ("cpu", "meta"):
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make `stream` the current stream of this thread, and its device the current one."""
    before = torch.accelerator.current_stream(stream.device)
    # `set_device_index` would go back to device 0 in a new thread, and make a context there even if only others are used.
    with torch.accelerator.device_index(stream.device.index):
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def told(error: Exception) -> str:
    """What happened, in the one line that matters: errors of devices go on with frames and advice on debugging."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_over(work: torch.Stream | torch.Event) -> bool:
    """Whether the device has done all of `work`; False if it cannot say, after an error that leaves it unusable."""
    try:
        return work.query()
    except Exception:
        return False


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no memory left. Not every backend raises torch.OutOfMemoryError."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
