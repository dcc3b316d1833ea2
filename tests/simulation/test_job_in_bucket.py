"""A simulated job keeps the invariants of `checkpointd/testing/job/simledger.py` in a bucket, too, whatever happens to its
processes and to its requests. Random schedules are in `test_job.py`.
"""

from __future__ import annotations

import itertools
from typing import Literal

import pytest

from checkpointd.testing.job.simjob import SimReport, run_schedule
from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.job.simschedule import (
    ACTOR,
    BucketConfig,
    Fail,
    Fault,
    Kill,
    LoseSidecar,
    Outage,
    Pause,
    PowerCut,
    Schedule,
    SecondJob,
    random_schedule,
)
from checkpointd.testing.simbucket import Fate

# Thousands of runs in virtual time: a busy machine needs minutes for the largest.
pytestmark = pytest.mark.timeout(600)

BUCKETS = (BucketConfig(), BucketConfig(numbered=True, page=3, weather=(("repeated", 0.05), ("slow down", 0.02))))
FATES: tuple[Fate, ...] = ("lost", "unanswered", "late", "repeated", "slow down", "denied")


def strike_everywhere(job: JobConfig, fault: Fault, stride: int) -> int:
    """Run `job` with `fault` just after one effect, then after the one `stride` later, and so on; the last that was struck."""
    for number in itertools.count(1 + job.seed % stride, stride):
        bucket = BUCKETS[number // stride % 2]
        if not run_schedule(Schedule(job=job, bucket=bucket, faults=((number, fault),))).struck:
            return number - stride
    raise AssertionError("unreachable")


def test_without_faults_every_save_commits_and_weather_is_no_fault() -> None:
    for seed, bucket in itertools.product(range(5), BUCKETS):
        report = run_schedule(Schedule(job=JobConfig(seed=seed, steps=3, sidecars=seed % 2 == 1), bucket=bucket))
        assert (report.incarnations, report.aborted, report.committed) == (2, 0, 4)


@pytest.mark.parametrize(
    "fault", [PowerCut(), Kill(0), Kill(2), Kill(ACTOR, zombies=True), SecondJob(), Pause(ACTOR, 30.0)], ids=str
)
def test_struck_at_every_effect(fault: Fault, stride: int) -> None:
    assert strike_everywhere(JobConfig(seed=4, steps=1), fault, max(1, stride // 3)) >= 20


@pytest.mark.parametrize("fate", FATES)
def test_requests_fail_at_every_effect(fate: Fate, stride: int) -> None:
    job = JobConfig(seed=7, steps=1)
    for fault in (Fail(ACTOR, fate, 1), Fail(0, fate, 20), Outage(5.0, fate, 0.7)):
        assert strike_everywhere(job, fault, max(1, stride // 3)) > 15


def test_a_bucket_out_of_reach_for_longer_than_a_save_may_take_costs_that_save_alone() -> None:
    reports = []
    for seed in range(12):
        job = JobConfig(seed=seed, steps=3, sidecars=seed % 3 == 0)
        faults = ((8 + 5 * seed, Outage(60.0, ("lost", "slow down", "late", "unanswered")[seed % 4], 1.0)),)
        reports.append(run_schedule(Schedule(job=job, bucket=BUCKETS[seed % 2], faults=faults)))
    assert all(report.committed for report in reports)
    assert any(report.aborted for report in reports)


@pytest.mark.parametrize("kind", ["delete", "replace", "put", "uploads", "abort"])
def test_a_job_commits_its_saves_without_rights_that_no_commit_needs(kind: str) -> None:
    """Whether it may remove anything, move `latest`, renew its lease, or list or abort uploads: the next start does it."""
    faults = tuple((1 + rank, Fail(rank, "denied", 10**9, kind)) for rank in range(3))
    report = run_schedule(Schedule(job=JobConfig(seed=1, steps=4, read_back=True), bucket=BucketConfig(), faults=faults))
    assert (report.committed, report.aborted) == (5, 0)


# --- sidecars -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "rank", "how"), [(1, 0, "killed"), (2, 0, "cut off"), (3, 1, "stopped")])
def test_sidecar_lost_at_every_effect(first: int, rank: int, how: Literal["killed", "stopped", "cut off"], stride: int) -> None:
    """This costs the save in its hands, unless its vote stands, and no other."""
    job = JobConfig(seed=8, steps=1, sidecars=True)
    for number in itertools.count(first, max(1, stride // 3)):
        fault = LoseSidecar(rank, how, 5.0)
        report = run_schedule(Schedule(job=job, bucket=BUCKETS[number % 2], faults=((number, fault),)))
        if not report.struck:
            break
        assert (report.committed + report.aborted, report.incarnations) == (2, 2)
        assert report.aborted <= 1
    assert number > 20


# --- the simulation itself ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_schedules_reach_what_they_are_for() -> None:
    """Enough of the random schedules commit, abort, strike and start again: a job that does nothing breaks no invariant."""
    reports: list[SimReport] = [run_schedule(random_schedule(seed, "bucket")) for seed in range(30)]
    assert sum(report.committed for report in reports) > 50
    assert sum(report.aborted for report in reports) > 25
    assert sum(report.struck for report in reports) > 30
    assert max(report.incarnations for report in reports) >= 4
    assert sum(report.sidecars for report in reports) > 30
    assert sum(report.collected for report in reports) > 0
    assert sum(report.read_back for report in reports) > 10
    assert sum(report.read for report in reports) > 50
