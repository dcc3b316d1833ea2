"""SPOOL, SENDING and QUEUE: jobs whose ranks save through spools faster than these upload, with everything that may fail.

Roots, disks, nodes and processes fail at random, in virtual time; the root itself loses nothing. What a power cut leaves of a
spool is in `test_spool_crashes.py`.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from checkpointd.commit.facts import Order
from checkpointd.commit.machine import Phase
from checkpointd.config import SpoolConfig
from checkpointd.daemon.spool import spooled_attempt, uploads
from checkpointd.daemon.spool.directory import SpoolDirectory
from checkpointd.daemon.spool.queue import UploadQueue
from checkpointd.daemon.spool.record import SPOOLED
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.errors import SupersededError, UnreadableError
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from checkpointd.testing.simloop import Process
from tests.spooled_saves import AwayStore, MemoryPlace, Node, committed, contents, damage, size_of

NBYTES = 256 << 10
TIMEOUT_S = 3600.0


class SpoolDisk(MemoryStore):
    """The disk of a spool, which may be away, or give no bytes of some attempts."""

    is_away = False
    lost: str = "?"

    def _check(self, key: str) -> None:
        if self.is_away or key.startswith(self.lost):
            raise UnreadableError("input/output error")

    async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
        self._check(key)
        return await super().get(key, size_max=size_max)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self._check(key)
        await super().get_range(key, offset, out)


class Link(AwayStore):
    """The root, as one process reaches it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.writing = set[ObjectWriter]()
        self.most = 0
        """The most objects that were written at the same time."""

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        writer = Closing(self, await super().open_writer(key, size_hint=size_hint, size_max=size_max))
        self.writing.add(writer)
        self.most = max(self.most, len(self.writing))
        return writer


class Closing:
    def __init__(self, link: Link, target: ObjectWriter) -> None:
        self._link, self._target = link, target

    async def write_at(self, offset: int, data: Any) -> None:
        await self._target.write_at(offset, data)

    async def finish(self, size: int) -> None:
        await self._target.finish(size)
        self._link.writing.discard(self)

    async def discard(self) -> None:
        await self._target.discard()
        self._link.writing.discard(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job of `saves` saves. `speeds`: the bytes per second of each rank's uploads. Times are seconds."""

    seed: int
    speeds: tuple[float, ...]
    saves: int = 24
    pause_s: float = 2.0
    keep: str = "all"
    bytes_max: int | None = None
    faults: tuple[str, ...] = ()

    @property
    def bound_s(self) -> float:
        """How long a save that is in all spools may wait for a commit of itself or a newer one: two uploads, and looks."""
        return 2.5 * NBYTES / min(self.speeds) + 10.0


FAULTS = ("root", "root of one", "process", "job", "node", "disk", "unread", "damage")


def drawn(seed: int) -> Schedule:
    rng = random.Random(seed)
    if seed % 3 == 0:  # nothing fails, so it is known how long a save may wait
        return Schedule(seed=seed, speeds=tuple(rng.sample((256 << 10, 128 << 10, 64 << 10, 48 << 10), 3)), saves=25)
    return Schedule(
        seed=seed,
        speeds=tuple(rng.choice((32 << 10, 64 << 10, 128 << 10)) for _ in range(rng.choice((1, 2, 2, 3)))),
        saves=12,
        keep=rng.choice(("all", "newest")),
        bytes_max=rng.choice((None, 3 << 20)),
        faults=tuple(rng.choice(FAULTS) for _ in range(3)),
    )


@dataclass(eq=False, slots=True)
class Job:
    """Ranks with a node each, and what is known of their saves."""

    schedule: Schedule
    bucket: MemoryStore = field(default_factory=MemoryStore)
    rng: random.Random = field(init=False)
    links: list[Link] = field(init=False)
    places: list[MemoryPlace] = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    processes: list[Process | None] = field(default_factory=list)
    start: int = 0
    nonce: str = ""
    entered: dict[str, dict[int, float]] = field(default_factory=dict)
    """When each save was durable in the spools, by attempt and rank."""
    orders: dict[str, Order] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    losable: set[str] = field(default_factory=set)
    """The attempts of which a shard was destroyed."""
    said: list[Attempt] = field(default_factory=list)
    commits: list[tuple[float, Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"job {self.schedule.seed}")
        self.links = [Link(self.bucket) for _ in self.schedule.speeds]
        self.places = [MemoryPlace(made=SpoolDisk) for _ in self.schedule.speeds]
        self.nodes, self.processes = [None for _ in self.links], [None for _ in self.links]  # type: ignore[misc]

    def _config(self, rank: int) -> SpoolConfig:
        schedule = self.schedule
        return SpoolConfig(
            directory="/spool",
            keep=schedule.keep,  # type: ignore[arg-type]
            bytes_max=schedule.bytes_max,
            bandwidth_bps=schedule.speeds[rank],
            timeout_s=TIMEOUT_S,
        )

    # --- processes -----------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Begin a start, which spares what rank 0 has in its spool, on new processes."""
        for rank in range(len(self.links)):
            await self._kill(rank)
        found = await SpoolDirectory(self._config(0), self.places[0]).found()
        taken = await starts.take(self.bucket, len(self.links), [one.prefix for one in found])
        self.start, self.nonce = taken.start, taken.nonce
        for rank in range(len(self.links)):
            await self._serve(rank)

    async def _kill(self, rank: int) -> None:
        """End the process. Others find nothing of what it has not finished."""
        if (process := self.processes[rank]) is not None:
            process.kill()
        before, self.links[rank] = self.links[rank], Link(self.bucket)
        self.links[rank].away = before.away
        for writer in list(before.writing):
            await writer.discard()

    async def _serve(self, rank: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, simloop.SimLoop)
        self.processes[rank] = process = loop.process(f"rank {rank}")
        await process.spawn(self._goes_on(rank))

    async def _goes_on(self, rank: int) -> None:
        node = Node(
            self.links[rank], self._config(rank), rank, len(self.links), self.places[rank], start=self.start, nonce=self.nonce
        )
        self.nodes[rank] = await (await node.begin()).restarts()
        self.said += self.nodes[rank].attempts
        await self.nodes[rank].directory.sweep()

    async def _save(self, rank: int, step: int, required: bool) -> None:
        node = self.nodes[rank]
        node.saves = step
        attempt = node.save(step, nbytes=NBYTES, required=required)
        self.said.append(attempt)
        self.orders[attempt.info.prefix] = (self.start, step)
        while attempt.phase not in (Phase.SPOOLED, Phase.UPLOADING) and not node.tasks[-1].done():
            await asyncio.sleep(0.05)
        if attempt.phase in (Phase.SPOOLED, Phase.UPLOADING):
            self.entered.setdefault(attempt.info.prefix, {})[rank] = asyncio.get_running_loop().time()
            if required:
                self.required.add(attempt.info.prefix)

    # --- faults --------------------------------------------------------------------------------------------------

    async def fault(self, kind: str) -> None:
        rank, seconds = self.rng.randrange(len(self.links)), self.rng.uniform(1.0, 300.0)
        match kind:
            case "root" | "root of one":
                links = self.links if kind == "root" else [self.links[rank]]
                for link in links:
                    link.away = True
                await asyncio.sleep(seconds)
                for link in links:
                    link.away = False
            case "process":
                await self._until_spooled(rank)
                await self._kill(rank)
                await asyncio.sleep(min(seconds, 20.0))
                await self._serve(rank)
            case "job":
                await self.begin()
            case "node":
                await self._kill(rank)
                self.losable |= set(self.orders)
                self.places[rank] = MemoryPlace(made=SpoolDisk)
                await self.begin()
            case "disk":
                for disk in self._disks(rank):
                    disk.is_away = True
                await asyncio.sleep(seconds)
                for disk in self._disks(rank):
                    disk.is_away = False
            case _:
                await self._destroy(kind, rank)

    async def _until_spooled(self, rank: int) -> None:
        while any(one.phase in (Phase.STAGING, Phase.STAGED, Phase.PERSISTING) for one in self.nodes[rank].attempts):
            await asyncio.sleep(0.05)

    def _disks(self, rank: int) -> list[SpoolDisk]:
        return [store for store in self.places[rank].stores.values() if isinstance(store, SpoolDisk)]

    async def _destroy(self, kind: str, rank: int) -> None:
        """Damage one shard in the spool of `rank`, or let its disk give no bytes of it any more."""
        for disk in self._disks(rank):
            chunks = [key for key in contents(disk) if key.endswith(".chunks")]
            if found := sorted(key for key in chunks if not key.startswith(SPOOLED)):  # its notes are named for objects
                key = self.rng.choice(found)
                prefix = key.rpartition("/")[0]
                self.losable.add(prefix)
                if kind == "unread":
                    disk.lost = f"{prefix}/"
                else:
                    damage(disk, key, self.rng.randrange(contents(disk)[key].nbytes))

    # --- what is checked -------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Note commits, and check what holds all the time."""
        most = self.schedule.bytes_max
        while True:
            await self._note_commit()
            for one in self.said:
                if isinstance(one.own_error, SupersededError):
                    assert self.commits[-1][1] > self.orders[one.info.prefix], "QUEUE-3"
            for place in self.places:
                assert most is None or sum(map(size_of, place.stores.values())) <= most, "SPOOL-5"
            await asyncio.sleep(0.5)

    async def _note_commit(self) -> None:
        found = await root_view.checkpoints(self.bucket)
        order = found[0].commit.order if found else (0, 0)
        if not self.commits or self.commits[-1][1] != order:
            self.commits.append((asyncio.get_running_loop().time(), order))

    async def run(self) -> None:
        await self.begin()
        watching = asyncio.ensure_future(self.watch())
        at = sorted(
            (self.rng.uniform(3.0, 1.2 * self.schedule.saves * self.schedule.pause_s), kind) for kind in self.schedule.faults
        )
        faults, saving = list(at), set[asyncio.Task[None]]()
        for step in range(self.schedule.saves):
            await asyncio.sleep(self.schedule.pause_s)
            while faults and faults[0][0] <= asyncio.get_running_loop().time():
                await self.fault(faults.pop(0)[1])
            required = self.rng.random() < 0.1
            for rank, process in enumerate(self.processes):
                assert process is not None
                saving.add(process.spawn(self._save(rank, step, required)))
        for _, kind in faults:
            await self.fault(kind)
        await asyncio.sleep(self.schedule.pause_s)  # the last saves have begun by then
        for node in self.nodes:
            await node.over()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await self._note_commit()
        await self._check_saves()
        if not self.schedule.faults and self.schedule.bytes_max is None:
            self._check_fresh()
        await self._check_left()

    async def _check_saves(self) -> None:
        """Every save that all ranks had in their spools has committed, unless a newer one has, and replaces it."""
        tags = await committed(self.bucket)
        done = {one.commit.attempt for one in await root_view.checkpoints(self.bucket)}
        superseded = {one.info.prefix for one in self.said if isinstance(one.error, SupersededError)}
        assert len(tags) == len(done)
        for prefix, ranks in self.entered.items():
            if len(ranks) < len(self.links) or prefix in self.losable or prefix in done:
                continue
            assert prefix in superseded, f"{prefix} was lost"
            assert self.schedule.keep == "newest", "QUEUE-3"
            assert prefix not in self.required, "QUEUE-3"

    async def _check_left(self) -> None:
        """After a start, a spool holds nothing any more but the newest checkpoint."""
        for rank in range(len(self.places)):
            for disk in self._disks(rank):
                disk.lost = "?"
        await self.begin()
        for node in self.nodes:
            await node.over()  # what was decided while a disk was away
        for place in self.places:
            records = [key for key in place.keys if key.startswith(f"{SPOOLED}/")]
            assert all(f"{key}.committed" in records or "." in key.rpartition("/")[2] for key in records), records
            assert len({key.rpartition("/")[0] for key in place.keys if key.startswith("global_step")}) <= 1, place.keys

    def _check_fresh(self) -> None:
        """QUEUE-1 and QUEUE-2: uploads starve no newer save, and go one at a time."""
        for prefix, ranks in self.entered.items():
            until = max(ranks.values()) + self.schedule.bound_s
            newest = max(order for at, order in self.commits if at <= until)
            assert newest >= self.orders[prefix], f"{prefix} waited longer than {self.schedule.bound_s:.0f} s"
        assert max(link.most for link in self.links) == 1, "QUEUE-1"


def run(seed: int) -> None:
    simloop.run(seed, Job(drawn(seed)).run())


@pytest.mark.parametrize("seed", range(5))
def test_no_fault_loses_a_save_or_keeps_a_newer_one_waiting(seed: int) -> None:
    run(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(5, 405, 25))
def test_the_same_in_many_schedules(first: int) -> None:
    for seed in range(first, first + 25):
        run(seed)


# --- planted mistakes ----------------------------------------------------------------------------------------------


def _oldest(self: UploadQueue) -> SpooledShard | None:
    if self._active is not None:
        return None
    found = [one for one in self._waiting if not one.is_superseded and (one.in_log or self.leads)]
    return min(found, key=lambda one: one.record.order, default=None)


def _alone(self: UploadQueue) -> SpooledShard | None:
    found = [one for one in self._waiting if not one.is_superseded]
    return None if self._active is not None else max(found, key=lambda one: one.record.order, default=None)


def _all_at_once(self: UploadQueue) -> SpooledShard | None:
    found = [one for one in self._waiting if not one.is_superseded and (one.in_log or self.leads)]
    return max(found, key=lambda one: one.record.order, default=None)


def _drops_early(self: SpoolDirectory, shard: SpooledShard) -> None:
    self.live.add(shard)
    self.queue(shard).add(shard)
    self.drop_older((shard.spool.name, shard.record.uid, shard.record.vote.rank), shard.record.order, shard.prefix)


async def _never(self: SpooledShard) -> None:
    pass


def scheduled(**settings: Any) -> Schedule:
    return Schedule(**{"seed": 1, "speeds": (64 << 10,), "saves": 6, **settings})


CALM = scheduled(speeds=(128 << 10, 32 << 10, 40 << 10), saves=16)
MISTAKES: dict[str, tuple[object, str, object, Schedule]] = {
    "the oldest first": (UploadQueue, "_next", _oldest, CALM),
    "each rank its newest": (UploadQueue, "_next", _alone, CALM),
    "several at once": (UploadQueue, "_next", _all_at_once, CALM),
    "a coordinator that waits for nobody": (UploadQueue, "_waits_for_others", lambda *_: False, CALM),
    "a turn that is never given back": (UploadQueue, "given_back", lambda *_, **__: None, scheduled()),
    "an attempt that is never seen in the log": (UploadQueue, "announced", lambda *_: None, scheduled(speeds=(1e6, 1e6))),
    "dropped for one that has not committed": (
        SpoolDirectory,
        "began",
        _drops_early,
        scheduled(speeds=(32 << 10, 32 << 10), keep="newest"),
    ),
    "a required one dropped": (
        SpooledShard,
        "must_stay",
        property(lambda self: self.may_have_voted),
        scheduled(seed=2, saves=20, keep="newest"),
    ),
    "room without bounds": (
        SpoolDirectory,
        "_fits",
        lambda *_: True,
        scheduled(speeds=(32 << 10,), saves=16, bytes_max=2 << 20),
    ),
    "bytes that nobody removes": (SpooledShard, "drop", _never, scheduled()),
    "a root that may not be away": (spooled_attempt, "StoreError", uploads.SpoolUnreadError, scheduled(faults=("root",))),
    "a disk that may not be away": (spooled_attempt, "UNREAD_S", -1.0, scheduled(faults=("disk",))),
    "bytes that nobody verifies": (uploads, "_first_wrong", lambda *_: None, scheduled(saves=12, faults=("damage",) * 3)),
}


LONG = {"the oldest first", "each rank its newest", "several at once"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.nightly] * (one in LONG)) for one in MISTAKES])
def test_planted_mistakes_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, attribute, mistake, schedule = MISTAKES[name]
    simloop.run(schedule.seed, Job(schedule).run())
    monkeypatch.setattr(place, attribute, mistake)
    with pytest.raises(AssertionError):
        simloop.run(schedule.seed, Job(schedule).run())
