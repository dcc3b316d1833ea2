"""Where a mirror may be: not at the origin, not at another run's root, and not where a job has gone on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointd.commit.log import FORGET_AFTER, FORGET_EVERY
from checkpointd.commit.retention import Retention
from checkpointd.errors import FencedError, RootGoneError, RootInUseError, UsageError
from checkpointd.layout.keys import LEASES, MIRROR
from checkpointd.layout.log_records import PassOverRecord
from checkpointd.layout.manifest import Mirrored, decode
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring
from checkpointd.mirror.provenance import check_apart, check_mirror, side_of
from checkpointd.pipeline.outcome.starting import begin
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.leases import Beginner, Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from tests.unit.mirror.origins import (
    TAG,
    check_whole,
    contents,
    delete,
    kinds,
    mirrored,
    origin_with,
    recovered,
    save,
    simulated,
    tags_of,
)
from tests.unit.mirror.stores import flip

ELSEWHERE = "node7.0123456789ab.4026531836.17.99.cafecafe"


class At(PassingStore):
    """A store with another address."""

    def __init__(self, url: str, store: Store) -> None:
        super().__init__(store)
        self._url = url

    @property
    def url(self) -> str:
        return self._url


async def refused(origin: MemoryStore, mirror: MemoryStore, kind: type[Exception], words: str) -> None:
    """A run is refused for that reason, and writes nothing."""
    before = contents(mirror)
    with pytest.raises(kind, match=words):
        await mirrored(origin, mirror)
    assert contents(mirror) == before


def test_a_root_of_another_run_is_refused() -> None:
    """MIRROR-5."""

    async def main() -> None:
        origin, other = await origin_with(1), await origin_with(2, name="other")
        await refused(origin, other, UsageError, "the root of another run")

    simulated(main())


def test_checkpoints_of_a_root_of_whose_jobs_nothing_is_known_are_foreign_all_the_same() -> None:
    """As where only starts of recoveries are left."""

    async def main() -> None:
        origin, other = await side_of(await origin_with(1)), await side_of(await origin_with(2, name="other"))
        with pytest.raises(UsageError, match=r"does not know .global_step2."):
            check_mirror(origin, replace(other, state=replace(other.state, begins=())))

    simulated(main())


def test_a_copy_of_the_origin_is_no_mirror() -> None:
    """It has the id of the origin, so it may be the origin itself at another address."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        mirror._objects = dict(origin._objects)
        await refused(origin, mirror, UsageError, "itself at another address, or a copy of it")
        with pytest.raises(UsageError, match="itself at another address"):
            await mirrored(origin, At("memory://elsewhere", origin))
        assert await origin.list(LEASES) == []  # a job need not wait

    simulated(main())


def test_a_mirror_of_one_root_is_not_taken_for_that_of_another() -> None:
    async def main() -> None:
        origin, other, mirror = await origin_with(1), await origin_with(7, name="other"), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await refused(other, mirror, UsageError, "mirrors another root")

    simulated(main())


def test_a_job_that_goes_on_at_the_mirror_ends_the_mirroring_for_good() -> None:
    """The storage of the origin was lost: a job starts at the mirror. Later the origin is back, and must not be mirrored."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, start=3), MemoryStore("mirror")
        await mirrored(origin, mirror)
        assert await starts.newest(mirror) > 3
        taken = await begin(mirror, Beginner(world_size=2))
        await save(mirror, 3, start=taken.start.start)
        await taken.lease.release()
        assert (await tags_of(mirror))[0] == "global_step3"
        assert (await root_view.find(mirror, "global_step3")).commit.holders  # it refers to what was mirrored
        await check_whole(mirror)
        await save(origin, 3, 4, start=4)
        await refused(origin, mirror, FencedError, "no mirror of memory://origin any more")
        await recovered(mirror)  # which is no job
        await refused(origin, mirror, FencedError, "no mirror of memory://origin any more")

    simulated(main())


def test_a_damaged_record_of_a_mirror_is_put_again() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, MIRROR)
        await save(origin, 3)
        assert kinds(await mirrored(origin, mirror)) == {"global_step3": "mirrored"}
        assert decode(await mirror.get(MIRROR), Mirrored, MIRROR).begun == (TAG.format(3),)
        await check_whole(mirror, origin)

    simulated(main())


def test_the_mirror_that_went_on_is_mirrored_back() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(mirror, 3, start=await starts.newest(mirror) + 1)
        assert kinds(await mirrored(mirror, origin)) == {"global_step3": "mirrored"}
        await check_whole(origin)
        await save(mirror, 4, start=await starts.newest(mirror) + 1)
        assert kinds(await mirrored(mirror, origin)) == {"global_step4": "mirrored"}

    simulated(main())


def test_the_mirror_is_not_mirrored_back_over_what_it_never_got() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 2)
        await save(mirror, 3, start=await starts.newest(mirror) + 1)
        await refused(mirror, origin, UsageError, "does not know .global_step2.")

    simulated(main())


def test_the_rules_of_a_mirror_remove_nothing_at_its_origin_if_the_two_are_swapped() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        rules = Retention(keep_last=1)
        await mirrored(origin, mirror)
        before = contents(origin)
        with pytest.raises(UsageError, match="Did you swap the two"):
            await mirrored(mirror, origin, rules=rules)
        assert contents(origin) == before
        assert (await mirrored(mirror, origin)).checkpoints == ()  # harmless without rules
        # The newest start of the origin is that of a mirror now, and it is none.
        assert kinds(await mirrored(origin, mirror, rules=rules)) == {}
        await save(origin, 4, start=await starts.newest(origin) + 1)
        assert kinds(await mirrored(origin, mirror, rules=rules)) == {"global_step4": "mirrored"}
        assert await tags_of(origin) == ["global_step4", "global_step3", "global_step2", "global_step1"]

    simulated(main())


@pytest.mark.parametrize("start", [1, 2], ids=["of the same start", "of a later start"])
def test_an_old_mirror_is_not_taken_for_the_origin_of_newer_checkpoints(start: int) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 2, start=start)
        before = contents(origin)
        with pytest.raises(UsageError, match=r"mirror is a mirror of memory://origin.* Did you swap the two"):
            await mirrored(mirror, origin)
        assert contents(origin) == before

    simulated(main())


def test_a_mirror_at_which_a_job_went_on_is_mirrored_back_with_rules() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(mirror, 2, start=await starts.newest(mirror) + 1)
        report = await mirrored(mirror, origin, rules=Retention(keep_last=1))
        assert (kinds(report), report.retired) == ({"global_step2": "mirrored"}, ("global_step1",))

    simulated(main())


def test_a_mirror_of_a_mirror_has_rules_of_its_own() -> None:
    async def main() -> None:
        origin, first, second = await origin_with(1, 2), MemoryStore("first"), MemoryStore("second")
        await mirrored(origin, first)
        await mirrored(first, second, rules=Retention(keep_last=1))
        assert await tags_of(second) == ["global_step2"]

    simulated(main())


def test_a_recovery_at_the_mirror_is_no_job() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await recovered(mirror)
        await save(origin, 2)
        assert kinds(await mirrored(origin, mirror)) == {"global_step2": "mirrored"}

    simulated(main())


def test_what_the_origin_has_forgotten_stays_at_the_mirror() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await delete(origin, "global_step1")
        note = PassOverRecord(attempt=TAG.format(2), why="the test")
        for _ in range(FORGET_AFTER + 2 * FORGET_EVERY):
            await RootLog.of(origin).append(lambda _: [note])
        assert TAG.format(1) not in (await root_view.state_of(origin)).attempts
        await save(origin, 3, dedup=False)
        assert kinds(await mirrored(origin, mirror, rules=Retention())) == {"global_step3": "mirrored"}
        assert await tags_of(mirror) == ["global_step3", "global_step2", "global_step1"]

    simulated(main())


# --- who is at work there ------------------------------------------------------------------------------------------


def test_a_living_process_that_mirrors_refuses_a_second_one_and_a_job() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        far = Sight(process=ELSEWHERE, length_s=5.0)
        beginner = Beginner(world_size=0, job=f"mirror of {origin.url}", alone=True, sight=far)
        lease = (await begin(mirror, beginner)).lease
        with pytest.raises(RootInUseError, match="runs job 'mirror of memory://origin' there"):
            await mirrored(origin, mirror)
        with pytest.raises(RootInUseError, match="mirror of memory://origin"):
            await begin(mirror, Beginner(world_size=2, job="train"))
        await lease.release()
        assert kinds(await mirrored(origin, mirror)) == {"global_step1": "mirrored"}

    simulated(main())


def test_whoever_begins_later_fences_the_one_before() -> None:
    """Both run in one process, where no lease keeps the second one away."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        one, two = Mirroring(origin, mirror), Mirroring(origin, mirror)
        await one.begin()
        await two.begin()
        with pytest.raises(FencedError, match="has another holder"):
            await one.step()
        assert await tags_of(mirror) == []
        assert await two.step() == 1
        await one.end()
        await two.end()
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("seed", range(8))
def test_racing_mirrors_leave_whole_checkpoints(seed: int) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")

        async def run(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            mirroring = Mirroring(origin, mirror, MirrorConfig(rules=Retention(keep_last=2)))
            await mirroring.begin()
            try:
                await mirroring.step()
            finally:
                await mirroring.end()

        found = await asyncio.gather(run(0), run(0.002 * seed), run(0.003 * seed), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        assert all(isinstance(error, FencedError | RootInUseError) or "taken" in str(error) for error in errors), errors
        mirror._open_writers.clear()
        await check_whole(mirror, origin)
        await mirrored(origin, mirror, rules=Retention(keep_last=2))
        assert await tags_of(mirror) == ["global_step3", "global_step2"]
        await check_whole(mirror, origin)

    simulated(main(), seed)


def test_a_job_that_takes_the_mirror_over_stops_the_mirroring() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        mirroring = Mirroring(origin, mirror)
        await mirroring.begin()
        await mirroring.step()
        lease = (await begin(mirror, Beginner(world_size=2, take_over=True))).lease
        await save(origin, 2)
        with pytest.raises(FencedError):
            await mirroring.step()
        assert await tags_of(mirror) == ["global_step1"]
        await mirroring.end()
        await lease.release()

    simulated(main())


# --- places ---------------------------------------------------------------------------------------------------------


async def test_one_root_in_the_other_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for one, two in (("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "link"), ("a", "link/b")):
        async with PosixStore(tmp_path / one) as origin, PosixStore(tmp_path / two) as mirror:
            with pytest.raises(UsageError):
                check_apart(origin, mirror)
    async with PosixStore(tmp_path / "a") as origin, PosixStore(tmp_path / "ab") as mirror:
        check_apart(origin, mirror)


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        ("s3://ckpts/run?endpoint=http://here:9000", "s3://ckpts/run?endpoint=http://there:9000", True),
        ("s3://ckpts/run?endpoint=http://here:9000", "s3://ckpts/run/x?endpoint=http://there:9000", True),
        ("s3://ckpts/run", "s3://ckpts/run?endpoint=http://there:9000", True),
        ("s3://ckpts/run?endpoint=http://here:9000", "s3://ckpts/run?endpoint=http://here:9000&retry_s=1", False),
        ("s3://ckpts/run/x?endpoint=http://here:9000", "s3://ckpts/run?endpoint=http://here:9000", False),
        ("s3://ckpts/run", "s3://ckpts", False),
    ],
)
async def test_servers_may_have_buckets_of_one_name(one: str, two: str, apart: bool) -> None:
    origin, mirror = At(one, MemoryStore("bucket")), At(two, MemoryStore("bucket"))
    if apart:
        check_apart(origin, mirror)
        return
    with pytest.raises(UsageError, match=r"are the same root|lies in"):
        check_apart(origin, mirror)


def test_an_origin_that_is_not_there_any_more_changes_nothing() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await refused(MemoryStore("origin"), mirror, RootGoneError, "is it mounted")
        mirroring = Mirroring(origin, mirror)
        await mirroring.begin()
        before = contents(mirror)
        origin._objects.clear()
        with pytest.raises(RootGoneError, match="unmounted"):
            await mirroring.step()
        assert contents(mirror).keys() == before.keys()
        await mirroring.end()

    simulated(main())


def test_another_root_at_the_origins_place_is_noticed_while_it_is_followed() -> None:
    async def main() -> None:
        origin, mirror = MemoryStore("origin"), MemoryStore("mirror")
        origin._objects = dict((await origin_with(1))._objects)
        mirroring = Mirroring(origin, mirror)
        await mirroring.begin()
        await mirroring.step()
        origin._objects = dict((await origin_with(1, 2))._objects)
        with pytest.raises(UsageError, match="mirrors another root"):
            await mirroring.step()
        await mirroring.end()

    simulated(main())
