"""How long copies, saves and loads take on a device. `benchmarks/gpu.py` measures with these as well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpointd_client import Checkpointer, SaveHandle
from checkpointd_client.selftest.clock import Clock
from checkpointd_client.selftest.host_memory import registered
from checkpointd_client.selftest.lateness import Work

CALLS = 3
"""The device is kept busy for this many times the length of a call, so that the host queues everything before copies begin."""
OVERLAP = 1.5
"""The work between a save and the next step takes this many times as long as the copy."""


def median_s(measured: Callable[[], float], runs: int) -> float:
    """The median of `runs` measurements."""
    return statistics.median(measured() for _ in range(runs))


@dataclass(frozen=True)
class CopyRates:
    """Bytes per second of one large copy to the host: into memory pinned as the arena is, pinned by torch, and not pinned."""

    arena_bps: float
    pinned_bps: float
    plain_bps: float


def copy_rates(clock: Clock, nbytes: int, runs: int) -> CopyRates:
    """Measure the copies of a tensor of `nbytes`."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)

    def rate(host: torch.Tensor) -> float:
        def once() -> float:
            first = clock.mark()
            host.copy_(source, non_blocking=True)
            return clock.seconds(first, clock.mark())

        once()
        return nbytes / median_s(once, runs)

    with registered(nbytes, clock.device) as arena:
        arena_bps = rate(arena.memory)
    pinned_bps = rate(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True))
    return CopyRates(arena_bps, pinned_bps, rate(torch.zeros(nbytes, dtype=torch.uint8)))


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Seconds of one save.

    `call_s`: save() on the host. `staging_s`: from the call until a step that follows at once may begin, on the device.
    `stall_s`: how long a step waits that follows after work which is longer than the copy.
    """

    call_s: float
    staging_s: float
    stall_s: float


class Saving:
    """Saves of `state`, measured one after another."""

    def __init__(self, checkpointer: Checkpointer, state: MutableMapping[str, Any], clock: Clock, work: Work) -> None:
        self._checkpointer, self._state, self._clock, self._work = checkpointer, state, clock, work
        self._step = 0
        self._call_s = 0.0
        self._cost()  # the first save makes the arena

    def median(self, runs: int) -> SaveCost:
        """Measure `runs` times; the median of each figure."""
        costs = [self._cost() for _ in range(runs)]
        return SaveCost(*(statistics.median(getattr(cost, name) for cost in costs) for name in SaveCost.__slots__))

    def _cost(self) -> SaveCost:
        call_s, staging_s = self._save(0.0)
        self._call_s = call_s
        return SaveCost(call_s, staging_s, self._save(staging_s * OVERLAP)[1])

    def save(self) -> SaveHandle:
        """Save once more."""
        self._step += 1
        return self._checkpointer.save(self._step, self._state)

    def _save(self, work_s: float) -> tuple[float, float]:
        """The length of the call, and how long a step waits that follows after work of `work_s`."""
        torch.accelerator.synchronize(self._clock.device)
        self._work.queue(self._call_s * CALLS + 0.01)
        began = time.perf_counter()
        handle = self.save()
        call_s = time.perf_counter() - began
        if work_s:
            self._work.queue(work_s)
        before = self._clock.mark()
        self._checkpointer.fence()
        waited_s = self._clock.seconds(before, self._clock.mark())
        handle.wait()
        return call_s, waited_s


def load_s(checkpointer: Checkpointer, state: MutableMapping[str, Any], device: torch.device) -> float:
    """The length of a load of the newest checkpoint, which was written lately and is in the page cache."""
    torch.accelerator.synchronize(device)
    began = time.perf_counter()
    checkpointer.load(state)
    torch.accelerator.synchronize(device)
    return time.perf_counter() - began


def parameters(nbytes: int, count: int, device: torch.device) -> dict[str, Any]:
    """A state of `count` parameters, `nbytes` together, with an optimizer that alone changes them."""
    each = max(nbytes // count // 4, 1)
    made = [torch.nn.Parameter(torch.full((each,), float(i), device=device)) for i in range(count)]
    return {"net": torch.nn.ParameterList(made), "optimizer": torch.optim.SGD(made, lr=0.1)}


def bytes_of(state: MutableMapping[str, Any]) -> int:
    """The bytes of the tensors of `state`."""
    return sum(tensor.nbytes for tensor in state["net"].parameters())
