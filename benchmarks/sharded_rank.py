"""One rank of one FSDP2 trial, in a process of its own: either all the saves, or both loads of the last one.

Saves: build the state; set the system up and let it come to rest; one cold save, and rest again; warm saves; one warm save
under the training loop, whose bytes are the ones checked. Loads, on any number of ranks: into a state of zeros, first with the
page cache dropped, then with it filled.
"""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measures import LoadTimes, ShardReport
from benchmarks.rank import announce, load_and_check, own_memory, quiet_save, save_under_load, settle
from benchmarks.sharded_state import ShardedState
from benchmarks.sharded_systems import SYSTEMS
from benchmarks.systems import System
from benchmarks.training import TrainingLoop


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver asks of one rank."""

    system: str
    root: str
    result: str
    digests: str
    """The file of the digests: written by rank 0 of the saves, read by every rank of the loads."""
    loads: bool
    rank: int
    ranks: int
    target_bytes: int
    warm_saves: int
    gate_s: float
    quiet_s: float
    seed: int

    @property
    def last(self) -> int:
        """The step of the last save."""
        return self.warm_saves + 1


def main(job: Job) -> None:
    """Join the other ranks, measure, and write the report."""
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        report: Any = loads(job) if job.loads else saves(job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads and processes of the failed system cannot hold this one back
    Path(job.result).write_text(json.dumps(asdict(report)))
    dist.barrier()
    dist.destroy_process_group()


def saves(job: Job) -> ShardReport:
    """Save again and again; what the last save must give back goes to the file of the digests."""
    state = ShardedState(target_bytes=job.target_bytes, ranks=job.ranks, rank=job.rank, seed=job.seed)
    loop = TrainingLoop(gate_s=job.gate_s)
    base_bytes = own_memory()
    announce("save")
    system = _system(job, state)
    settle()
    cold = quiet_save(system, state, 0)
    settle()
    warm = [quiet_save(system, state, step) for step in range(1, job.warm_saves + 1)]
    expected = state.digests()
    if job.rank == 0:
        Path(job.digests).write_text(json.dumps(expected))
    times = save_under_load(system, state, job.last, loop, job.quiet_s)
    announce("end")
    system.close()
    system.finish()
    return ShardReport(
        rank=job.rank,
        tensors=len(expected),
        state_bytes=state.nbytes(),
        cold=cold,
        warm=warm,
        loop=times,
        base_bytes=base_bytes,
    )


def loads(job: Job) -> LoadTimes:
    """Load the last save twice, and check every byte of every tensor both times."""
    state = ShardedState(target_bytes=job.target_bytes, ranks=job.ranks, rank=job.rank, seed=job.seed + 1)
    expected = json.loads(Path(job.digests).read_text())
    system = _system(job, state)
    settle()
    times = load_and_check(system, state, job.last, expected)
    system.close()
    system.finish()
    return times


def _system(job: Job, state: ShardedState) -> System:
    return SYSTEMS[job.system](Path(job.root), state, job.rank, job.ranks, fresh=not job.loads)
