"""A small training loop, and what a save costs it.

A *step* here is a few small matrix products called from Python: it needs the interpreter lock between them, so
it feels threads that hold the lock, and a core, so it feels busy ones. Every `gate` steps stands where an
optimizer step would: it may only go on when the state may be changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from benchmarks.measures import LoopTimes

_PRODUCTS = 32
_WIDTH = 128
_ADDITIONS = 20_000


class TrainingLoop:
    """Steps of about a millisecond and a half, which allocate nothing."""

    def __init__(self, *, gate_s: float) -> None:
        self._prepare()
        self.undisturbed(0.2)  # the first products are slower
        steps = self.undisturbed(0.5)
        self._steps_per_gate = max(1, round(gate_s / mean(steps)))

    def _prepare(self) -> None:
        self._left, self._right = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH)
        self._product = torch.empty(_WIDTH, _WIDTH)

    def _work(self) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right, out=self._product)

    def _step(self) -> float:
        start = time.perf_counter()
        self._work()
        return time.perf_counter() - start

    def undisturbed(self, seconds: float) -> list[float]:
        """Seconds of every step done in the next `seconds`."""
        end = time.perf_counter() + seconds
        steps: list[float] = []
        while time.perf_counter() < end:
            steps.append(self._step())
        return steps

    def until(self, finished: threading.Event, gate: Callable[[], None]) -> list[float]:
        """Step until `finished`, calling `gate` where the optimizer would step; seconds of every step.

        What `gate` takes is in no step: it is time in which training did nothing.
        """
        steps: list[float] = []
        while not finished.is_set():
            steps.append(self._step())
            if len(steps) % self._steps_per_gate == 0:
                gate()
        return steps


class PythonLoop(TrainingLoop):
    """Steps as long, of nothing but Python: each of them holds the interpreter lock from its first to its last moment."""

    def _prepare(self) -> None:
        self._sum = 0

    def _work(self) -> None:
        for number in range(_ADDITIONS):
            self._sum = (self._sum + number * number) % 1_000_003


def loop_times(quiet: list[float], busy: list[float], window_s: float) -> LoopTimes:
    """What a save cost: `quiet` and `busy` are seconds per step, `window_s` from the call until durable.

    A save that ends within the call leaves no busy step: all of its window is lost.
    """
    milliseconds = sorted(step * 1e3 for step in (busy or [0.0]))
    return LoopTimes(
        lost_s=window_s - len(busy) * mean(quiet),
        window_s=window_s,
        steps=len(busy),
        undisturbed_ms=mean(quiet) * 1e3,
        undisturbed_p99_ms=_at(sorted(quiet), 0.99) * 1e3,
        mean_ms=mean(milliseconds),
        p50_ms=_at(milliseconds, 0.50),
        p99_ms=_at(milliseconds, 0.99),
        max_ms=milliseconds[-1],
    )


def mean(values: list[float]) -> float:
    """The arithmetic mean of at least one value."""
    return sum(values) / len(values)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
