"""The trainer of the neighbour benchmark: a loop on every core, and saves beside it. Runs in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import disk, processes
from benchmarks.neighbour_page import BesideSave
from benchmarks.state import State
from benchmarks.training import loop_times
from checkpointd_client import Checkpointer, SaveHandle

WIDTH = 640
STEP_S = 0.004
QUIET_S = 1.0
STRETCH_S = 1.0


@dataclass(frozen=True, kw_only=True)
class NeighbourJob:
    """What the driver asks of the trainer. `socket` and `daemon_pid`: the sidecar's, where there is one."""

    root: str
    saves: int
    socket: str
    daemon_pid: int
    saving: bool
    compression: str
    target_bytes: int
    threads: int
    seed: int


class BusyLoop:
    """Steps of about `STEP_S` that need all `threads` cores at once, as a training step does."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._left, self._right = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        self._product = torch.empty(WIDTH, WIDTH)
        self._products = 1
        self.undisturbed(0.3)  # the first products are slower
        steps = self.undisturbed(0.5)
        self._products = max(1, round(STEP_S * len(steps) / sum(steps)))

    def step(self) -> float:
        """Seconds that one step took."""
        start = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._product)
        return time.perf_counter() - start

    def undisturbed(self, seconds: float) -> list[float]:
        """Seconds of every step done in the next `seconds`."""
        end = time.perf_counter() + seconds
        steps = []
        while time.perf_counter() < end:
            steps.append(self.step())
        return steps

    def until(self, finished: threading.Event) -> list[float]:
        """Seconds of every step until `finished`."""
        steps = []
        while not finished.is_set():
            steps.append(self.step())
        return steps


class Saver:
    """One Checkpointer and the state that it saves."""

    def __init__(self, job: NeighbourJob) -> None:
        self._job = job
        self._root = Path(job.root)
        self.state = State(target_bytes=job.target_bytes, ranks=1, rank=0, seed=job.seed)
        self._checkpointer = Checkpointer(
            job.root,
            compression=job.compression,  # type: ignore[arg-type]  # one of its names, checked there
            sidecar=job.socket or None,
            on_sidecar_loss="raise",  # a save that the trainer persists itself would be measured as the sidecar's
        )

    def quiet(self, step: int) -> None:
        """A save with nothing beside it."""
        self._call(step).wait()
        self.state.advance()

    def beside(self, step: int, loop: BusyLoop) -> BesideSave:
        """A save under the loop, from the call until it is durable."""
        before = loop.undisturbed(QUIET_S)
        cpu = self._sidecar_cpu_s()
        start = time.perf_counter()
        handle = self._call(step)
        finished = threading.Event()
        waiter = threading.Thread(target=_announce, args=(handle, finished), name="bench-wait")
        waiter.start()
        steps = loop.until(finished)
        window_s = time.perf_counter() - start
        waiter.join()
        handle.wait()
        cpu = self._sidecar_cpu_s() - cpu
        times = handle.timings
        assert times.call_s is not None
        assert times.durable_s is not None
        saved = BesideSave(
            call_s=times.call_s,
            durable_s=times.durable_s,
            stored_bytes=disk.size(self._root / handle.tag),
            sidecar_cpu_s=cpu,
            loop=loop_times(before + loop.undisturbed(QUIET_S), steps, window_s),
        )
        self.state.advance()
        return saved

    def close(self) -> None:
        """Nothing is left in flight."""
        self._checkpointer.close()

    def _call(self, step: int) -> SaveHandle:
        state = {"model": self.state.model, "master": self.state.master, "optimizer": self.state.optimizer}
        return self._checkpointer.save(step, state)

    def _sidecar_cpu_s(self) -> float:
        return processes.cpu_seconds([self._job.daemon_pid]) if self._job.daemon_pid else 0.0


def _announce(handle: SaveHandle, finished: threading.Event) -> None:
    try:
        handle.wait(until="prepared")
    finally:
        finished.set()


def stretch(loop: BusyLoop) -> BesideSave:
    """As much of the loop as a save takes, without one."""
    before = loop.undisturbed(QUIET_S)
    start = time.perf_counter()
    steps = loop.undisturbed(STRETCH_S)
    window_s = time.perf_counter() - start
    times = loop_times(before + loop.undisturbed(QUIET_S), steps, window_s)
    return BesideSave(call_s=0.0, durable_s=window_s, stored_bytes=0, sidecar_cpu_s=0.0, loop=times)


def measure(job: NeighbourJob) -> list[dict[str, Any]]:
    """All of one trial."""
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    loop = BusyLoop(job.threads)
    if not job.saving:
        return [asdict(stretch(loop)) for _ in range(job.saves)]
    saver = Saver(job)
    saver.quiet(0)
    saver.quiet(1)
    found = [asdict(saver.beside(step, loop)) for step in range(2, 2 + job.saves)]
    saver.close()
    return found
