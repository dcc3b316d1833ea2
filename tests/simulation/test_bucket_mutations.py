"""Mutations of the store in a bucket, and those of `test_job_mutations.py` in a bucket: the simulation must notice each.

Not here, with the reason:
- mutations that show only on a disk, where what is visible may not be durable, and where writers leave temporary files;
- a replacement of `latest` without condition: no decision reads it, and the next move corrects it;
- a failed create that is told to have lost: whoever lost looks at what is there. Writers that take back what they may have put
  are among the mutations of the commit protocol ("an uncertain vote taken back").
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from checkpointd.errors import StoreError
from checkpointd.layout.log_records import LogState
from checkpointd.pipeline.gc import uploads
from checkpointd.pipeline.outcome import recover
from checkpointd.store.base import Store
from checkpointd.store.objects.multipart import MultipartUpload
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.uploads import UnfinishedUpload
from checkpointd.testing.job.simjob import run_schedule
from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.job.simschedule import (
    ACTOR,
    BucketConfig,
    Fail,
    Fault,
    Kill,
    Moment,
    Refuse,
    Schedule,
    SecondJob,
)
from tests.simulation import test_job_mutations as on_disk
from tests.simulation.named_seeds import NamedSeeds

# Thousands of runs in virtual time: a busy machine needs minutes for the largest.
pytestmark = pytest.mark.timeout(600)

BUCKET = BucketConfig(page=8, weather=(("repeated", 0.02),))
Faults = tuple[tuple[int | Moment, Fault], ...]
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """`apply` breaks the store; `faults` may differ from seed to seed."""

    apply: Callable[[Patch], None]
    invariants: tuple[str, ...]
    faults: Callable[[int], Faults] = lambda _: ()
    bucket: BucketConfig = BUCKET
    job: JobConfig = field(default_factory=lambda: JobConfig(seed=0, steps=2))


# --- conditional writes ---------------------------------------------------------------------------------------------------


def answer_believed(patch: Patch) -> None:
    """Whoever is told that it lost believes it, without a look at the mark."""

    async def lost(self: ObjectStore, key: str, mark: str) -> bool:
        return False

    patch.setattr(ObjectStore, "_has_marked", lost)


def failure_taken_for_done(patch: Patch) -> None:
    """A create that failed counts as done."""
    put_if_absent = ObjectStore.put_if_absent

    async def put(self: ObjectStore, key: str, data: bytes, *, durable: bool = True) -> bool:
        try:
            return await put_if_absent(self, key, data, durable=durable)
        except StoreError:
            return True

    patch.setattr(ObjectStore, "put_if_absent", put)


def created_without_condition(patch: Patch) -> None:
    """A create looks first, and then puts the object whatever is there."""

    async def put(self: ObjectStore, key: str, data: bytes, *, durable: bool = True) -> bool:
        if await self.stat(key) is not None:
            return False
        await self.put(key, data)
        return True

    patch.setattr(ObjectStore, "put_if_absent", put)


# --- uploads --------------------------------------------------------------------------------------------------------------


def upload_believed(patch: Patch) -> None:
    """An upload of which the end has failed counts as there."""

    async def is_there(self: MultipartUpload, size: int) -> bool:
        return True

    patch.setattr(MultipartUpload, "_is_there", is_there)


def upload_not_asked_for(patch: Patch) -> None:
    """An upload of which the end has failed counts as lost."""

    async def is_there(self: MultipartUpload, size: int) -> bool:
        return False

    patch.setattr(MultipartUpload, "_is_there", is_there)


def finished_in_the_background(patch: Patch) -> None:
    """`finish` returns before the object is there."""
    finish = MultipartUpload.finish
    tasks = set()

    async def later(self: MultipartUpload, size: int) -> None:
        tasks.add(asyncio.ensure_future(finish(self, size)))

    patch.setattr(MultipartUpload, "finish", later)


def every_upload_dead(patch: Patch) -> None:
    """The uploads of attempts that are not decided are aborted as well."""

    def dead(state: LogState, key: str) -> bool:
        return True

    patch.setattr(uploads, "_is_dead", dead)


def no_upload_aborted(patch: Patch) -> None:
    """A start leaves the uploads of killed writers."""

    async def none(store: Store, *, dry_run: bool = False) -> Sequence[UnfinishedUpload]:
        return []

    patch.setattr(recover, "abort_dead_uploads", none)


MUTATIONS = {
    "the answer believed": Mutation(answer_believed, ("always-commits", "next-save-works")),
    "a failed create taken for done": Mutation(
        failure_taken_for_done,
        ("named-durable", "announced", "durable"),
        lambda seed: ((5 + seed, Fail(ACTOR, "lost", 2, "create")),),
    ),
    "a create without condition": Mutation(
        created_without_condition,
        ("log-valid", "one-decision"),
        lambda seed: ((10 + seed, SecondJob()),),
    ),
    "an upload believed": Mutation(
        upload_believed,
        ("named-durable",),
        lambda seed: ((Moment("part", ".chunks", 1 + seed), Fail(ACTOR, "lost", 1, "complete")),),
    ),
    "an upload not asked for": Mutation(upload_not_asked_for, ("always-commits", "next-save-works")),
    "an upload finished in the background": Mutation(
        finished_in_the_background,
        ("named-durable",),
        lambda seed: ((Moment("part", ".chunks", 1 + seed), Fail(ACTOR, "lost", 1, "complete")),),
    ),
    "the uploads of others aborted": Mutation(
        every_upload_dead,
        ("uploads-stand",),
        lambda seed: ((Moment("begin", ".chunks", 1 + seed % 3), SecondJob()),),
        job=JobConfig(seed=0, steps=2, collectors=2, keeps=1),
    ),
    "no upload aborted": Mutation(
        no_upload_aborted, ("uploads-stand",), lambda seed: ((Moment("part", ".chunks", 1 + seed), Kill(ACTOR)),)
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_of_the_store_are_caught(name: str, named_seeds: NamedSeeds) -> None:
    mutation = MUTATIONS[name]

    def schedule(seed: int) -> Schedule:
        return Schedule(job=replace(mutation.job, seed=seed), faults=mutation.faults(seed), bucket=mutation.bucket)

    seed = on_disk.check_caught(f"store: {name}", mutation.apply, mutation.invariants, schedule, named_seeds)
    run_schedule(schedule(seed))  # which does not break the code as it is


# --- the commit protocol --------------------------------------------------------------------------------------------------

ONLY_ON_DISK = (
    "chunks never synced",
    "a decision reported before it is durable",
    "nothing settled",
    "temporary files of unseen writers swept",
)
MORE_STEPS = {"an attempt written though it is fenced": 6}
"""A new job takes longer to begin in a bucket, and the old one must still be at work then."""
OTHER_FAULTS: dict[str, Callable[[int], Faults]] = {
    "attempts of other daemons overlooked": lambda seed: (
        (17 + seed % 6, Kill(0)),
        (1, Fail(1, "repeated", 20, "create", ".vote")),  # so that it is still undecided when the next job begins
    )
}
KINDS = {"link": "create", "rename": "replace", "create": "begin", "fsync": "complete"}
"""The requests that do what these system calls do."""
EARLIER = 4
"""A save has so many times fewer effects on a bucket."""


@pytest.mark.parametrize("name", [name for name in on_disk.MUTATIONS if name not in ONLY_ON_DISK])
def test_mutations_of_the_commit_protocol_are_caught(name: str, named_seeds: NamedSeeds) -> None:
    mutation = on_disk.MUTATIONS[name]

    def schedule(seed: int) -> Schedule:
        found = in_bucket(on_disk.schedule_of(mutation, seed))
        job = replace(found.job, steps=MORE_STEPS.get(name, found.job.steps))
        return replace(found, job=job, faults=OTHER_FAULTS[name](seed) if name in OTHER_FAULTS else found.faults)

    seed = on_disk.check_caught(f"bucket: {name}", mutation.apply, mutation.invariants, schedule, named_seeds)
    run_schedule(schedule(seed))


def in_bucket(schedule: Schedule) -> Schedule:
    faults = tuple((_when(at), _fault(fault)) for at, fault in schedule.faults)
    return replace(schedule, faults=faults, sweeps_foreign=False, bucket=BUCKET)


def _when(at: int | Moment) -> int | Moment:
    return Moment(KINDS[at.kind], at.name, at.count) if isinstance(at, Moment) else 1 + at // EARLIER


def _fault(fault: Fault) -> Fault:
    if not isinstance(fault, Refuse):
        return fault
    return Fail(fault.rank, "late" if fault.number == errno.ETIMEDOUT else "lost", fault.count, KINDS.get(fault.kind, ""))
