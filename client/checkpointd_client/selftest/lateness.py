"""Makes work on a device run late, so that a missing wait shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from checkpointd_client import devices
from checkpointd_client.selftest.clock import Clock

LATE_S = 0.1
"""A proof makes work late by about this time, which is long beside the call of save()."""
OPERATION_S = 1e-3
"""One product of matrices should take this long, or longer."""
OPERATIONS_MAX = 800
"""Drivers hold about a thousand operations of a stream. Beyond that, the host would wait while it queues."""
SIDES = (128, 4096)
"""The smallest and largest matrix, in rows."""
TRAFFIC = 16
"""This many copies are queued before others, to make the others late."""


class Late(Protocol):
    """Makes work late that is queued inside a `with`. It gives the delay in seconds, and ends when no work is left."""

    def compute(self, factor: int = 1) -> AbstractContextManager[float]:
        """What is queued on the current stream runs late; other streams go ahead."""
        ...

    def copies(self) -> AbstractContextManager[float]:
        """What is queued on other streams runs late; the current stream goes ahead."""
        ...

    def delay(self) -> None:
        """Make what is queued on the current stream next run later than what is queued there now."""
        ...


class Work:
    """Products of matrices, each of which takes `each_s` seconds."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        self.clock = clock
        side, most = SIDES
        while True:
            self.matrix = torch.full((side, side), 1 / side, device=clock.device)
            self._product = torch.empty_like(self.matrix)
            self.each_s = self._measured()
            side *= 2
            if self.each_s >= OPERATION_S or side > most or 2 * 4 * side * side > bytes_max:
                break

    def _measured(self, count: int = 8) -> float:
        self._run(2)  # the first one loads the kernel
        first = self.clock.mark()
        self._run(count)
        return self.clock.seconds(first, self.clock.mark()) / count

    def _run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.matrix, self.matrix, out=self._product)

    def queue(self, seconds: float) -> float:
        """Queue work of about `seconds` on the current stream. Returns how many seconds it takes."""
        count = min(math.ceil(seconds / self.each_s), OPERATIONS_MAX)
        self._run(count)
        return count * self.each_s


class LateByWork:
    """`Late` for any device: by queued work."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._device = work.clock.device
        self._hosts = [torch.empty(work.matrix.shape, dtype=work.matrix.dtype, pin_memory=True) for _ in range(2)]
        self._streams = [torch.Stream(self._device) for _ in range(2)]
        self._spare = torch.empty_like(work.matrix)

    @contextmanager
    def compute(self, factor: int = 1) -> Iterator[float]:
        """Queue work on the current stream."""
        try:
            yield self._work.queue(LATE_S * factor)
        finally:
            torch.accelerator.synchronize(self._device)

    @contextmanager
    def copies(self) -> Iterator[float]:
        """Queue copies in both directions, which begin when other copies could. A device runs copies one after another."""
        try:
            late_s = self._work.queue(LATE_S)
            current = torch.accelerator.current_stream(self._device)
            down, up = self._streams
            for stream in self._streams:
                stream.wait_stream(current)
            for _ in range(TRAFFIC):
                with devices.on_stream(down):
                    self._hosts[0].copy_(self._work.matrix, non_blocking=True)
                with devices.on_stream(up):
                    self._spare.copy_(self._hosts[1], non_blocking=True)
            yield late_s
        finally:
            torch.accelerator.synchronize(self._device)

    def delay(self) -> None:
        """Queue work on the current stream."""
        self._work.queue(LATE_S / 4)
