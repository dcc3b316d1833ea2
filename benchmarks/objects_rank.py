"""The process of a trial of `objects.py`: either all the saves, or the load of the last one into a fresh state."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import processes, seaweed
from benchmarks.objects_page import LoadedObjects, SavedObjects
from benchmarks.objects_systems import SYSTEMS, ObjectSystem
from benchmarks.rank import Clock, announce, own_memory, settle
from benchmarks.state import State


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver asks of the process. `requests` is the address of the server's own counts."""

    system: str
    bucket: str
    folder: str
    result: str
    digests: str
    loads: bool
    target_bytes: int
    saves: int
    seed: int
    metrics_url: str
    server_pid: int
    rank: int = 0


class Meters:
    """What is read before and after a save or a load: the server's processor time, and the requests that it has counted."""

    def __init__(self, job: Job, system: ObjectSystem) -> None:
        self._job, self._system = job, system
        self._before = self._now()

    def _now(self) -> tuple[float, dict[str, int], dict[str, int]]:
        counted = seaweed.requests(self._job.metrics_url, self._job.bucket)
        return processes.cpu_seconds([self._job.server_pid]), counted, self._system.requests()

    def found(self) -> dict[str, Any]:
        """The differences."""
        (cpu_s, counted, own), (cpu_before_s, counted_before, own_before) = self._now(), self._before
        return {
            "server_cpu_s": cpu_s - cpu_before_s,
            "requests": _less(counted, counted_before),
            "own_requests": _less(own, own_before),
        }


def _less(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return dict(Counter(now) - Counter(before))


def main(job: Job) -> None:
    """Measure, and write the result."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found: Any = load(job) if job.loads else [asdict(one) for one in saves(job)]
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads and processes of the failed system cannot hold this one back
    Path(job.result).write_text(json.dumps(asdict(found) if job.loads else found))
    dist.destroy_process_group()


def saves(job: Job) -> list[SavedObjects]:
    """The first save of the process, and those that are measured. The bytes of the last one are those that are checked."""
    state = State(target_bytes=job.target_bytes, ranks=1, rank=0, seed=job.seed)
    base_bytes = own_memory()
    system = _system(job, state)
    announce("first")
    _timed(job, system, 0, base_bytes)
    found = []
    for step in range(1, job.saves + 1):
        state.advance()
        settle()
        announce("save")
        found.append(_timed(job, system, step, base_bytes))
        announce("rest")
    Path(job.digests).write_text(json.dumps(system.digests()))
    system.close()
    system.finish()
    return found


def _timed(job: Job, system: ObjectSystem, step: int, base_bytes: int) -> SavedObjects:
    meters = Meters(job, system)
    clock = Clock(system, step)
    clock.wait_safe()
    times = clock.times()
    return SavedObjects(
        call_s=times.call_s,
        safe_s=times.safe_s,
        durable_s=times.durable_s,
        cpu_s=times.cpu_s,
        base_bytes=base_bytes,
        **meters.found(),
    )


def load(job: Job) -> LoadedObjects:
    """The last save, in a process that has not saved."""
    state = State(target_bytes=job.target_bytes, ranks=1, rank=0, seed=job.seed, trained=False)
    state.clear()
    expected: dict[str, str] = json.loads(Path(job.digests).read_text())
    system = _system(job, state)
    settle()
    base_bytes = own_memory()
    meters = Meters(job, system)
    announce("load")
    seconds, cpu_s = _clocked(lambda: system.load(job.saves))
    announce("rest")
    measured = meters.found()
    found = system.digests()
    system.close()
    system.finish()
    return LoadedObjects(
        load_s=seconds,
        cpu_s=cpu_s,
        base_bytes=base_bytes,
        wrong=[name for name, digest in expected.items() if found.get(name) != digest],
        **measured,
    )


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    """The seconds that `work` takes, and the processor time of this process and its children meanwhile."""
    cpu_before_s, start = processes.cpu_seconds(processes.tree(os.getpid())), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return seconds, processes.cpu_seconds(processes.tree(os.getpid())) - cpu_before_s


def _system(job: Job, state: State) -> ObjectSystem:
    system = SYSTEMS[job.system](f"s3://{job.bucket}/run", Path(job.folder), state, fresh=not job.loads)
    settle()
    return system
