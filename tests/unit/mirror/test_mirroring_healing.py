"""What is damaged at a mirror is healed from its origin, and nothing there gets worse by it (MIRROR-8, MIRRORCOPY-4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.errors import DamagedError, StoreFullError
from checkpointd.layout.log_records import DamageRecord
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring, error_of
from checkpointd.mirror.news import News
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.passing import PassingStore
from checkpointd.testing.simbucket import Fate, SimBucket, SimClient
from tests.builders import leave_in_doubt
from tests.unit.mirror.origins import (
    TAG,
    check_whole,
    contents,
    delete,
    key_of,
    kinds,
    mirrored,
    origin_with,
    recovered,
    save,
    simulated,
    tags_of,
    told,
    whole_ones,
)
from tests.unit.mirror.stores import COMMIT, Breaking, Damaging, Small, Unreadable, Watched, attempt, flip

T = TypeVar("T")
CHUNKS = f"{TAG.format(1)}/00000-0.chunks"


async def found_damaged(mirror: Store, *steps: int) -> None:
    """Read these checkpoints back, as `verify --record` does."""
    for step in steps:
        checkpoint = await root_view.find(mirror, f"global_step{step}")
        assert not (await read_back(mirror, checkpoint)).whole


async def place_of(store: Store, step: int, fqn: str) -> int:
    """Where the bytes of a tensor of rank 0 lie in its object."""
    index = await read_index(store, await root_view.find(store, f"global_step{step}"), 0)
    return next(entry for entry in index.tensors if entry.fqn == fqn).chunks[0].offset


@pytest.mark.parametrize("name", ["ballot", "00000.index", "00001-0.chunks"])
@pytest.mark.parametrize("fault", ["flip", "torn", "gone"])
def test_what_is_damaged_at_the_mirror_is_copied_again(name: str, fault: str) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        key = await key_of(mirror, 2, name)
        if fault == "flip":
            flip(mirror, key)
        elif fault == "torn":
            await mirror.put(key, (await mirror.get(key))[:100])
        else:
            await mirror.delete(key)
        await found_damaged(mirror, 2)
        before, watched = contents(origin), Watched(mirror)
        report = await mirrored(origin, watched)
        assert (kinds(report), error_of(report)) == ({"global_step2": "healed"}, None)
        assert [one for one in (*watched.opened, *watched.replaced) if one != key] == []
        assert watched.deleted == []
        assert await mirror.get(key) == await origin.get(key)
        assert (await root_view.find(mirror, "global_step2")).read_back == "whole"
        await check_whole(mirror, origin)
        assert contents(origin) == before
        assert (await mirrored(origin, mirror)).checkpoints == ()

    simulated(main())


@pytest.mark.parametrize("rules", [Retention(), Retention(keep_last=1)], ids=["holder is a checkpoint", "holder is left out"])
def test_damage_in_an_object_that_several_need_heals_all_of_them(rules: Retention) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror, rules=rules)
        steps = (3,) if rules.keep_last else (1, 2, 3)
        flip(mirror, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(mirror, *steps)
        watched = Watched(mirror)
        report = await mirrored(origin, watched, rules=rules)
        # A damaged checkpoint is none for the rules, so at first they want the one before it.
        instead = {"global_step2": "mirrored"} if rules.keep_last else {}
        assert kinds(report) == {f"global_step{step}": "healed" for step in steps} | instead
        assert watched.replaced == [CHUNKS]
        assert await tags_of(mirror) == [f"global_step{step}" for step in reversed(steps)]
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_copy_of_a_new_checkpoint_heals_what_it_needs(damaged: int) -> None:
    """MIRRORCOPY-2: what is known to be damaged proves nothing about an object."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(mirror, damaged)
        await save(origin, 4)
        watched = Watched(mirror)
        assert kinds(await mirrored(origin, watched)) == {"global_step4": "mirrored", f"global_step{damaged}": "healed"}
        assert watched.replaced == [CHUNKS]
        assert watched.puts.index(CHUNKS) < watched.puts.index(f"{TAG.format(4)}/{COMMIT}")
        await check_whole(mirror, origin)

    simulated(main())


def test_a_limit_of_bytes_holds_for_what_is_healed() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS)
        await found_damaged(mirror, 1)
        assert kinds(await mirrored(origin, mirror, limit_bps=1e6)) == {"global_step1": "healed"}
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("weather", [{}, {"repeated": 0.3, "slow down": 0.1}], ids=["calm", "repeated"])
def test_in_a_bucket_the_object_is_there_at_each_moment(weather: Mapping[Fate, float]) -> None:
    async def main() -> None:
        origin = await origin_with(1, 2)
        bucket = SimBucket(weather=weather, retry_s=1e6)
        mirror = ObjectStore(SimClient(bucket))
        await mirrored(origin, mirror)
        data = bytearray(await mirror.get(CHUNKS))
        data[await place_of(origin, 1, "moving")] ^= 1
        await mirror.put(CHUNKS, bytes(data))
        await found_damaged(mirror, 1)
        watched = Watched(mirror)
        assert kinds(await mirrored(origin, watched)) == {"global_step1": "healed"}
        assert CHUNKS not in watched.deleted
        await check_whole(mirror, origin)

    simulated(main())


def test_the_origin_is_healed_from_its_mirror() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(origin, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(origin, 1, 2)
        assert kinds(await mirrored(mirror, origin)) == {"global_step1": "healed", "global_step2": "healed"}
        await check_whole(origin, mirror)
        await save(origin, 3, start=await starts.newest(origin) + 1)
        assert kinds(await mirrored(origin, mirror)) == {"global_step3": "mirrored"}

    simulated(main())


# --- where it cannot be healed ------------------------------------------------------------------------------------


def test_what_the_origin_does_not_have_any_more_is_named_by_each_run() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await delete(origin, "global_step1")
        flip(mirror, CHUNKS)
        await found_damaged(mirror, 1)
        before = contents(mirror)[CHUNKS]
        for _ in range(2):
            report = await mirrored(origin, mirror)
            assert (kinds(report), error_of(report)) == ({"global_step1": "damaged-here"}, DamagedError)
            assert f"{origin.url} does not have it any more" in report.checkpoints[0].why
        assert contents(mirror)[CHUNKS] == before

    simulated(main())


@pytest.mark.parametrize("how", ["a record", "its bytes"])
def test_what_is_damaged_at_both_is_named(how: str) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        for store in (origin, mirror):
            flip(store, CHUNKS)
        await found_damaged(mirror, 1)
        if how == "a record":
            await RootLog.of(origin).add(DamageRecord(attempt=TAG.format(1), why="a chunk"))
        before, watched = contents(mirror)[CHUNKS], Watched(mirror)
        report = await mirrored(origin, watched)
        assert kinds(report) == {"global_step1": "damaged-here"}
        assert origin.url in report.checkpoints[0].why
        assert (contents(mirror)[CHUNKS], watched.deleted) == (before, [])

    simulated(main())


def test_no_part_goes_that_another_checkpoint_has_at_the_mirror_alone() -> None:
    """The first checkpoint needs two parts of an object, the third one of them. Each root has another part of it damaged."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(origin, CHUNKS, await place_of(origin, 1, "moving"))
        flip(mirror, CHUNKS, await place_of(mirror, 1, "frozen"))
        await found_damaged(mirror, 1, 2, 3)
        before = contents(mirror)[CHUNKS]
        report = await mirrored(origin, mirror)
        assert kinds(report) == {f"global_step{step}": "damaged-here" for step in (1, 2, 3)}
        whys = {one.tag: one.why for one in report.checkpoints}
        assert f"{CHUNKS} at {origin.url} is damaged" in whys["global_step1"]
        assert f"a part that others need there is damaged at {origin.url}" in whys["global_step3"]
        assert contents(mirror)[CHUNKS] == before
        await origin.put(CHUNKS, b"")  # the same, with damage that leaves nothing
        assert kinds(await mirrored(origin, mirror)) == {f"global_step{step}": "damaged-here" for step in (1, 2, 3)}
        assert contents(mirror)[CHUNKS] == before

    simulated(main())


def test_one_read_that_shows_wrong_bytes_gives_up_no_part_that_the_mirror_alone_has() -> None:
    """READBACK-2: a bit that flips on the way proves nothing."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror)
        at = await place_of(origin, 1, "moving")
        flip(origin, CHUNKS, at)
        flip(mirror, CHUNKS, await place_of(mirror, 1, "frozen"))
        await found_damaged(mirror, 3)
        before, flipping = contents(mirror)[CHUNKS], FlippingOnce(mirror, at)
        assert kinds(await mirrored(origin, flipping)) == {"global_step3": "damaged-here"}
        assert flipping.has_flipped
        assert contents(mirror)[CHUNKS] == before

    simulated(main())


class FlippingOnce(PassingStore):
    """The first read of CHUNKS from byte `at` on has a wrong bit."""

    def __init__(self, store: Store, at: int) -> None:
        super().__init__(store)
        self._at, self.has_flipped = at, False

    @property
    def uncached(self) -> Store:
        return self

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        def wrong() -> T:
            if (key, offset, self.has_flipped) == (CHUNKS, self._at, False):
                self.has_flipped = True
                parts[0][0] ^= 1
            return then()

        return await super().get_parts(key, offset, parts, wrong)


def test_a_part_that_is_damaged_at_both_does_not_keep_the_others_from_being_healed() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        for store in (origin, mirror):
            flip(store, CHUNKS, await place_of(origin, 1, "moving"))
        flip(mirror, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(mirror, 1, 2)
        assert kinds(await mirrored(origin, mirror)) == {"global_step1": "damaged-here", "global_step2": "healed"}

    simulated(main())


def test_an_index_that_is_damaged_as_well_does_not_hide_what_it_names() -> None:
    """The index of the second checkpoint is damaged at the mirror. It names a part that is damaged at the origin alone."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await save(origin, 2, of=1)
        await save(origin, 3)
        await mirrored(origin, mirror, rules=Retention(every_steps=1))
        await delete(mirror, "global_step1")
        flip(mirror, f"{TAG.format(2)}/00000.index")
        flip(mirror, CHUNKS, await place_of(origin, 1, "frozen"))
        flip(origin, CHUNKS, await place_of(origin, 1, "moving"))
        before = contents(mirror)[CHUNKS]
        await found_damaged(mirror, 3)
        assert kinds(await mirrored(origin, mirror)) == {"global_step3": "damaged-here"}
        assert contents(mirror)[CHUNKS] == before

    simulated(main())


def test_what_cannot_be_read_at_the_origin_now_is_healed_later() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS)
        await found_damaged(mirror, 1)
        news: list[News] = []
        failing = Unreadable(origin, CHUNKS)
        mirroring = Mirroring(failing, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        for _ in range(2):
            await mirroring.step()
        assert [told([one]) for one in news] == [{"global_step1": "damaged-here"}]
        failing._part = "nothing"
        await mirroring.step()
        assert len(news) == 1  # it is not tried at each look
        mirroring.try_again()
        await mirroring.step()
        await mirroring.end()
        assert told(news) == {"global_step1": "healed"}
        await check_whole(mirror, origin)

    simulated(main())


def test_a_full_disk_leaves_what_is_there() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS, await place_of(origin, 1, "moving"))
        await found_damaged(mirror, 1)
        report = await mirrored(origin, Full(mirror))
        assert kinds(report) == {"global_step1": "damaged-here"}
        assert "there is no room to copy it again" in report.checkpoints[0].why
        assert await whole_ones(mirror) == ["global_step2"]
        assert kinds(await mirrored(origin, mirror)) == {"global_step1": "healed"}

    simulated(main())


# --- interruptions ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("names", [["00000-0.chunks"], ["00000-0.chunks", "00000.index", "ballot"]], ids=["one", "all"])
def test_an_interruption_at_every_call_makes_nothing_worse_and_the_next_run_heals(names: Sequence[str], after: bool) -> None:
    async def main() -> int:
        for calls in itertools.count(1):
            origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
            await mirrored(origin, mirror)
            flip(mirror, CHUNKS, await place_of(origin, 1, "moving"))
            await found_damaged(mirror, 1)
            for name in names[1:]:
                flip(mirror, await key_of(mirror, 1, name))
            with_error = await attempt(origin, Breaking(mirror, calls, after=after), Retention())
            mirror._open_writers.clear()  # as when the process is gone
            for step in (2, 3):
                assert (await read_back(mirror, await root_view.find(mirror, f"global_step{step}"))).whole
            await mirrored(origin, mirror)
            assert await tags_of(mirror) == ["global_step3", "global_step2", "global_step1"]
            await check_whole(mirror, origin)
            if not with_error:
                return calls
        raise AssertionError

    assert simulated(main()) >= 10


class Full(PassingStore):
    """Has no room for another large object."""

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        raise StoreFullError(f"there is no space for {size_hint} bytes")


def test_damage_that_only_a_newer_checkpoint_shows_is_healed() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(mirror, 3)
        assert kinds(await mirrored(origin, mirror)) == {"global_step3": "healed"}
        await check_whole(mirror, origin)

    simulated(main())


def test_a_newer_checkpoint_does_not_rely_on_what_the_one_before_it_shows_to_be_damaged() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(mirror, 2)
        await save(origin, 3)
        await delete(origin, "global_step2")
        assert kinds(await mirrored(origin, mirror)) == {"global_step3": "mirrored", "global_step2": "damaged-here"}
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("keep_last", [2, 3])
def test_rules_remove_no_damaged_checkpoint_that_they_would_keep_once_it_is_healed(keep_last: int) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3, 4, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, f"{TAG.format(3)}/00000-0.chunks")
        await found_damaged(mirror, 3)
        rules = Retention(keep_last=keep_last)
        report = await mirrored(Unreadable(origin, f"{TAG.format(3)}/00000-0.chunks"), mirror, rules=rules)
        assert kinds(report) == {"global_step3": "damaged-here"}
        assert "global_step3" in await tags_of(mirror)  # it may be healed later
        assert kinds(await mirrored(origin, mirror, rules=rules)) == {"global_step3": "healed"}
        assert await tags_of(mirror) == ["global_step4", "global_step3", "global_step2"][:keep_last]
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("why", ["no room", "the origin does not have it"])
def test_a_damaged_checkpoint_goes_by_the_rules_if_a_new_one_finds_no_room_or_it_cannot_be_healed(why: str) -> None:
    async def main() -> None:
        rules = Retention(keep_last=2)
        origin, mirror = await origin_with(1, 2, 3, dedup=False), Small(MemoryStore("mirror"))
        await mirrored(origin, mirror, rules=rules)
        flip(mirror.inner, f"{TAG.format(2)}/00000-0.chunks")
        await found_damaged(mirror, 2)
        if why == "no room":
            await save(origin, 4, dedup=False)
            mirror.room = mirror.used + 8192  # for the records of the run
        else:
            await delete(origin, "global_step2")
        assert (await mirrored(origin, mirror, rules=rules)).retired == ("global_step2",)
        left = ["global_step4", "global_step3"] if why == "no room" else ["global_step3", "global_step1"]
        assert await tags_of(mirror) == left
        await check_whole(mirror, origin)

    simulated(main())


def test_what_the_rules_have_just_removed_is_not_healed() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS)
        await found_damaged(mirror, 1)
        watched = Watched(mirror)
        report = await mirrored(origin, watched, rules=Retention(keep_last=1))
        assert sorted(report.retired) == ["global_step1", "global_step2"]
        assert (kinds(report), watched.opened, watched.replaced) == ({}, [], [])
        assert await mirror.stat(CHUNKS) is None

    simulated(main())


def test_what_was_copied_again_in_vain_is_not_read_again_at_each_look() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        flip(mirror, CHUNKS)
        await found_damaged(mirror, 1)
        watched = Watched(mirror)
        mirroring = Mirroring(origin, Damaging(watched, CHUNKS), MirrorConfig())  # type: ignore[arg-type]
        await mirroring.begin()
        for _ in range(3):
            await mirroring.step()
            mirroring.try_again()
        assert watched.replaced == [CHUNKS]
        mirroring.try_again(everything=True)
        await mirroring.step()
        assert watched.replaced == [CHUNKS, CHUNKS]
        await mirroring.end()

    simulated(main())


def test_healing_an_origin_leaves_a_save_that_its_next_start_can_commit() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await leave_in_doubt(origin, tag="global_step2", step=2)
        flip(origin, CHUNKS, await place_of(origin, 1, "frozen"))
        await found_damaged(origin, 1)
        assert kinds(await mirrored(mirror, origin)) == {"global_step1": "healed"}
        await recovered(origin)
        assert await tags_of(origin) == ["global_step2", "global_step1"]

    simulated(main())
