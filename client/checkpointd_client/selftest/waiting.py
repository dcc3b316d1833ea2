"""Whether a call waits for work that the device has queued."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from checkpointd_client import devices
from checkpointd_client.selftest.host_memory import registered
from checkpointd_client.selftest.lateness import Late

FACTORS = (1, 4, 16)
"""A call that waits takes longer if more work is queued; one that is slow by itself, as on a busy host, does not."""


def waits(act: Callable[[], object], late: Late, device: torch.device) -> bool | None:
    """Whether `act` returns only when the work is done that was queued before; None if the device did the work at once."""
    for factor in FACTORS:
        with late.compute(factor) as late_s:
            queued = torch.Event(device)
            torch.ones(1, device=device).add_(1)
            queued.record(torch.accelerator.current_stream(device))
            if queued.query():
                return None
            began = time.perf_counter()
            act()
            took_s = time.perf_counter() - began
            waited = queued.query()
        if not waited or took_s < late_s / 2:
            return False
    return True


class Copying:
    """A copy to host memory behind the current stream, pinned or not, that should return at once."""

    def __init__(self, source: torch.Tensor, host: torch.Tensor) -> None:
        self._source, self._host = source, host
        self._side = torch.Stream(source.device)

    def __call__(self) -> None:
        """Queue the copy."""
        self._side.wait_stream(torch.accelerator.current_stream(self._source.device))
        with devices.on_stream(self._side):
            self._host.copy_(self._source, non_blocking=True)


def copy_waits(nbytes: int, late: Late, device: torch.device, *, pinned: bool) -> bool | None:
    """Whether a copy of `nbytes` waits, into memory that is pinned as the arena is, or into plain memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    if not pinned:
        return waits(Copying(source, torch.zeros(nbytes, dtype=torch.uint8)), late, device)
    with registered(nbytes, device) as host:
        return waits(Copying(source, host.memory), late, device)
