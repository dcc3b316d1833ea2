"""A mirror follows its origin: whole checkpoints in order, what they refer to, and rules of its own."""

from __future__ import annotations

from checkpointd.commit.retention import Retention
from checkpointd.errors import DamagedError
from checkpointd.layout.keys import LATEST
from checkpointd.mirror.mirroring import error_of
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store.memory import MemoryStore
from tests.builders import attempts_at, leave_in_doubt
from tests.unit.mirror.origins import (
    TAG,
    arrays,
    check_whole,
    contents,
    delete,
    kinds,
    mirrored,
    origin_with,
    recovered,
    roll_back,
    save,
    simulated,
    tags_of,
)
from tests.unit.mirror.stores import COMMIT, Damaging, Unreadable, Watched


def test_a_mirror_gets_every_checkpoint_in_order_and_latest_follows() -> None:
    """MIRROR-2, MIRROR-3."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), Watched()
        before = contents(origin)
        report = await mirrored(origin, mirror)
        assert [(one.tag, one.kind) for one in report.checkpoints] == [(f"global_step{n}", "mirrored") for n in (1, 2, 3)]
        assert report.latest == "global_step3"
        assert contents(origin) == before  # MIRROR-1
        await check_whole(mirror, origin)
        outcomes = [key for key in mirror.puts if key.endswith(f"/{COMMIT}")]
        assert outcomes == [f"{TAG.format(n)}/{COMMIT}" for n in (1, 2, 3)]
        of_third = [key for key in mirror.puts if key.startswith("global_step3/") and "vote" not in key]
        assert of_third[-1].endswith(f"/{COMMIT}")
        assert mirror.puts.index(LATEST, mirror.puts.index(outcomes[-1])) > mirror.puts.index(outcomes[-1])
        for key, data in contents(origin).items():
            if key.startswith("global_step"):
                assert await mirror.get(key) == data

    simulated(main())


def test_what_later_checkpoints_refer_to_is_copied_once() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        first, second = (await mirrored(origin, mirror)).checkpoints
        assert second.copied_bytes < first.copied_bytes
        assert second.found_bytes == sum(arrays(2, rank)["frozen"].nbytes for rank in range(2))
        checkpoint = await root_view.find(mirror, "global_step2")
        assert checkpoint.commit.holders == (TAG.format(1),)

    simulated(main())


def test_a_second_run_copies_what_is_new_and_reads_nothing_else() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        assert (await mirrored(Unreadable(origin, ".chunks"), mirror)).checkpoints == ()
        await save(origin, 3)
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step3": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


def test_a_save_that_did_not_ask_for_latest_does_not_move_it() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await save(origin, 2, save_latest=False)
        assert (await mirrored(origin, mirror)).latest == "global_step1"
        assert await tags_of(mirror) == ["global_step2", "global_step1"]

    simulated(main())


def test_a_tag_that_was_saved_again_is_replaced_at_the_mirror() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, tag="best"), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 2, tag="best", k=1)
        report = await mirrored(origin, mirror)
        assert (kinds(report), report.latest) == ({"best": "mirrored"}, "best")
        assert [c.commit.step for c in await root_view.checkpoints(mirror)] == [2]
        await check_whole(mirror, origin)

    simulated(main())


def test_deltas_bring_their_bases() -> None:
    async def main() -> None:
        origin = await origin_with(1, 2, 3, compression="zstd", full_every=4)
        mirror = MemoryStore("mirror")
        report = await mirrored(origin, mirror, rules=Retention(keep_last=1))
        assert kinds(report) == {"global_step1": "left-out", "global_step2": "left-out", "global_step3": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


# --- rules of its own ---------------------------------------------------------------------------------------------


def test_the_rules_of_the_mirror_are_its_own() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror, rules=Retention(keep_last=2))
        for step in (3, 4):
            await save(origin, step)
        await delete(origin, "global_step2")
        report = await mirrored(origin, mirror, rules=Retention(keep_last=2))
        assert report.retired == ("global_step1", "global_step2")
        assert await tags_of(mirror) == ["global_step4", "global_step3"]
        assert await tags_of(origin) == ["global_step4", "global_step3", "global_step1"]
        await check_whole(mirror, origin)

    simulated(main())


def test_nothing_is_removed_before_something_newer_was_read_back_at_the_mirror() -> None:
    """MIRROR-7, READBACK-3."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 2, dedup=False)
        damaging = Damaging(mirror, "global_step2/")
        report = await mirrored(origin, damaging, rules=Retention(keep_last=1))
        assert kinds(report)["global_step2"] == "damaged-here"
        assert error_of(report) is DamagedError
        assert report.retired == ()
        assert "global_step1" in await tags_of(mirror)
        again = await mirrored(origin, damaging, rules=Retention(keep_last=1))
        assert (kinds(again), again.retired) == ({"global_step2": "damaged-here"}, ())  # each run says so
        report = await mirrored(origin, mirror, rules=Retention(keep_last=1))  # the storage of the mirror was mended
        assert (kinds(report), report.retired) == ({"global_step2": "healed"}, ("global_step1",))

    simulated(main())


def test_what_the_rules_would_remove_again_is_left_out_and_named_unless_all_is_wanted() -> None:
    async def main() -> None:
        origin = await origin_with(1, 2, 3, 4)
        some, every = MemoryStore("some"), Watched()
        report = await mirrored(origin, some, rules=Retention(keep_last=1, every_steps=2))
        assert kinds(report) == {
            "global_step1": "left-out",
            "global_step2": "mirrored",
            "global_step3": "left-out",
            "global_step4": "mirrored",
        }
        report = await mirrored(origin, every, rules=Retention(keep_last=1), everything=True)
        assert [key for key in every.puts if key.endswith(f"/{COMMIT}")] == [f"{TAG.format(n)}/{COMMIT}" for n in (1, 2, 3, 4)]
        assert await tags_of(every) == ["global_step4"]
        for mirror in (some, every):
            await check_whole(mirror, origin)
        # Nor does it come back with the next run.
        assert (await mirrored(origin, every, rules=Retention(keep_last=1), everything=True)).checkpoints == ()

    simulated(main())


def test_a_holder_that_is_no_checkpoint_at_the_mirror_looks_like_a_removed_one() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror, rules=Retention(keep_last=1))
        views = {view.tag: view for view in await attempts_at(mirror)}
        assert {tag: view.status for tag, view in views.items()} == {"global_step1": "removed", "global_step3": "checkpoint"}
        await recovered(mirror)  # a start at the mirror neither decides nor sweeps it
        await check_whole(mirror, origin)
        await save(mirror, 4, dedup=False, start=await starts.newest(mirror) + 1)
        await delete(mirror, "global_step3")  # nobody needs the objects of the first one any more
        assert not [key for key in contents(mirror) if key.startswith(("global_step1/", "global_step3/")) and "chunks" in key]

    simulated(main())


def test_checkpoints_stay_that_a_save_in_flight_may_refer_to() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await leave_in_doubt(origin, tag="global_step3", dedup=True)
        assert (await mirrored(origin, mirror, rules=Retention(keep_last=1))).retired == ()
        await recovered(origin)
        assert (await mirrored(origin, mirror, rules=Retention(keep_last=1))).retired == ("global_step1", "global_step2")
        assert await tags_of(mirror) == ["global_step3"]

    simulated(main())


def test_objects_that_were_given_up_too_early_are_copied_anew() -> None:
    """A person removed at the mirror what a later checkpoint of the origin refers to."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await save(origin, 2, dedup=False)
        await mirrored(origin, mirror)
        await delete(mirror, "global_step1")
        assert not [key for key in contents(mirror) if key.startswith("global_step1/") and "chunks" in key]
        await roll_back(origin, "global_step1")
        await save(origin, 3)
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step3": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())
