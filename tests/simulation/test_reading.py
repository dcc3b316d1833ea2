"""Readers beside a simulated job that saves, removes, dies and starts again: they read whole checkpoints, and leave no trace.

READER-1 and READER-2 of `pipeline/read/choice.py`. Random schedules have readers as well (`test_job.py`); here the job keeps as
little as it can, and mutations leave out what a reader rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from checkpointd.errors import CheckpointdError, DamagedError
from checkpointd.layout.keys import LOG_ROOT
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.choice import CheckpointFinder
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix import store
from checkpointd.store.posix.disk import Disk
from checkpointd.testing.job.simjob import run_schedule
from checkpointd.testing.job.simledger import InvariantError
from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.job.simschedule import Kill, PowerCut, Schedule, SecondJob

Patch = pytest.MonkeyPatch
RUNS_MAX = 40


def greedy(seed: int) -> Schedule:
    """A job that keeps one checkpoint, with two readers and now and then a fault."""
    job = JobConfig(seed=seed, world_size=2, steps=4, keeps=1, collectors=seed % 2, frozen=seed % 3 == 0, readers=2)
    fault = (Kill(0), PowerCut(), SecondJob(), Kill(1, zombies=True))[seed % 4]
    return Schedule(job=job, faults=((150 + 13 * seed, fault),) if seed % 2 else (), cut_at_end=seed % 3 == 1)


# --- mutations ----------------------------------------------------------------------------------------------------


def removal_taken_for_damage(patch: Patch) -> None:
    """Whatever cannot be read any more counts as damaged."""

    async def verdict(self: CheckpointFinder, checkpoint: LoggedAttempt, error: CheckpointdError) -> CheckpointdError:
        return error if isinstance(error, DamagedError) else DamagedError(str(error))

    patch.setattr(CheckpointFinder, "verdict", verdict)


def oldest_read(patch: Patch) -> None:
    """A reader takes a checkpoint that there is, and not the newest."""
    newest = CheckpointFinder._newest

    def oldest(self: CheckpointFinder, state: LogState) -> LoggedAttempt:
        newest(self, state)
        return root_view.checkpoints_of(state.attempts.values())[-1]

    patch.setattr(CheckpointFinder, "_newest", oldest)


def made_durable(patch: Patch) -> None:
    """A reader settles what it reads, as those do who act on it, through a store that lets it."""
    begin = CheckpointFinder.begin

    async def settling(self: CheckpointFinder) -> CheckpointView:
        world = await begin(self)
        await self.store.settle(LOG_ROOT)
        return world

    def writable(disk: Disk) -> Disk:
        return disk

    patch.setattr(CheckpointFinder, "begin", settling)
    patch.setattr(store, "ReadOnlyDisk", writable)


@dataclass(frozen=True)
class Mutation:
    apply: Callable[[Patch], None]
    invariant: str


MUTATIONS = {
    "a removal taken for damage": Mutation(removal_taken_for_damage, "reads-whole"),
    "the oldest read": Mutation(oldest_read, "nothing-lost"),
    "a reader that makes durable what it saw": Mutation(made_durable, "reads-only"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    with monkeypatch.context() as patch:
        mutation.apply(patch)
        seed, caught = first_violation()
    assert caught == mutation.invariant
    run_schedule(greedy(seed))  # which does not break the code as it is


def first_violation() -> tuple[int, str]:
    for seed in range(RUNS_MAX):
        try:
            run_schedule(greedy(seed))
        except InvariantError as error:
            return seed, error.name
    raise AssertionError(f"not caught within {RUNS_MAX} seeds")
