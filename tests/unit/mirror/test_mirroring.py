"""A mirror follows its origin: whole checkpoints in order, what they refer to, rules of its own, and interruptions."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from checkpointd.admin.gc import collection, deletion
from checkpointd.admin.recovery import recovery
from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError, DamagedError, StoreError, StoreFullError, UnreadableError
from checkpointd.layout.keys import DAMAGED, DELETED, LATEST, MIRROR, OUTCOME, VERIFIED
from checkpointd.layout.manifest import Damaged, Mirrored, decode, encode
from checkpointd.mirror import copying
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring, error_of, run_once
from checkpointd.mirror.news import News
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.root import catalog, epochs, reserve
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.identity import writer
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from tests.builders import leave_in_doubt
from tests.unit.mirror.origins import (
    arrays,
    check_whole,
    contents,
    kinds,
    mirrored,
    origin_with,
    save,
    simulated,
    tags_of,
    told,
)

TAG = "global_step{}/00000001-0"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file server lags here."""
    monkeypatch.setattr(copying, "RETRY_S", 1.0)


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
        outcomes = [key for key in mirror.puts if key.endswith(f"/{OUTCOME}")]
        assert outcomes == [f"{TAG.format(n)}/{OUTCOME}" for n in (1, 2, 3)]
        of_third = [key for key in mirror.puts if key.startswith("global_step3/") and "vote" not in key]
        assert of_third[-1].endswith(f"/{OUTCOME}")
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
        checkpoint = await catalog.find(mirror, "global_step2")
        assert checkpoint.outcome.holders == (TAG.format(1),)

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
        assert [c.outcome.step for c in await catalog.checkpoints(mirror)] == [2]
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
        await deletion(origin, "global_step2", force=True, dry_run=False)
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
        assert await mirror.stat(f"{TAG.format(1)}/{DELETED}") is None
        assert kinds(await mirrored(origin, mirror)) == {"global_step2": "damaged-here"}  # each run says so

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
        assert [key for key in every.puts if key.endswith(f"/{OUTCOME}")] == [
            f"{TAG.format(n)}/{OUTCOME}" for n in (1, 2, 3, 4)
        ]
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
        views = {view.tag: view for view in await catalog.look_everywhere(mirror)}
        assert {tag: view.state for tag, view in views.items()} == {"global_step1": "deleted", "global_step3": "committed"}
        await recovery(mirror)  # a start at the mirror neither decides nor sweeps it
        await check_whole(mirror, origin)
        await save(mirror, 4, dedup=False, epoch=await epochs.newest(mirror) + 1)
        await deletion(mirror, "global_step3", force=True, dry_run=False)
        await collection(mirror, Retention(), dry_run=False)  # nobody needs its objects any more
        assert not [key for key in contents(mirror) if key.startswith(("global_step1/", "global_step3/")) and "chunks" in key]

    simulated(main())


def test_checkpoints_stay_that_a_save_in_flight_may_refer_to() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await leave_in_doubt(origin, tag="global_step3")
        assert (await mirrored(origin, mirror, rules=Retention(keep_last=1))).retired == ()
        await recovery(origin)
        assert (await mirrored(origin, mirror, rules=Retention(keep_last=1))).retired == ("global_step1", "global_step2")
        assert await tags_of(mirror) == ["global_step3"]

    simulated(main())


def test_objects_that_were_given_up_too_early_are_copied_anew() -> None:
    """A person removed at the mirror what a later checkpoint of the origin refers to."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await save(origin, 2, dedup=False)
        await mirrored(origin, mirror)
        await deletion(mirror, "global_step1", force=True, dry_run=False)
        assert not [key for key in contents(mirror) if key.startswith("global_step1/") and "chunks" in key]
        other = await origin_with(1, 3)  # the same first checkpoint, by its bytes
        await graft(origin, other, "global_step3", like="global_step1")
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step3": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


# --- damage, removal, unreadable storage -------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_and_the_others_go_on() -> None:
    """MIRROR-6."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3, dedup=False), MemoryStore("mirror")
        flip(origin, f"{TAG.format(2)}/00001-0.chunks")
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step1": "mirrored", "global_step2": "damaged", "global_step3": "mirrored"}
        assert "00001-0.chunks" in report.of("damaged")[0].why
        assert error_of(report) is DamagedError
        assert report.latest == "global_step3"
        assert await tags_of(mirror) == ["global_step3", "global_step1"]
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("name", [OUTCOME, "ballot", "00000.index", "00000-0.chunks"])
@pytest.mark.parametrize("fault", ["flip", "gone"])
def test_damage_anywhere_keeps_a_checkpoint_away_from_the_mirror(name: str, fault: str) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        key = f"{TAG.format(2)}/{name}"
        if fault == "flip":
            flip(origin, key)
        else:
            await origin.delete(key)
        report = await mirrored(origin, mirror)
        assert await tags_of(mirror) == ["global_step1"]
        assert report.latest == "global_step1"
        assert (fault, name) == ("gone", OUTCOME) or kinds(report)["global_step2"] == "damaged"

    simulated(main())


def test_damage_in_an_object_that_later_ones_refer_to_is_theirs_too() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await save(origin, 3, dedup=False)
        flip(origin, f"{TAG.format(1)}/00000-0.chunks")
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step1": "damaged", "global_step2": "damaged", "global_step3": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("fault", ["at the origin", "at the mirror"])
def test_an_object_that_a_checkpoint_at_the_mirror_needs_is_never_removed_to_be_copied_again(fault: str) -> None:
    """MIRRORCOPY-4. The first checkpoint and the second need a damaged part of an object, the third another part of it."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await save(origin, 2, of=1)
        await save(origin, 3)
        key = f"{TAG.format(1)}/00000-0.chunks"
        index = await read_index(origin, await catalog.find(origin, "global_step1"), 0)
        at = next(entry for entry in index.tensors if entry.fqn == "moving").chunks[0].offset
        flip(origin, key, at)
        left = {"global_step1": "damaged", "global_step2": "damaged"}
        assert kinds(await mirrored(origin, mirror)) == {**left, "global_step3": "mirrored"}
        if fault == "at the mirror":
            flip(origin, key, at)
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step2": "damaged" if fault == "at the origin" else "blocked"}
        assert key in report.checkpoints[0].why
        assert fault.rpartition(" ")[2] in report.checkpoints[0].why
        assert await tags_of(mirror) == ["global_step3"]
        await check_whole(mirror, origin)

    simulated(main())


def test_what_a_record_calls_damaged_is_not_read() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await origin.put(f"{TAG.format(1)}/{DAMAGED}", encode(Damaged(faults=("a chunk",), writer=writer())))
        report = await mirrored(Unreadable(origin, "global_step1/00000001-0/0"), mirror)
        assert kinds(report) == {"global_step1": "damaged", "global_step2": "mirrored"}

    simulated(main())


def test_a_bit_that_flips_on_the_way_is_read_again() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        report = await mirrored(Flipping(origin), mirror)
        assert kinds(report) == {"global_step1": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


def test_an_unreadable_checkpoint_is_left_for_later_and_the_others_go_on() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        report = await mirrored(Unreadable(origin, f"{TAG.format(1)}/00000-0.chunks"), mirror)
        assert kinds(report) == {"global_step1": "unreadable", "global_step2": "mirrored"}
        assert error_of(report) is StoreError
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step1": "mirrored"}
        assert report.latest == "global_step2"
        await check_whole(mirror, origin)

    simulated(main())


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_left_out() -> None:
    async def main() -> None:
        for calls in itertools.count(1):
            origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
            removing = Meanwhile(origin, calls, lambda store: deletion(store, "global_step1", force=True, dry_run=False))
            report = await mirrored(removing, mirror)
            assert kinds(report)["global_step2"] == "mirrored"
            assert kinds(report).get("global_step1") in (None, "mirrored", "removed"), report
            assert report.latest == "global_step2"
            await check_whole(mirror, origin)
            if "global_step1" not in await tags_of(mirror):  # what was copied of it does not stay
                assert not [k for k in contents(mirror) if k.startswith("global_step1/") and k.endswith((".chunks", ".index"))]
            if not removing.happened:
                break
        assert calls > 10

    simulated(main())


def test_a_copy_that_one_look_at_the_origin_does_not_show_is_not_given_up() -> None:
    """MIRROR-4, on a file server that lags behind: the directory of the tag is missing in the first listings."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{OUTCOME}"), Retention())
        lagging = Lagging(origin, "global_step1", looks=2)
        assert "global_step1" not in kinds(await mirrored(lagging, mirror))
        assert lagging.looks <= 0
        assert kinds(await mirrored(origin, mirror)) == {"global_step1": "mirrored"}

    simulated(main())


def test_a_copy_whose_checkpoint_the_origin_has_forgotten_is_given_up() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{OUTCOME}"), Retention())
        for key in contents(origin):
            if key.startswith("global_step1/"):
                await origin.delete(key)
        await mirrored(origin, mirror)
        assert not [key for key in contents(mirror) if key.startswith("global_step1/") and key.endswith((".chunks", ".index"))]
        await recovery(mirror)  # which finds nothing to decide
        assert await tags_of(mirror) == ["global_step2"]

    simulated(main())


def test_a_holder_that_was_removed_at_the_origin_is_there_for_newer_ones() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await deletion(origin, "global_step1", force=True, dry_run=False)
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step2": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


# --- interruptions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("rules", [Retention(), Retention(keep_last=1)], ids=["all", "last"])
def test_an_interruption_at_every_call_loses_nothing_and_the_next_run_finishes(after: bool, rules: Retention) -> None:
    """MIRROR-4, at each call to the store of the mirror."""

    async def main() -> int:
        for calls in itertools.count(1):
            origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
            await mirrored(await origin_of(origin, 1), mirror)
            breaking = Breaking(mirror, calls, after=after)
            with_error = await attempt(origin, breaking, rules)
            mirror._open_writers.clear()  # as when the process is gone
            await check_whole(mirror, origin)
            counting = Watched(mirror)
            report = await mirrored(origin, counting, rules=rules)
            assert report.latest == "global_step3"
            assert (await tags_of(mirror))[0] == "global_step3"
            await check_whole(mirror, origin)
            log = CatalogLog(mirror)
            await log.refresh()
            assert not log.fault
            assert not [entry.prefix for entry in log.state.entries.values() if entry.is_open]
            if not with_error:
                return calls
        raise AssertionError

    assert simulated(main()) >= 30


def test_objects_that_are_whole_are_not_copied_again() -> None:
    """MIRROR-4: after an interruption just before the outcome, the next run copies no chunks."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(2)}/{OUTCOME}"), Retention())
        watched = Watched(mirror)
        report = await mirrored(origin, watched)
        assert (kinds(report), report.checkpoints[0].copied_bytes) == ({"global_step2": "mirrored"}, 0)
        assert watched.opened == []
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("torn", [b"", b"wrong bytes", None])
def test_a_torn_object_is_copied_again(torn: bytes | None) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{OUTCOME}"), Retention())
        key = f"{TAG.format(1)}/00000-0.chunks"
        if torn is None:
            flip(mirror, key)  # of the right size
        else:
            await mirror.put(key, torn)
        watched = Watched(mirror)
        assert kinds(await mirrored(origin, watched)) == {"global_step1": "mirrored"}
        assert watched.opened == [key]
        await check_whole(mirror, origin)

    simulated(main())


def test_a_copy_that_a_recovery_gave_up_is_made_anew() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 2)
        await attempt(origin, Refusing(mirror, f"{TAG.format(2)}/00001.vote"), Retention())
        done = await recovery(mirror)
        assert [one.outcome for one in done.decided] == ["abort"]
        assert kinds(await mirrored(origin, mirror)) == {"global_step2": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


def test_a_copy_that_a_recovery_finished_stands() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{OUTCOME}"), Retention())
        done = await recovery(mirror)
        assert [one.outcome for one in done.decided] == ["commit"]
        await save(origin, 2)
        assert kinds(await mirrored(origin, mirror)) == {"global_step2": "mirrored"}
        await check_whole(mirror)

    simulated(main())


def test_verify_reads_back_what_was_copied() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        report = await mirrored(origin, mirror, verify=True)
        assert [one.verified for one in report.checkpoints] == [True, True]
        assert await mirror.stat(f"{TAG.format(2)}/{VERIFIED}") is not None
        await save(origin, 3, dedup=False)
        report = await mirrored(origin, Damaging(mirror, "global_step3/"), verify=True)
        assert kinds(report) == {"global_step3": "damaged-here"}
        assert report.latest == "global_step2"  # it does not move to what proved damaged

    simulated(main())


def test_the_record_says_how_far_it_came() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        record = decode(await mirror.get(MIRROR), Mirrored, MIRROR)
        nonce = (await epochs.read(origin, 1)).nonce
        assert (record.origin, record.starts, record.reached) == (origin.url, ((1, nonce),), (1, 2))
        await save(origin, 3, epoch=2)
        await mirrored(origin, mirror)
        record = decode(await mirror.get(MIRROR), Mirrored, MIRROR)
        assert ([number for number, _ in record.starts], record.reached) == ([1, 2], (2, 3))

    simulated(main())


def test_new_starts_of_the_origin_are_recorded_while_it_is_followed() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        news: list[News] = []
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        await mirroring.step()
        assert not await mirroring.has_news()
        await save(origin, 2, epoch=2)
        assert await mirroring.has_news()
        await mirroring.step()
        record = decode(await mirror.get(MIRROR), Mirrored, MIRROR)
        assert [number for number, _ in record.starts] == [1, 2]
        assert told(news) == {"global_step1": "mirrored", "global_step2": "mirrored"}
        await mirroring.end()

    simulated(main())


# --- a full disk --------------------------------------------------------------------------------------------------


def test_on_a_full_disk_a_run_begins_and_its_rules_make_room() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3, 4, dedup=False), Small(MemoryStore("mirror"))
        mirror.room = reserve.BALLAST_BYTES + 180_000
        assert await attempt(origin, mirror, Retention())  # it ends while the fourth is copied
        mirror.room = mirror.used  # another program takes the rest
        assert mirror.used > reserve.BALLAST_BYTES
        report = await mirrored(origin, mirror, rules=Retention(keep_last=1))
        assert (await tags_of(mirror), report.latest) == (["global_step4"], "global_step4")
        await check_whole(mirror, origin)
        mirror.room += 4096  # for the records of the run
        await mirrored(origin, mirror)
        assert await mirror.stat(reserve.KEY) is not None

    simulated(main())


def test_a_full_disk_ends_a_run_whose_rules_make_no_room() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3, 4, dedup=False), Small(MemoryStore("mirror"))
        mirror.room = reserve.BALLAST_BYTES + 180_000
        with pytest.raises(StoreFullError):
            await mirrored(origin, mirror, rules=Retention(keep_last=4))
        await check_whole(mirror, origin)

    simulated(main())


# --- what goes wrong ----------------------------------------------------------------------------------------------


def flip(store: MemoryStore, key: str, at: int | None = None) -> None:
    data = bytearray(store._objects[key])
    data[len(data) // 3 if at is None else at] ^= 1
    store._objects[key] = memoryview(bytes(data))


async def graft(store: MemoryStore, other: MemoryStore, tag: str, *, like: str) -> None:
    """Put the checkpoint `tag` of `other` into `store`; both have the same bytes in the objects of `like`."""
    for key, data in contents(other).items():
        if key.startswith(f"{tag}/"):
            await store.put(key, data)
        elif key.startswith(f"{like}/") and "chunks" in key:
            assert contents(store)[key] == data


async def origin_of(origin: MemoryStore, count: int) -> MemoryStore:
    """`origin` as it was when it had its first `count` checkpoints."""
    then = MemoryStore("origin")
    then._objects = {
        key: data
        for key, data in origin._objects.items()
        if not key.startswith(".checkpointd/catalog") and (not key.startswith("global_step") or int(key[11]) <= count)
    }
    then._objects[LATEST] = memoryview(f"global_step{count}\n".encode())
    return then


async def attempt(origin: Store, mirror: Store, rules: Retention) -> bool:
    """One run that may fail. Returns whether it did."""
    news: list[News] = []
    try:
        await run_once(Mirroring(origin, mirror, MirrorConfig(rules=rules), tell=news.append), news)
    except (CheckpointdError, Interrupted):
        return True
    return False


class Interrupted(Exception):
    """The process was stopped here."""


class Watched(PassingStore):
    """Notes what is put, and which large objects are opened."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.inner = store or MemoryStore("mirror")
        super().__init__(self.inner)
        self.puts: list[str] = []
        self.opened: list[str] = []

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.puts.append(key)
        return await super().put_if_absent(key, data, durable=durable)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self.puts.append(key)
        return await super().put_if_match(key, expected, data)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self.puts.append(key)
        self.opened.append(key)
        return await super().open_writer(key, size_hint=size_hint, size_max=size_max)


class Breaking(PassingStore):
    """Is interrupted at call number `calls` that changes something, before it or after it, and fails from then on."""

    def __init__(self, store: Store, calls: int, *, after: bool) -> None:
        super().__init__(store)
        self._left, self._after = calls, after

    async def _count(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._after):
            raise Interrupted
        result = await call()
        if self._left == 0:
            raise Interrupted
        return result

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await self._count(partial(super().put_if_absent, key, data, durable=durable))  # type: ignore[no-any-return]

    async def put(self, key: str, data: bytes) -> None:
        await self._count(partial(super().put, key, data))

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return await self._count(partial(super().put_if_match, key, expected, data))  # type: ignore[no-any-return]

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self._count(partial(super().delete, key, durable=durable))

    async def delete_each(self, keys: Any) -> None:
        for key in keys:
            await self.delete(key)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        writer = await self._count(partial(super().open_writer, key, size_hint=size_hint))
        return BreakingWriter(self, writer)


class BreakingWriter:
    def __init__(self, store: Breaking, writer: ObjectWriter) -> None:
        self._store, self._writer = store, writer

    async def write_at(self, offset: int, data: Any) -> None:
        await self._store._count(partial(self._writer.write_at, offset, data))

    async def finish(self, size: int) -> None:
        await self._store._count(partial(self._writer.finish, size))

    async def discard(self) -> None:
        return  # nobody is there any more to do it


class Refusing(PassingStore):
    """Refuses to put one object."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store)
        self._key = key

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if key == self._key:
            raise StoreError(f"{key} cannot be put")
        return await super().put_if_absent(key, data, durable=durable)


class Small(PassingStore):
    """Has room for a number of bytes."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.inner, self.room = store, 1 << 30

    @property
    def used(self) -> int:
        return sum(data.nbytes for data in self.inner._objects.values())

    def _take(self, nbytes: int) -> None:
        if self.used + nbytes > self.room:
            raise StoreFullError(f"{self.room - self.used} bytes are free")

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self._take(len(data))
        return await super().put_if_absent(key, data, durable=durable)

    async def put(self, key: str, data: bytes) -> None:
        self._take(len(data))
        await super().put(key, data)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._take(len(data))
        return await super().put_if_match(key, expected, data)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self._take(size_hint)
        return await super().open_writer(key, size_hint=size_hint, size_max=size_max)


class Unreadable(PassingStore):
    """Cannot read objects whose keys have `part` in them."""

    def __init__(self, store: Store, part: str) -> None:
        super().__init__(store)
        self._part = part

    @property
    def uncached(self) -> Store:
        return self

    def _check(self, key: str) -> None:
        if self._part in key:
            raise UnreadableError(f"{key} cannot be read now")

    async def get(self, key: str, *, size_max: int = 1 << 26) -> bytes:
        self._check(key)
        return await super().get(key, size_max=size_max)

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        self._check(key)
        return await super().get_parts(key, offset, parts, then)


class Flipping(PassingStore):
    """The first read of each object has one wrong bit; reads past the cache have none."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._seen: set[str] = set()

    @property
    def uncached(self) -> Store:
        return self._store

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        def wrong() -> Any:
            if key not in self._seen:
                self._seen.add(key)
                parts[0][100] ^= 1
            return then()

        return await super().get_parts(key, offset, parts, wrong)


class Damaging(PassingStore):
    """Large objects below `part` have a wrong bit once they were written."""

    def __init__(self, store: MemoryStore, part: str) -> None:
        super().__init__(store)
        self._part = part

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        writer = await super().open_writer(key, size_hint=size_hint, size_max=size_max)
        return DamagingWriter(writer) if self._part in key else writer


class DamagingWriter:
    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    async def write_at(self, offset: int, data: Any) -> None:
        changed = bytearray(data)
        changed[200] ^= 1
        await self._writer.write_at(offset, changed)

    async def finish(self, size: int) -> None:
        await self._writer.finish(size)

    async def discard(self) -> None:
        await self._writer.discard()


class Lagging(PassingStore):
    """Does not show what lies at `prefix` in the first `looks` listings of it."""

    def __init__(self, store: Store, prefix: str, looks: int) -> None:
        super().__init__(store)
        self._prefix, self.looks = prefix, looks

    async def list(self, prefix: str) -> Any:
        found = await super().list(prefix)
        if prefix.startswith(self._prefix) and self.looks > 0:
            self.looks -= 1
            return []
        return [entry for entry in found if entry.name != self._prefix or self.looks <= 0]


class Meanwhile(PassingStore):
    """Lets `work` happen at the store behind this one, at read number `calls`."""

    def __init__(self, store: Store, calls: int, work: Callable[[Store], Awaitable[object]]) -> None:
        super().__init__(store)
        self._left, self._work = calls, work
        self.happened = False

    async def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.happened = True
            await self._work(self._store)

    async def get(self, key: str, *, size_max: int = 1 << 26) -> bytes:
        await self._count()
        return await super().get(key, size_max=size_max)

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        await self._count()
        return await super().get_parts(key, offset, parts, then)

    async def list(self, prefix: str) -> Any:
        await self._count()
        return await super().list(prefix)
