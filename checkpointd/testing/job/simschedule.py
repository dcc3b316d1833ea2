"""Schedules of faults for a simulated job.

A schedule is data, printed when a run breaks and run again to replay it. `random_schedule` draws one from a seed.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.simbucket import PAGE, RETRY_S, Fate, SimClient
from checkpointd.testing.simdisk import ProcessDisk

ACTOR = -1
"""In place of a rank: the process of the effect after which the fault strikes."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of one rank of the newest incarnation. Its launcher ends the others, or (`zombies`) leaves them running."""

    rank: int = ACTOR
    zombies: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP of one rank for some virtual seconds; with `replaced`, its launcher takes it for dead and starts anew."""

    rank: int
    seconds: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class PowerCut:
    """All processes end, and the disk keeps only the state that SIMFS-1 to SIMFS-4 guarantee, and a random part of the rest."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The disk refuses one rank's next calls of kind `kind` (all kinds: empty) with `number`, up to `count` of them.

    With ETIMEDOUT they happen, and only the replies are lost (SIMDISK-5).
    """

    rank: int
    number: int
    count: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """The next `count` tries of requests of kind `kind` (all kinds: empty), for objects whose name ends in `name`, by one rank
    meet `fate` (`simbucket.py`), and as many by its sidecar.
    """

    rank: int
    fate: Fate
    count: int
    kind: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Outage:
    """For some virtual seconds, a share of all requests to the bucket meets `fate`."""

    seconds: float
    fate: Fate
    share: float


@dataclass(frozen=True, slots=True)
class SecondJob:
    """A new incarnation starts while all ranks of the old one run: the same job's, a stranger's, or one that takes over."""

    who: Literal["same", "stranger", "usurper"] = "same"


@dataclass(frozen=True, slots=True)
class LoseSidecar:
    """The rank gives its sidecar up. It was killed, is stopped for some virtual seconds, or goes on without a connection."""

    rank: int
    how: Literal["killed", "stopped", "cut off"]
    seconds: float = 0.0


Fault: TypeAlias = Kill | Pause | PowerCut | Refuse | Fail | Outage | SecondJob | LoseSidecar


@dataclass(frozen=True, slots=True)
class Moment:
    """The `count`th effect, from 1, of kind `kind` on an object whose name ends in `name`, or on a `ballot`. If `name` is a
    kind of record, as `commit`, it is the effect that puts the `count`th entry of the log with such a record.
    """

    kind: str
    name: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """The settings of a simulated bucket, as in SimBucket. `client`: the class of its processes' clients."""

    numbered: bool = False
    page: int = PAGE
    weather: tuple[tuple[Fate, float], ...] = ()
    retry_s: float = RETRY_S
    client: type[SimClient] = SimClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and its faults: each strikes just after a Moment, or after the effect of that number, from 1 over the whole run."""

    job: JobConfig
    faults: tuple[tuple[int | Moment, Fault], ...] = ()
    sweeps_foreign: bool = False
    """Whether recovery takes temporary files of running processes for those of dead ones, as on another machine."""
    cut_at_end: bool = False
    sees_deaths: bool = False
    """Whether a process can tell that another one has ended, as on one machine."""
    view: type[ProcessDisk] = ProcessDisk
    bucket: BucketConfig | None = None
    """The bucket in which the root lies; None: it lies on a disk."""

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def is_calm(self) -> bool:
        """Whether nothing happens for which a save may be aborted."""
        return not (self.faults or self.job.deviations or self.sweeps_foreign)


Storage: TypeAlias = Literal["disk", "bucket"]
EFFECTS_PER_STEP = 120
ERRORS = (errno.EIO, errno.ENOSPC, errno.ETIMEDOUT)
KINDS = ("", "", "fsync", "sync-dir", "write", "link", "create")
NAMES = (".chunks", ".index", ".vote", ".json", ".state", "/latest")
"""The kinds of objects that a Moment can name."""
MOMENTS = (
    (".vote", ("link",), 3),
    ("ballot", ("link",), 1),
    ("commit", ("link",), 1),
    ("announce", ("link",), 1),
    ("begin", ("link",), 1),
    ("/latest", ("link", "rename"), 1),
    (".index", ("link",), 3),
    (".chunks", ("write", "fsync"), 3),
)
"""The effects that the protocol depends on: name of the object, kinds of effects, their number in a save of three ranks."""


EFFECTS_PER_STEP_IN_BUCKET = 32
FATES: tuple[Fate, ...] = ("lost", "unanswered", "late", "late", "repeated", "slow down", "denied")
KINDS_IN_BUCKET = ("", "", "create", "create", "replace", "put", "part", "complete", "delete", "get", "look", "list")
NAMES_IN_BUCKET = (*NAMES, "/00000002", "/00000003", "/log/000000000003.json", "/log/000000000005.json")
MOMENTS_IN_BUCKET = (
    (".vote", ("create",), 3),
    ("ballot", ("create",), 1),
    ("commit", ("create",), 1),
    ("announce", ("create",), 1),
    ("begin", ("create",), 1),
    ("/latest", ("create", "replace"), 1),
    (".index", ("create",), 3),
    (".chunks", ("begin", "part", "complete", "put"), 3),
)


def random_schedule(seed: int, storage: Storage = "disk") -> Schedule:
    """The schedule for `seed`."""
    schedule = _random_on_disk(seed)
    return schedule if storage == "disk" else _in_bucket(seed, schedule)


def _random_on_disk(seed: int) -> Schedule:
    rng = random.Random(f"schedule {seed}")
    steps = rng.choice((1, 2, 2, 3))
    job = JobConfig(
        seed=seed,
        world_size=rng.choice((1, 2, 3, 3, 3, 4)),
        steps=steps,
        deviations=rng.random() < 0.5,
        compression=rng.choice(("none", "none", "planes")),
    )
    count = rng.choice((0, 1, 1, 2, 2, 3, 4))
    faults = [(_random_time(rng, steps), _random_fault(rng, job)) for _ in range(count)]
    if rng.random() < 0.3:
        # One process is paused in the middle of a call, the others continue for a short time, and then the power fails.
        faults += [(_random_time(rng, steps), Pause(ACTOR, 30.0)), (_random_time(rng, steps), PowerCut())]
    sidecars = _random_sidecars(seed, job)
    if sidecars is not None:
        job, faults = replace(job, sidecars=True), faults + sidecars
    job = replace(
        _random_collection(seed, job),
        readers=random.Random(f"readers {seed}").choice((0, 0, 1, 2)),
        read_back=random.Random(f"read back {seed}").random() < 0.5,
    )
    schedule = Schedule(job=job, faults=tuple(faults), sweeps_foreign=rng.random() < 0.3, cut_at_end=rng.random() < 0.5)
    return _random_leases(seed, schedule)


def _in_bucket(seed: int, schedule: Schedule) -> Schedule:
    """The same job with its root in a bucket, and faults at other times; those of the disk become faults of the bucket."""
    rng = random.Random(f"bucket {seed}")
    job = schedule.job
    faults: list[tuple[int | Moment, Fault]] = []
    for _, fault in schedule.faults:
        changed = _random_failure(rng, job) if isinstance(fault, Refuse) else fault
        faults.append((_random_time_in_bucket(rng, job.steps), changed))
    for _ in range(rng.choice((0, 0, 1, 2))):
        made = _random_failure(rng, job) if rng.random() < 0.6 else _random_outage(rng)
        faults.append((_random_time_in_bucket(rng, job.steps), made))
    weather: dict[Fate, float] = {
        "repeated": rng.choice((0.0, 0.01, 0.05)),
        "slow down": rng.choice((0.0, 0.0, 0.02)),
        "overtaken": rng.choice((0.0, 0.0, 0.02)),
    }
    bucket = BucketConfig(
        numbered=rng.random() < 0.5,
        page=rng.choice((3, 8, PAGE)),
        weather=tuple(weather.items()),
        retry_s=rng.choice((RETRY_S, RETRY_S, 3 * RETRY_S)),  # longer than a lease
    )
    return replace(schedule, faults=tuple(faults), sweeps_foreign=False, bucket=bucket)


def _random_time_in_bucket(rng: random.Random, steps: int) -> int | Moment:
    if rng.random() < 0.5:
        return rng.randrange(1, EFFECTS_PER_STEP_IN_BUCKET * (steps + 1))
    name, kinds, often = rng.choice(MOMENTS_IN_BUCKET)
    return Moment(rng.choice(kinds), name, rng.randrange(1, 1 + often * steps))


def _random_failure(rng: random.Random, job: JobConfig) -> Fail:
    rank = ACTOR if rng.random() < 0.2 else rng.randrange(job.world_size)
    fate, count = rng.choice(FATES), rng.choice((1, 1, 3, 20))
    if rng.random() < 0.4:
        return Fail(rank, fate, count, name=rng.choice(NAMES_IN_BUCKET))
    return Fail(rank, fate, count, rng.choice(KINDS_IN_BUCKET))


def _random_outage(rng: random.Random) -> Outage:
    fates: tuple[Fate, ...] = ("lost", "unanswered", "late", "slow down")
    return Outage(rng.choice((1.0, 10.0, 40.0)) * rng.random(), rng.choice(fates), rng.choice((0.1, 0.5, 1.0)))


def _random_leases(seed: int, schedule: Schedule) -> Schedule:
    """Whether starts have a name, ask their sidecar and see deaths, and who second jobs are; drawn apart, as sidecars are."""
    rng = random.Random(f"leases {seed}")
    job = replace(schedule.job, name=rng.choice(("job", "job", "job", "")), asks_sidecar=rng.random() < 0.6)
    whose: tuple[Literal["same", "stranger", "usurper"], ...] = ("same", "same", "stranger", "usurper")
    faults = tuple((at, SecondJob(rng.choice(whose)) if isinstance(f, SecondJob) else f) for at, f in schedule.faults)
    return replace(schedule, job=job, faults=faults, sees_deaths=rng.random() < 0.3)


def _random_sidecars(seed: int, job: JobConfig) -> list[tuple[int | Moment, Fault]] | None:
    """How sidecars are lost, or None for a job without them; drawn apart: the other faults of a seed stay as they are."""
    rng = random.Random(f"sidecars {seed}")
    if rng.random() < 0.6:
        return None
    lost: list[tuple[int | Moment, Fault]] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        how: tuple[Literal["killed", "stopped", "cut off"], ...] = ("killed", "stopped", "cut off")
        fault = LoseSidecar(rng.randrange(job.world_size), rng.choice(how), rng.choice((0.5, 10.0, 60.0)) * rng.random())
        lost.append((_random_time(rng, job.steps), fault))
    return lost


def _random_collection(seed: int, job: JobConfig) -> JobConfig:
    """Whether parts of the state are frozen, and what is removed meanwhile; drawn apart, as sidecars are."""
    rng = random.Random(f"collection {seed}")
    if rng.random() < 0.5:
        return job
    collectors = 0 if job.sidecars else rng.choice((0, 1, 2))
    keeps = rng.choice((None, 1, 1, 2))
    supersedes = collectors > 0 and rng.random() < 0.5
    return replace(job, frozen=True, keeps=keeps, collectors=collectors, supersedes=supersedes)


def _random_time(rng: random.Random, steps: int) -> int | Moment:
    if rng.random() < 0.5:
        return rng.randrange(1, EFFECTS_PER_STEP * (steps + 1))
    name, kinds, often = rng.choice(MOMENTS)
    return Moment(rng.choice(kinds), name, rng.randrange(1, 1 + often * steps))


def _random_fault(rng: random.Random, job: JobConfig) -> Fault:
    rank = rng.randrange(job.world_size)
    kinds: tuple[Callable[[], Fault], ...] = (
        lambda: Kill(rank, zombies=rng.random() < 0.4),
        lambda: Pause(rank, rng.choice((1.0, 10.0, 40.0)) * rng.random(), replaced=rng.random() < 0.5),
        lambda: PowerCut(),
        lambda: Refuse(rank, rng.choice(ERRORS), rng.choice((1, 1, 3, 20)), rng.choice(KINDS)),
        lambda: SecondJob(),
    )
    return rng.choice(kinds)()
