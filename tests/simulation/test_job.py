"""A simulated job keeps the invariants of `checkpointd/testing/job/simledger.py` whatever happens to it.

Crash points of a save of three ranks, all of them by `--sim-stride=1`, and random schedules, as many as
`--sim-schedules=20000` says. A failure's notes name the seed and the schedule; `run_schedule` of that schedule replays it.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any, Literal

import pytest

from checkpointd.commit.log_access import STATES_KEPT
from checkpointd.layout import keys
from checkpointd.pipeline.write import choose_codec, encode
from checkpointd.testing import simloop
from checkpointd.testing.job.simjob import SimJob, run_schedule
from checkpointd.testing.job.simrank import JobConfig, SavePlan
from checkpointd.testing.job.simschedule import (
    ACTOR,
    Fault,
    Kill,
    LoseSidecar,
    Moment,
    Pause,
    PowerCut,
    Refuse,
    Schedule,
    SecondJob,
    Storage,
    random_schedule,
)
from tests.simulation.conftest import STATE_EVERY

# Thousands of runs in virtual time: a busy machine needs minutes for the largest.
pytestmark = pytest.mark.timeout(600)


def strike_everywhere(job: JobConfig, fault: Fault, stride: int) -> int:
    """Run `job` with `fault` just after one effect, then after the one `stride` later, and so on; the last that was struck."""
    for number in itertools.count(1 + job.seed % stride, stride):
        if not run_schedule(Schedule(job=job, faults=((number, fault),))).struck:
            return number - stride
    raise AssertionError("unreachable")


def test_without_faults_every_save_commits() -> None:
    for seed in range(10):
        report = run_schedule(Schedule(job=JobConfig(seed=seed, steps=3)))
        assert (report.incarnations, report.aborted) == (2, 0)
        assert report.committed == 4


def test_log_6_the_log_of_a_job_that_removes_nothing_stays_short() -> None:
    report = run_schedule(Schedule(job=JobConfig(seed=0, steps=60, world_size=1)))
    assert report.committed == 61
    assert report.entries_max <= 2 * STATES_KEPT * STATE_EVERY


@pytest.mark.parametrize("absent", [0, 1])
def test_a_save_that_one_rank_has_missed_costs_no_later_one(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks announce the save that rank 0 misses; rank 1 counts other saves than rank 0 from then on."""

    def plan(_: JobConfig, __: int, step: int) -> SavePlan:
        return SavePlan(step, keys.default_tag(step), absent=absent if step == 0 else None)

    monkeypatch.setattr(JobConfig, "plan", plan)
    for seed in range(4):
        report = run_schedule(Schedule(job=JobConfig(seed=seed, steps=4, deviations=True)))
        assert (report.committed, report.aborted) == (4, 1)


def test_ranks_whose_objects_lie_in_directories_of_their_own_keep_the_invariants(
    stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random schedules, as if there were so many ranks that each of these is in another group."""
    monkeypatch.setattr(keys, "RANKS_PER_GROUP", 1)
    seeds = range(160 // stride)
    assert sum(run_schedule(random_schedule(seed)).committed for seed in seeds) > len(seeds) // 2


@pytest.mark.nightly
def test_deltas_keep_the_invariants(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas in place of references: what is frozen differs by nothing from the checkpoint in full, which collectors remove."""
    persist, made, stored = JobConfig.persist.fget, encode._delta, []

    def noted(*arguments: Any) -> memoryview | None:
        found = made(*arguments)
        stored.append(found is not None)
        return found

    monkeypatch.setattr(
        JobConfig, "persist", property(lambda job: replace(persist(job), compression="planes", dedup=False, full_every=3))
    )
    monkeypatch.setattr(choose_codec, "DELTA_BYTES_MIN", 1)
    monkeypatch.setattr(encode, "_delta", noted)
    schedules = [random_schedule(seed) for seed in range(480 // stride)]
    frozen = [schedule for schedule in schedules if schedule.job.frozen]
    assert sum(run_schedule(schedule).committed for schedule in frozen) > len(frozen)
    assert any(stored)


@pytest.mark.parametrize("steps", [1, 2])
def test_power_cut_at_every_effect(steps: int, stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=steps, steps=steps), PowerCut(), stride) > 100 * steps


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_kill_of_one_rank_at_every_effect(rank: int, stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=3, steps=1), Kill(rank), stride) > 100


def test_kill_that_leaves_the_others_at_every_effect(stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=4, steps=1), Kill(ACTOR, zombies=True), stride) > 100


def test_second_job_at_every_effect(stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=5, steps=1), SecondJob(), stride) > 100


def test_stop_past_the_deadline_at_every_effect(stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=6, steps=1), Pause(ACTOR, 30.0), stride) > 100


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_refusal_at_every_effect(number: int, stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=7, steps=1), Refuse(ACTOR, number, 1), stride) > 100


# --- sidecars -----------------------------------------------------------------------------------------------------


def test_with_sidecars_and_without_faults_every_save_commits() -> None:
    for seed in range(10):
        report = run_schedule(Schedule(job=JobConfig(seed=seed, steps=3, sidecars=True)))
        assert (report.incarnations, report.aborted, report.sidecars) == (2, 0, 6)
        assert report.committed == 4


@pytest.mark.parametrize(("first", "rank", "how"), [(1, 0, "killed"), (2, 0, "cut off"), (3, 1, "stopped")])
def test_sidecar_lost_at_every_effect(first: int, rank: int, how: Literal["killed", "stopped", "cut off"], stride: int) -> None:
    """This costs the save in its hands, unless its vote stands, and no other."""
    job = JobConfig(seed=8, steps=1, sidecars=True)
    for number in itertools.count(first, stride):
        report = run_schedule(Schedule(job=job, faults=((number, LoseSidecar(rank, how, 5.0)),)))
        if not report.struck:
            break
        assert (report.committed + report.aborted, report.incarnations) == (2, 2)
        assert report.aborted <= 1
    assert number > 100


def test_trainers_killed_at_every_effect_while_their_sidecars_go_on(stride: int) -> None:
    """Where all ranks' snapshots were whole, the checkpoint is committed by the sidecars, in a start that is over."""
    # In most seeds the sidecars are done before the next start begins; in this one they are not.
    job, surviving = JobConfig(seed=38, steps=1, sidecars=True), 0
    for number in itertools.count(1, stride):
        report = run_schedule(Schedule(job=job, faults=((number, Kill(0)),)))
        if not report.struck:
            break
        surviving += report.surviving
    assert number > 100
    assert surviving * stride > 10


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_power_cut_when_a_vote_is_seen_that_is_not_durable(rank: int) -> None:
    stopped = (Moment("link", ".vote", rank + 1), Pause(ACTOR, 30.0))
    cut = (Moment("link", "commit", 1), PowerCut())
    for seed in range(30):
        run_schedule(Schedule(job=JobConfig(seed=seed, steps=1), faults=(stopped, cut)))


def test_random_schedules(seeds: range, storage: Storage) -> None:
    for seed in seeds:
        run_schedule(random_schedule(seed, storage))


# --- the simulation itself ----------------------------------------------------------------------------------------


def story(seed: int, storage: Storage) -> str:
    """Every effect of a run, without sizes and digests of ballots: they hang on this process's id and the time."""

    async def main() -> str:
        job = SimJob(random_schedule(seed, storage))
        await job.run()
        lines = (str(line).partition(" B")[0].rstrip("0123456789") for line in job.storage.trace)
        return re.sub(r"/ballot-[0-9a-f]+", "/ballot", "\n".join(lines))

    return simloop.run(seed, main())


@pytest.mark.parametrize("storage", ["disk", "bucket"])
def test_a_seed_replays(storage: Storage) -> None:
    for seed in range(2):
        assert story(seed, storage) == story(seed, storage)


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["disk", pytest.param("bucket", marks=pytest.mark.nightly)])
def test_a_seed_replays_in_another_process(storage: Storage) -> None:
    # No fixture of pytest reaches the other process.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pytest; from conftest import scale_down; "
        "from test_job import story; scale_down(pytest.MonkeyPatch()); print(story(11, sys.argv[2]))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code, os.path.dirname(__file__), storage],
            env={**os.environ, "PYTHONHASHSEED": hashseed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hashseed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].strip("\n") == story(11, storage)


@pytest.mark.nightly
def test_schedules_reach_what_they_are_for() -> None:
    """Enough of the random schedules commit, abort, strike and start again: a job that does nothing breaks no invariant."""
    reports = [run_schedule(random_schedule(seed)) for seed in range(60)]
    assert sum(report.committed for report in reports) > 100
    assert sum(report.aborted for report in reports) > 50
    assert sum(report.struck for report in reports) > 60
    assert max(report.incarnations for report in reports) >= 4
    assert sum(report.sidecars for report in reports) > 60
    # Attempts that outlive their start and commit are rare: the trainers must die while their sidecars are at work.
    outlived = [Schedule(job=JobConfig(seed=seed, sidecars=True), faults=((60 + seed, Kill(0)),)) for seed in range(30)]
    assert sum(run_schedule(schedule).surviving for schedule in outlived) > 2
    assert sum(report.collected for report in reports) > 0
    assert sum(report.read_back for report in reports) > 20
