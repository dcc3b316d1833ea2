"""A mirror beside damage, removal and storage that cannot be read: what is whole goes on."""

from __future__ import annotations

import itertools

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.errors import DamagedError, StoreError
from checkpointd.layout.log_records import DamageRecord
from checkpointd.mirror.mirroring import error_of
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
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
    whole_ones,
)
from tests.unit.mirror.stores import (
    COMMIT,
    Flipping,
    Meanwhile,
    Refusing,
    Unreadable,
    Watched,
    attempt,
    commits_in,
    flip,
    origin_of,
)


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


@pytest.mark.parametrize("name", ["ballot", "00000.index", "00000-0.chunks"])
@pytest.mark.parametrize("fault", ["flip", "gone"])
def test_damage_anywhere_keeps_a_checkpoint_away_from_the_mirror(name: str, fault: str) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        key = await key_of(origin, 2, name)
        if fault == "flip":
            flip(origin, key)
        else:
            await origin.delete(key)
        report = await mirrored(origin, mirror)
        assert await tags_of(mirror) == ["global_step1"]
        assert report.latest == "global_step1"
        assert kinds(report)["global_step2"] == "damaged"

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
        index = await read_index(origin, await root_view.find(origin, "global_step1"), 0)
        at = next(entry for entry in index.tensors if entry.fqn == "moving").chunks[0].offset
        flip(origin, key, at)
        left = {"global_step1": "damaged", "global_step2": "damaged"}
        assert kinds(await mirrored(origin, mirror)) == {**left, "global_step3": "mirrored"}
        if fault == "at the mirror":
            flip(origin, key, at)
        watched = Watched(mirror)
        report = await mirrored(origin, watched)
        assert key not in watched.deleted
        if fault == "at the origin":
            assert kinds(report) == {"global_step2": "damaged"}
            assert f"{key} at {origin.url}" in report.checkpoints[0].why
            assert await whole_ones(mirror) == ["global_step3"]
        else:
            assert kinds(report) == {"global_step2": "mirrored"}
            assert watched.replaced == [key]
            assert await whole_ones(mirror) == ["global_step3", "global_step2"]

    simulated(main())


def test_what_a_record_calls_damaged_is_not_read() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await RootLog.of(origin).add(DamageRecord(attempt=TAG.format(1), why="a chunk"))
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


def test_an_index_that_cannot_be_read_at_the_mirror_holds_up_no_newer_checkpoint() -> None:
    """As when part of a disk is broken. What newer ones need of older objects is read and compared then."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 3)
        failing = Unreadable(mirror, f"{TAG.format(2)}/00000.index")
        assert kinds(await mirrored(origin, failing)) == {"global_step3": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_left_out() -> None:
    async def main() -> None:
        for calls in itertools.count(1):
            origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
            removing = Meanwhile(origin, calls, lambda store: delete(store, "global_step1"))
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


def test_mirrorcopy_3_what_a_copy_refers_to_may_be_deleted_at_the_mirror_at_any_moment() -> None:
    async def main() -> None:
        origin, found = await origin_with(1, 2), set[str]()
        for calls in itertools.count(1):
            mirror = MemoryStore("mirror")
            await mirrored(await origin_of(origin, 1), mirror)
            deleting = Meanwhile(origin, calls, lambda _, mirror=mirror: delete(mirror, "global_step1"))
            report = await mirrored(deleting, mirror)
            await check_whole(mirror, origin)
            if not deleting.happened:
                break
            found.add(kinds(report)["global_step2"])
        assert found == {"mirrored", "blocked"}

    simulated(main())


def test_a_copy_is_not_given_up_while_the_log_of_the_origin_does_not_tell_all() -> None:
    """MIRROR-4. The entry with the commit of the checkpoint that was being copied cannot be read."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{COMMIT}"), Retention())
        entry = next(key for key, data in contents(origin).items() if commits_in(key, data))
        flip(origin, entry)
        damaged = MemoryStore("origin")  # as another process sees it
        damaged._objects = origin._objects
        assert kinds(await mirrored(damaged, mirror)) == {}
        flip(origin, entry)
        watched = Watched(mirror)
        assert kinds(await mirrored(origin, watched)) == {"global_step1": "mirrored"}
        assert watched.opened == []

    simulated(main())


def test_a_copy_whose_checkpoint_was_removed_at_the_origin_is_given_up() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{COMMIT}"), Retention())
        assert [key for key in contents(mirror) if key.startswith("global_step1/")]
        await delete(origin, "global_step1")
        await mirrored(origin, mirror)
        assert not [key for key in contents(mirror) if key.startswith("global_step1/")]
        assert (await recovered(mirror)).decided == []
        assert await tags_of(mirror) == ["global_step2"]

    simulated(main())


def test_what_a_person_brought_to_the_mirror_is_left_alone() -> None:
    """COLLECT-3: the log does not name it, and neither does the record of the mirror."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror, rules=Retention(keep_last=1))
        key = f"{TAG.format(1)}/00000-0.chunks"
        await mirror.put(key, contents(origin)[key])
        await delete(origin, "global_step1")
        await save(origin, 3, dedup=False)
        assert (await mirrored(origin, mirror, rules=Retention(keep_last=1))).retired == ("global_step2",)
        assert await mirror.stat(key) is not None

    simulated(main())


def test_a_holder_that_was_removed_at_the_origin_is_there_for_newer_ones() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await delete(origin, "global_step1")
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step2": "mirrored"}
        await check_whole(mirror, origin)

    simulated(main())


def test_a_directory_of_the_origin_that_cannot_be_listed_holds_up_no_other_checkpoint() -> None:
    """MIRROR-6."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        report = await mirrored(Unlisted(origin, TAG.format(1)), mirror)
        assert kinds(report) == {"global_step1": "unreadable", "global_step2": "mirrored"}

    simulated(main())


class Unlisted(Unreadable):
    async def list(self, prefix: str) -> list[Entry]:
        self._check(prefix)
        return await super().list(prefix)


@pytest.mark.parametrize("by", ["--verify", "rules"])
def test_what_cannot_be_read_back_at_the_mirror_now_is_not_called_damaged_and_is_read_by_the_next_run(by: str) -> None:
    """A storage that fails proves nothing (READBACK-2)."""

    async def main() -> None:
        config: dict[str, object] = {"verify": True} if by == "--verify" else {"rules": Retention(keep_last=1)}
        origin, mirror = await origin_with(1, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror, **config)
        await save(origin, 2, dedup=False)
        failing = Unreadable(mirror, f"{TAG.format(2)}/00000-0.chunks")
        report = await mirrored(origin, failing, **config)
        assert [one.kind for one in report.checkpoints] == ["mirrored", "unreadable"]
        assert mirror.url in report.checkpoints[1].why
        assert (error_of(report), report.retired) == (StoreError, ())
        again = await mirrored(origin, failing, **config)
        assert (kinds(again), error_of(again)) == ({"global_step2": "unreadable"}, StoreError)
        report = await mirrored(origin, mirror, **config)
        assert (report.checkpoints, report.latest) == ((), "global_step2")
        assert (await root_view.find(mirror, "global_step2")).read_back == "whole"
        assert report.retired == (() if by == "--verify" else ("global_step1",))

    simulated(main())
