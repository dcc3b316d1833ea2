"""Aborted attempts are forgotten and records of old starts go, beside everything that can happen to a job: COLLECT-8, COMMIT-5,
ANNOUNCE-1, START-2 and START-3. The numbers that stay are small here, so that even short runs forget.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from checkpointd.commit import garbage
from checkpointd.commit.facts import AttemptFacts
from checkpointd.layout.keys import OUTCOME, object_key, start_key
from checkpointd.pipeline.announcement import CatalogAnnouncement
from checkpointd.pipeline.gc import collect
from checkpointd.pipeline.root import catalog, starts
from checkpointd.store.base import Store
from checkpointd.testing.job.simjob import run_schedule
from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.job.simschedule import (
    ACTOR,
    Kill,
    LoseSidecar,
    Moment,
    Pause,
    Refuse,
    Schedule,
    SecondJob,
    random_schedule,
)
from tests.simulation.named_seeds import NamedSeeds
from tests.simulation.test_job_mutations import check_caught

pytestmark = pytest.mark.timeout(600)
ABORTED_KEPT, STARTS_KEPT = 4, 2
LATE = ("one-outcome", "ranks-agree", "nothing-lost", "aborted-never-loaded")
"""The invariants that a late writer may break."""
LOST = ("plan-stands", "always-ends", "catalog-tells")
"""Those that break if ranks do not find the outcome."""
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def little_stays(monkeypatch: Patch) -> None:
    monkeypatch.setattr(garbage, "ABORTED_KEPT", ABORTED_KEPT)
    monkeypatch.setattr(starts, "KEPT", STARTS_KEPT)


def forgetful(seed: int) -> Schedule:
    """A random schedule in which many saves abort."""
    schedule = random_schedule(seed)
    return replace(schedule, job=replace(schedule.job, deviations=True, steps=5))


@pytest.mark.nightly
def test_what_is_forgotten_never_comes_back() -> None:
    reports = [run_schedule(forgetful(seed)) for seed in range(24)]
    assert sum(report.forgotten for report in reports) > 5
    assert sum(report.committed for report in reports) > 20


def test_killed_after_each_removal_of_a_forgotten_attempt() -> None:
    job = JobConfig(seed=3, world_size=2, steps=8, deviations=True)
    forgotten = 0
    for kind in ("unlink", "rmdir"):
        for count in range(1, 4):
            faults = ((Moment(kind, "/outcome" if kind == "unlink" else "-0", count), Kill()),)
            forgotten += run_schedule(Schedule(job=job, faults=faults, cut_at_end=count == 2)).forgotten
    assert forgotten


# --- mutations ----------------------------------------------------------------------------------------------------------


def newest_start_removed(patch: Patch) -> None:
    """A start removes the record of its own start with the older ones."""

    async def rash(store: Store, number: int, *_: object, **__: object) -> None:
        await store.delete(start_key(number))

    patch.setattr(starts, "remove_older", rash)


def tombstone_dropped(patch: Patch) -> None:
    """An aborted attempt is forgotten while its ranks may still be at work."""
    patch.setattr(garbage, "ABORTED_KEPT", 0)


def outcome_goes_first(patch: Patch) -> None:
    """The outcome of a forgotten attempt goes before its votes."""

    async def wrong(store: Store, prefix: str) -> None:
        names = [entry.name for entry in await catalog.objects_of(store, prefix)]
        for name in sorted(names, key=lambda name: name != OUTCOME):
            await store.delete(object_key(prefix, name))

    patch.setattr(collect, "remove_records", wrong)


def commits_forgotten(patch: Patch) -> None:
    """Retention forgets commits as if they had been aborted."""

    def spent(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
        return [facts for facts in attempts if facts.state in ("aborted", "committed")][:-2]

    patch.setattr(collect, "spent_records", spent)


def late_writer_votes(patch: Patch) -> None:
    """A writer that was replaced does not look whether the attempt was decided, and the attempt is forgotten at once."""

    async def never(self: CatalogAnnouncement) -> None:
        return None

    patch.setattr(CatalogAnnouncement, "check_undecided", never)
    patch.setattr(garbage, "ABORTED_KEPT", 0)


@dataclass(frozen=True, slots=True)
class Mutation:
    apply: Callable[[Patch], None]
    invariants: tuple[str, ...]
    schedule: Callable[[int], Schedule] = forgetful


def replaced_writers(seed: int) -> Schedule:
    """A sidecar is stopped while it persists. The writer that takes over meets a broken disk, so the save aborts. The sidecar
    goes on when the attempt has long been forgotten.
    """
    job = JobConfig(seed=seed, world_size=1, steps=4, sidecars=True)
    nth = 1 + seed % 6
    broken = Refuse(ACTOR, errno.EIO, 2 + seed % 5)
    faults = (
        (Moment("create", ".chunks", nth), LoseSidecar(0, "stopped", 40.0)),
        (Moment("create", ".chunks", nth + 1), broken),
    )
    return Schedule(job=job, faults=faults)


def many_starts(seed: int) -> Schedule:
    job = JobConfig(seed=seed, world_size=2, steps=3)
    return Schedule(
        job=job, faults=((60 + seed, Kill()), (140 + seed, SecondJob()), (220 + seed, Pause(0, 30.0, replaced=True)))
    )


MUTATIONS = {
    "the newest start's record removed": Mutation(newest_start_removed, ("starts-grow",), many_starts),
    "a tombstone dropped while its writers are at work": Mutation(tombstone_dropped, (*LATE, *LOST)),
    "the outcome before the votes": Mutation(outcome_goes_first, ("one-outcome",)),
    "a writer that comes too late": Mutation(late_writer_votes, (*LATE, "catalog-tells"), replaced_writers),
    "a checkpoint forgotten": Mutation(commits_forgotten, ("one-outcome", "latest-whole", "nothing-lost", "latest-forward")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str, named_seeds: NamedSeeds) -> None:
    mutation = MUTATIONS[name]
    seed = check_caught(f"left over: {name}", mutation.apply, mutation.invariants, mutation.schedule, named_seeds)
    run_schedule(mutation.schedule(seed))  # the same schedule does not break the code as it is
