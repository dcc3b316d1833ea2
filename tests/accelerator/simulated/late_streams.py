"""Makes work of the simulated device late by holding its streams, where a real device needs other work in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import torch

from checkpointd_client.selftest.lateness import LATE_S


class LateByHolding:
    """`Late` of the selftest. A host that waits for a held stream waits for the time that the block says, and then gets on."""

    def __init__(self, sim: ModuleType, device: torch.device) -> None:
        self._sim, self._device = sim, device

    def compute(self, factor: int = 1) -> AbstractContextManager[float]:
        return self._holding(self._sim.stalled, LATE_S * factor)

    def copies(self) -> AbstractContextManager[float]:
        return self._holding(self._sim.only, LATE_S)

    def delay(self) -> None:
        """Nothing: a held stream does not move."""

    @contextmanager
    def _holding(self, hold: type[AbstractContextManager[None]], seconds: float) -> Iterator[float]:
        held = hold(torch.accelerator.current_stream(self._device), patience_ms=int(seconds * 1e3))
        with ThreadPoolExecutor(1) as holder:  # the thread that holds a stream would not have to wait for it
            holder.submit(held.__enter__).result()
            try:
                yield seconds
            finally:
                held.__exit__(None, None, None)
        torch.accelerator.synchronize(self._device)
