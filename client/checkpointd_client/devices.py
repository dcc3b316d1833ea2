"""Accelerators through torch's generic interfaces: `torch.accelerator`, `torch.Stream` and `torch.Event`.

The device of a tensor decides how it is copied. A process whose tensors are all in host memory starts no accelerator.
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
    """Calls that pin host memory which torch did not allocate. Both return 0, or the error code of the device's driver."""

    register: Callable[[int, int], int]
    """Takes the address and the number of bytes. The thread's current device must be the one that will copy."""
    unregister: Callable[[int], int]
    """Takes the address."""


def _cuda_register(address: int, nbytes: int) -> int:
    return _forgotten(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)))


def _cuda_unregister(address: int) -> int:
    return _forgotten(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _forgotten(code: int) -> int:
    """Return `code`. If it is an error, clear it: CUDA keeps the error for this thread, and torch would raise it after the next
    kernel, which may belong to training.
    """
    if code:
        with suppress(RuntimeError):  # torch raises the error here, which clears it
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
    """The first line of the error's message. Errors of devices go on with stack frames and advice on debugging."""
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
