"""A follower in virtual time: it copies what is committed, costs one listing while idle, and comes back after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from checkpointd.errors import FencedError, NotFoundError, RootInUseError, StoreError, UsageError
from checkpointd.layout.keys import LOG, LOG_ROOT
from checkpointd.mirror import copying
from checkpointd.mirror.following import Follower, FollowPace
from checkpointd.mirror.mirroring import Mirroring
from checkpointd.mirror.news import News
from checkpointd.pipeline.outcome.starting import begin
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.leases import Beginner, Sight
from checkpointd.store.base import Entry, ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.passing import PassingStore
from checkpointd.testing.simbucket import SimBucket, SimClient
from tests.unit.mirror.origins import TAG, check_whole, origin_with, save, simulated, tags_of, told
from tests.unit.mirror.stores import Unreadable, commits_in, flip

PACE = FollowPace(poll_s=5.0, look_s=60.0, pause_max_s=40.0)


class Counting(PassingStore):
    """Counts calls that read, and fails while `fails` is set."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls: list[str] = []
        self.fails = False

    async def list(self, prefix: str) -> list[Entry]:
        self._count(f"list {prefix}")
        return await super().list(prefix)

    async def get(self, key: str, *, size_max: int = 1 << 26) -> bytes:
        self._count(f"get {key}")
        return await super().get(key, size_max=size_max)

    def _count(self, call: str) -> None:
        self.calls.append(call)
        if self.fails:
            raise StoreError("the storage fails")


async def until(true: Callable[[], bool], limit_s: float = 1000.0) -> float:
    """Wait for a state; returns how long that took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not true():
        assert loop.time() - began < limit_s
        await asyncio.sleep(0.5)
    return loop.time() - began


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_follower_copies_each_new_commit_within_a_look() -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1), MemoryStore("mirror"), list[News]()
        follower = Follower(origin, mirror, pace=PACE, tell=news.append)
        assert follower.progress.state == "beginning"
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "in step")
        shown = follower.progress
        assert (shown.mirrored, shown.behind, shown.newest_tag, shown.newest_step) == (1, 0, "global_step1", 1)
        await save(origin, 2)
        assert await until(lambda: follower.progress.mirrored == 2) <= PACE.poll_s + 1
        assert told(news) == {"global_step1": "mirrored", "global_step2": "mirrored"}
        await stopped(task)
        await check_whole(mirror, origin)
        # It has let go of the mirror.
        await (await begin(mirror, Beginner(world_size=0, alone=True))).lease.release()

    simulated(main())


class SavingMeanwhile(PassingStore):
    """A mirror. The origin gets its second checkpoint at the call `name` of the first copy, or of what follows it."""

    def __init__(self, origin: Store, name: str) -> None:
        super().__init__(MemoryStore("mirror"))
        self._origin, self._name = origin, name

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        await self._save("move of latest")
        return await super().put_if_match(key, expected, data)

    async def list(self, prefix: str) -> list[Entry]:
        if prefix == LOG and (await root_view.state_of(self._store)).attempts:
            await self._save(f"look {self._looks}")
            self._looks += 1
        return await super().list(prefix)

    _looks = 0

    async def _save(self, name: str) -> None:
        if name == self._name:
            self._name = ""
            await save(self._origin, 2)


@pytest.mark.parametrize("when", ["move of latest", *(f"look {number}" for number in range(6))])
def test_a_commit_during_a_copy_is_copied_at_the_next_look(when: str) -> None:
    async def main() -> None:
        origin = await origin_with(1)
        mirror = SavingMeanwhile(origin, when)
        follower = Follower(origin, mirror, pace=PACE)
        task = asyncio.create_task(follower.run())
        await until(lambda: mirror._name == "" and follower.progress.state in ("in step", "failing"))
        assert follower.progress.problem is None
        assert follower.progress.mirrored == 2 or when != "move of latest"  # it does not claim to be in step
        assert await until(lambda: follower.progress.mirrored == 2) <= PACE.poll_s + 1
        await stopped(task)

    simulated(main())


def test_an_idle_follower_lists_the_log_of_the_origin_and_nothing_else() -> None:
    async def main() -> None:
        origin, mirror = Counting(await origin_with(1, 2)), Counting(MemoryStore("mirror"))
        follower = Follower(origin, mirror, pace=PACE)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "in step")
        await asyncio.sleep(1)
        origin.calls.clear()
        mirror.calls.clear()
        await asyncio.sleep(PACE.look_s - 10)
        assert set(origin.calls) == {f"list {LOG}", f"get {LOG_ROOT}"}
        assert len(origin.calls) <= 2 * PACE.look_s / PACE.poll_s
        assert set(mirror.calls) <= {f"get {LOG_ROOT}"}  # as each renewal of its lease does
        await asyncio.sleep(20)
        assert f"list {LOG}" in mirror.calls  # the look at both
        await stopped(task)

    simulated(main())


class InBucket(ObjectStore):
    """A root in a simulated bucket, which counts requests."""

    def __init__(self, name: str, bucket: SimBucket | None = None) -> None:
        self.bucket = bucket or SimBucket()
        super().__init__(SimClient(self.bucket))
        self._name = name

    @property
    def url(self) -> str:
        return f"sim://{self._name}"

    @property
    def reads(self) -> int:
        """The requests that read so far, but for those of leases, which go by time."""
        return self.requests.gets + self.requests.lists


async def reads_of_a_commit(history: int) -> tuple[int, int]:
    """The requests of a look without news after `history` commits of two ranks, and those with which one more is mirrored."""
    origin, mirror = InBucket("origin"), InBucket("mirror")
    saver = InBucket("origin", origin.bucket)
    await save(saver, *range(1, history + 1))
    mirroring = Mirroring(origin, mirror)
    await mirroring.begin()
    assert await mirroring.step() == history
    counts = [origin.reads + mirror.reads]
    for copied in (0, 1):
        assert await mirroring.step() == copied
        counts.append(origin.reads + mirror.reads)
        await save(saver, history + 1 + copied)
    await mirroring.end()
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.nightly
def test_in_buckets_a_new_commit_and_a_look_cost_the_same_after_any_history() -> None:
    few, many = simulated(reads_of_a_commit(5)), simulated(reads_of_a_commit(40))
    look, commit = many
    assert few[0] == look
    assert abs(few[1] - commit) <= 1  # what a save adds to the log at nearly the same time lies in one entry, or in two
    assert look < 15
    assert commit < 70


def test_what_a_person_finds_damaged_at_the_mirror_is_healed_at_the_next_look() -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1, 2), MemoryStore("mirror"), list[News]()
        follower = Follower(origin, mirror, pace=PACE, tell=news.append)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.mirrored == 2)
        flip(mirror, f"{TAG.format(1)}/00000-0.chunks")
        assert not (await read_back(mirror, await root_view.find(mirror, "global_step1"))).whole
        assert await until(lambda: told(news).get("global_step1") == "healed") <= PACE.look_s + 10
        assert follower.progress.left == {}
        await stopped(task)
        await check_whole(mirror, origin)

    simulated(main())


def test_an_origin_at_which_no_job_has_begun_is_not_in_step() -> None:
    """Its path may be wrong."""

    async def main() -> None:
        origin, mirror = MemoryStore("origin"), MemoryStore("mirror")
        follower = Follower(origin, mirror, pace=PACE)
        task = asyncio.create_task(follower.run())
        await asyncio.sleep(3 * PACE.poll_s)
        assert (follower.progress.state, follower.progress.in_step_at) == ("beginning", None)
        await starts.take(origin, 2)
        assert await until(lambda: follower.progress.state == "in step") <= PACE.poll_s + 1
        await stopped(task)

    simulated(main())


class Unmounted(PassingStore):
    """Looks empty while `away`."""

    away = False

    async def list(self, prefix: str) -> list[Entry]:
        return [] if self.away else await super().list(prefix)

    async def get(self, key: str, *, size_max: int = 1 << 26) -> bytes:
        if self.away:
            raise NotFoundError(key)
        return await super().get(key, size_max=size_max)

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        if self.away:
            raise NotFoundError(key)
        return await super().get_parts(key, offset, parts, then)

    async def stat(self, key: str) -> int | None:
        return None if self.away else await super().stat(key)


def test_an_origin_that_goes_away_during_a_copy_is_not_taken_for_an_empty_one() -> None:
    class Mirror(PassingStore):
        async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
            origin.away = True
            return await super().put_if_match(key, expected, data)

    async def main() -> None:
        follower = Follower(origin, Mirror(MemoryStore("mirror")), pace=PACE)
        await save(origin, 1)
        task = asyncio.create_task(follower.run())
        await until(lambda: origin.away)
        assert await until(lambda: follower.progress.state == "failing") <= PACE.poll_s + 1
        origin.away = False
        await until(lambda: follower.progress.state == "in step")
        await stopped(task)

    origin = Unmounted(MemoryStore("origin"))
    simulated(main())


def test_a_checkpoint_that_was_being_copied_when_the_origin_went_away_is_copied_once_it_is_back() -> None:
    class Mirror(PassingStore):
        writers = 0

        async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
            self.writers += 1
            origin.away = self.writers == 1
            return await super().open_writer(key, size_hint=size_hint, size_max=size_max)

    async def main() -> None:
        mirror = Mirror(MemoryStore("mirror"))
        follower = Follower(origin, mirror, pace=PACE)
        await save(origin, 1)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "failing")
        origin.away = False
        await until(lambda: follower.progress.state == "in step")
        await stopped(task)
        assert await tags_of(mirror) == ["global_step1"]

    origin = Unmounted(MemoryStore("origin"))
    simulated(main())


def test_a_commit_whose_reply_was_lost_is_finished_before_the_mirror_is_in_step() -> None:
    class Mirror(PassingStore):
        is_lost = False

        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            found = await super().put_if_absent(key, data, durable=durable)
            if commits_in(key, data) and not self.is_lost:
                self.is_lost = True
                raise StoreError("the reply was lost")
            return found

    async def main() -> None:
        origin, mirror = await origin_with(1), Mirror(MemoryStore("mirror"))
        follower = Follower(origin, mirror, pace=PACE)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "in step")
        assert mirror.is_lost
        assert await root_view.readable_latest(mirror) == "global_step1"
        assert await tags_of(mirror) == ["global_step1"]
        await stopped(task)

    simulated(main())


@pytest.mark.parametrize("which", ["origin", "mirror"])
def test_failures_are_shown_and_tried_again_with_growing_pauses(which: str) -> None:
    async def main() -> None:
        origin, mirror = Counting(await origin_with(1)), Counting(MemoryStore("mirror"))
        follower = Follower(origin, mirror, pace=PACE)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "in step")
        failing = {"origin": origin, "mirror": mirror}[which]
        failing.fails = True
        await save(origin._store, 2)
        await until(lambda: follower.progress.state == "failing")
        assert follower.progress.problem is not None
        assert "the storage fails" in follower.progress.problem.message
        await asyncio.sleep(600)
        failing.calls.clear()
        await asyncio.sleep(10 * PACE.pause_max_s)
        assert 5 <= len(failing.calls) <= 60
        failing.fails = False
        assert await until(lambda: follower.progress.state == "in step") <= PACE.pause_max_s + 1
        assert follower.progress.problem is None
        assert (await tags_of(mirror))[0] == "global_step2"
        await stopped(task)

    simulated(main())


def test_what_could_not_be_read_is_tried_again_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "RETRY_S", 1.0)

    async def main() -> None:
        origin = Unreadable(await origin_with(1, 2, dedup=False), "global_step1/00000001-0/00000-0.chunks")
        mirror, news = MemoryStore("mirror"), list[News]()
        follower = Follower(origin, mirror, pace=PACE, tell=news.append)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "in step")
        assert follower.progress.left == {"unreadable": 1}
        assert follower.progress.behind == 1
        assert follower.progress.in_step_at is None  # it does not have all that it was to have
        assert await tags_of(mirror) == ["global_step2"]
        origin._part = "nothing"
        assert await until(lambda: follower.progress.mirrored == 2) <= PACE.look_s + 10
        await until(lambda: follower.progress.in_step_at is not None)
        assert follower.progress.behind == 0
        await stopped(task)

    simulated(main())


def test_a_job_at_the_mirror_ends_a_follower() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        follower = Follower(origin, mirror, pace=PACE, is_patient=True)
        task = asyncio.create_task(follower.run())
        await until(lambda: follower.progress.state == "in step")
        lease = (await begin(mirror, Beginner(world_size=2, take_over=True))).lease
        await save(origin, 2)
        with pytest.raises(FencedError):
            await task
        assert follower.progress.state == "over"
        await lease.release()
        again = Follower(origin, mirror, pace=PACE, is_patient=True)
        with pytest.raises(FencedError, match="no mirror of"):
            await again.run()

    simulated(main())


@pytest.mark.parametrize("is_patient", [False, True])
def test_a_mirror_in_use_is_waited_for_only_by_the_patient(is_patient: bool) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        far = Sight(process="node7.0123456789ab.4026531836.17.99.cafecafe", length_s=5.0)
        lease = (await begin(mirror, Beginner(world_size=0, alone=True, sight=far))).lease
        follower = Follower(origin, mirror, pace=PACE, is_patient=is_patient)
        task = asyncio.create_task(follower.run())
        if not is_patient:
            with pytest.raises(RootInUseError):
                await task
            await lease.release()
            return
        await until(lambda: follower.progress.state == "failing")
        await lease.release()
        await until(lambda: follower.progress.state == "in step")
        await stopped(task)

    simulated(main())


def test_a_wrong_place_ends_a_follower_at_once() -> None:
    async def main() -> None:
        origin: Any = await origin_with(1)
        follower = Follower(origin, origin, pace=PACE, is_patient=True)
        with pytest.raises(UsageError):
            await follower.run()
        assert follower.progress.state == "over"

    simulated(main())
