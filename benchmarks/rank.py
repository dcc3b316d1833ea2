"""One rank of one trial, in a process of its own.

A process that saves: build the state; set the system up and let it come to rest; one cold save, and rest again; warm saves; one
warm save under the training loop, whose bytes are the ones checked. Two more processes load what that save has stored, as a job
does that starts again, twice each: the first one with the page cache dropped, then filled; the second one the other way round.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks import disk, processes
from benchmarks.measures import LoadTimes, LoopTimes, SaveTimes, TwoLoads
from benchmarks.state import State
from benchmarks.systems import SYSTEMS, Saving, System
from benchmarks.training import PythonLoop, TrainingLoop, loop_times


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver asks of one rank."""

    system: str
    root: str
    result: str
    rank: int
    ranks: int
    target_bytes: int
    warm_saves: int
    gate_s: float
    quiet_s: float
    seed: int
    phase: Literal["save", "load dropped", "load cached"]
    """What this process does. The loading ones differ in how the files of the first load lie: out of the cache, or in it."""
    digests: str
    """The file with the digests of what was saved last."""

    @property
    def last(self) -> int:
        """The step of the save that is loaded."""
        return self.warm_saves + 2


class Clock:
    """One save, timed: the call, then safe on this thread and durable on a second one."""

    def __init__(self, system: System, step: int) -> None:
        self._cpu_before = processes.cpu_seconds(processes.tree(os.getpid()))
        dist.barrier()
        self.start = time.perf_counter()
        self.saving: Saving = system.save(step)
        self.call_s = self._since()
        self.safe_s = 0.0
        self.finished = threading.Event()
        self._done_s = self._durable_s = 0.0
        self._failure: BaseException | None = None
        self._waiter = threading.Thread(target=self._wait, args=(system, step), name="bench-wait")
        self._waiter.start()

    def _since(self) -> float:
        return time.perf_counter() - self.start

    def _wait(self, system: System, step: int) -> None:
        try:
            self.saving.wait_done()
            self._done_s = self._since()
            system.make_durable(step)
            self._durable_s = self._since()
        except BaseException as failure:  # handed to the thread that joins
            self._failure = failure
        self.finished.set()

    def wait_safe(self) -> None:
        """Until the tensors may change; the first call alone counts."""
        if self.safe_s == 0.0:
            self.saving.wait_safe()
            self.safe_s = self._since()

    def times(self) -> SaveTimes:
        """Wait until durable; raises what the save raised."""
        self._waiter.join()
        if self._failure is not None:
            raise self._failure
        cpu = processes.cpu_seconds(processes.tree(os.getpid())) - self._cpu_before
        return SaveTimes(
            call_s=self.call_s,
            safe_s=self.safe_s,
            done_s=self._done_s,
            durable_s=self._durable_s,
            cpu_s=cpu,
            stored_bytes=0,  # the others may still be writing
            reported=self.saving.reported(),
        )


def quiet_save(system: System, state: State, step: int) -> SaveTimes:
    """A save while nothing else runs; afterwards the state moves on by one optimizer step."""
    clock = Clock(system, step)
    clock.wait_safe()
    times = clock.times()
    dist.barrier()
    stored_bytes = disk.size(system.path(step))
    state.advance()
    return replace(times, stored_bytes=stored_bytes)


def save_under_load(system: System, state: State, step: int, loop: TrainingLoop, quiet_s: float) -> LoopTimes:
    """A save while the loop runs. As soon as it is safe, the whole state is scribbled over."""
    dist.barrier()
    before = loop.undisturbed(quiet_s)
    clock = Clock(system, step)
    scribbled_s = 0.0

    def gate() -> None:
        nonlocal scribbled_s
        first = clock.safe_s == 0.0
        clock.wait_safe()
        if first:
            start = time.perf_counter()
            state.scribble()
            scribbled_s = time.perf_counter() - start

    busy = loop.until(clock.finished, gate)
    window_s = time.perf_counter() - clock.start - scribbled_s
    gate()
    clock.times()
    dist.barrier()
    return loop_times(before + loop.undisturbed(quiet_s), busy, window_s)


def load_and_check(system: System, state: State, step: int, expected: dict[str, str]) -> LoadTimes:
    """Two loads, the first one with the page cache dropped."""
    cold_s, resident, wrong = load_once(system, state, step, expected, dropped=True)
    cached_s, _, wrong_cached = load_once(system, state, step, expected, dropped=False)
    return LoadTimes(cold_s=cold_s, cached_s=cached_s, resident=resident, wrong=sorted({*wrong, *wrong_cached}))


def load_once(
    system: System, state: State, step: int, expected: dict[str, str], *, dropped: bool
) -> tuple[float, float, list[str]]:
    """A load into a cleared state that must afterwards equal the saved one bit for bit: seconds, the share of the files that
    was in the cache although it was `dropped`, and the tensors that differ.
    """
    state.clear()
    resident = 0.0
    if not dropped:
        disk.warm(system.path(step))
    elif system.rank == 0:
        resident = disk.drop(system.path(step))
    dist.barrier()
    start = time.perf_counter()
    system.load(step)
    seconds = time.perf_counter() - start
    found = state.digests()
    dist.barrier()
    return seconds, resident, [path for path, digest in expected.items() if found[path] != digest]


def read_plainly(system: System, step: int) -> float:
    """Seconds that rank 0 takes to read the files of the save with the page cache dropped: what the disk allows just
    now. It may allow more or less a minute later, if it is shared or limits how much is read.
    """
    seconds = 0.0
    if system.rank == 0:
        disk.drop(system.path(step))
        start = time.perf_counter()
        disk.warm(system.path(step))
        seconds = time.perf_counter() - start
    dist.barrier()
    return seconds


def settle() -> None:
    """Until what the system started in the background is at rest on every rank, at most a minute.

    A trainer's saves come long after its start and after one another: a writer process is up by then, a prewarmed buffer warm.
    """
    end = time.monotonic() + 60.0
    spent = -1.0
    while time.monotonic() < end:
        before, spent = spent, processes.cpu_seconds(processes.tree(os.getpid()))
        if spent - before < 0.02:
            break
        time.sleep(0.3)
    dist.barrier()


def announce(phase: str) -> None:
    """Tell the driver, which watches our memory, what comes now."""
    print(f"phase {phase}", flush=True)


def saves(job: Job) -> dict[str, Any]:
    """The saves of one rank: a `RankReport` without its loads."""
    state = State(target_bytes=job.target_bytes, ranks=job.ranks, rank=job.rank, seed=job.seed)
    loop, python = TrainingLoop(gate_s=job.gate_s), PythonLoop(gate_s=job.gate_s)
    base_bytes = own_memory()
    announce("save")
    start = time.perf_counter()
    system = SYSTEMS[job.system](Path(job.root), state, job.rank, job.ranks)
    setup_s = time.perf_counter() - start
    settle()
    cold = quiet_save(system, state, 0)
    settle()
    warm = [quiet_save(system, state, step) for step in range(1, job.warm_saves + 1)]
    python_times = save_under_load(system, state, job.warm_saves + 1, python, job.quiet_s)
    state.advance()
    Path(job.digests).write_text(json.dumps(state.digests()))
    times = save_under_load(system, state, job.last, loop, job.quiet_s)
    announce("end")
    system.close()
    system.finish()
    tensors = [tensor for _, tensor in state.tensors()]
    return {
        "rank": job.rank,
        "tensors": len(tensors),
        "state_bytes": sum(tensor.nbytes for tensor in tensors),
        "setup_s": setup_s,
        "cold": asdict(cold),
        "warm": [asdict(one) for one in warm],
        "loop": asdict(times),
        "python": asdict(python_times),
        "base_bytes": base_bytes,
    }


def loads(job: Job) -> dict[str, Any]:
    """Two loads of one rank in a process that has not saved."""
    state = State(target_bytes=job.target_bytes, ranks=job.ranks, rank=job.rank, seed=job.seed, trained=False)
    expected: dict[str, str] = json.loads(Path(job.digests).read_text())
    system = SYSTEMS[job.system](Path(job.root), state, job.rank, job.ranks, fresh=False)
    settle()
    base_bytes, base_private_bytes = own_memory(), processes.private(processes.tree(os.getpid()))
    announce("load")
    dropped = job.phase == "load dropped"
    first_s, resident, wrong = load_once(system, state, job.last, expected, dropped=dropped)
    plain_s = read_plainly(system, job.last) if dropped else 0.0
    later_s, later_resident, later_wrong = load_once(system, state, job.last, expected, dropped=not dropped)
    plain_s = plain_s or read_plainly(system, job.last)
    announce("end")
    system.close()
    system.finish()
    found = TwoLoads(
        first_s=first_s,
        later_s=later_s,
        plain_s=plain_s,
        resident=max(resident, later_resident),
        wrong=sorted({*wrong, *later_wrong}),
        base_bytes=base_bytes,
        base_private_bytes=base_private_bytes,
    )
    return asdict(found)


def own_memory() -> int:
    """Bytes that this rank and its children hold, once what was freed has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not ours any more
    return processes.memory(processes.tree(os.getpid()))


def main(job: Job) -> None:
    """Join the other ranks, measure, and write the report."""
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        report = saves(job) if job.phase == "save" else loads(job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads and processes of the failed system cannot hold this one back
    Path(job.result).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
