"""Runs of a mirror that are interrupted, and the next ones; full disks."""

from __future__ import annotations

import itertools

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.errors import StoreFullError
from checkpointd.layout.log_records import LogState
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring
from checkpointd.mirror.news import News
from checkpointd.pipeline.root import reserve, root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import read_id
from checkpointd.store.memory import MemoryStore
from checkpointd.store.objects.multipart import PART_BYTES_MIN
from checkpointd.store.objects.store import ObjectStore
from checkpointd.testing.simbucket import SimBucket, SimClient
from tests.unit.mirror.origins import (
    TAG,
    check_whole,
    contents,
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
from tests.unit.mirror.stores import COMMIT, Breaking, Damaging, Refusing, Small, Watched, attempt, commits_in, flip, origin_of


@pytest.mark.nightly
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
            state = await root_view.state_of(mirror)
            assert not RootLog.of(mirror).fault
            assert {one.status for one in state.attempts.values()} <= {"checkpoint", "removed"}
            assert {f"{tag}/{attempt}" for tag, attempt in await root_view.directories(mirror)} <= state.attempts.keys()
            if not with_error:
                return calls
        raise AssertionError

    assert simulated(main()) >= 20


def test_objects_that_are_whole_are_not_copied_again() -> None:
    """MIRROR-4: after an interruption just before the outcome, the next run copies no chunks."""

    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(2)}/{COMMIT}"), Retention())
        watched = Watched(mirror)
        report = await mirrored(origin, watched)
        assert (kinds(report), report.checkpoints[0].copied_bytes) == ({"global_step2": "mirrored"}, 0)
        assert watched.opened == []
        await check_whole(mirror, origin)

    simulated(main())


def test_a_run_aborts_the_upload_of_an_earlier_one_that_was_killed_while_it_healed() -> None:
    """No listing shows the upload, and its parts are charged."""

    async def main() -> None:
        origin, bucket, key = await origin_with(1), SimBucket(), f"{TAG.format(1)}/00000-0.chunks"
        mirror, killed = ObjectStore(SimClient(bucket)), ObjectStore(SimClient(bucket))
        await mirrored(origin, mirror)
        await (await killed.open_replacement(key)).write_at(0, bytes(PART_BYTES_MIN))
        assert [upload.key for upload in await mirror.unfinished_uploads()] == [key]
        await mirrored(origin, mirror)
        assert await mirror.unfinished_uploads() == []
        await check_whole(mirror, origin)

    simulated(main())


@pytest.mark.parametrize("torn", [b"", b"wrong bytes", None])
def test_a_torn_object_is_copied_again(torn: bytes | None) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await attempt(origin, Refusing(mirror, f"{TAG.format(1)}/{COMMIT}"), Retention())
        key = f"{TAG.format(1)}/00000-0.chunks"
        if torn is None:
            flip(mirror, key)  # of the right size
        else:
            await mirror.put(key, torn)
        watched = Watched(mirror)
        assert kinds(await mirrored(origin, watched)) == {"global_step1": "mirrored"}
        assert watched.replaced == [key]
        await check_whole(mirror, origin)

    simulated(main())


def test_a_recovery_at_the_mirror_leaves_a_copy_alone_that_was_begun() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await save(origin, 2)
        await attempt(origin, Refusing(mirror, f"{TAG.format(2)}/{COMMIT}"), Retention())
        assert (await recovered(mirror)).decided == []
        watched = Watched(mirror)
        assert kinds(await mirrored(origin, watched)) == {"global_step2": "mirrored"}
        assert watched.opened == watched.replaced == []
        await check_whole(mirror, origin)

    simulated(main())


def test_verify_reads_back_what_was_copied() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        report = await mirrored(origin, mirror, verify=True)
        assert [one.verified for one in report.checkpoints] == [True, True]
        assert (await root_view.find(mirror, "global_step2")).read_back == "whole"
        await save(origin, 3, dedup=False)
        report = await mirrored(origin, Damaging(mirror, "global_step3/"), verify=True)
        assert kinds(report) == {"global_step3": "damaged-here"}

    simulated(main())


def test_the_start_of_the_mirror_is_newer_than_those_of_its_origin() -> None:
    """MIRROR-5, also when the origin begins anew while it is followed."""

    async def main() -> None:
        origin, mirror = await origin_with(1, start=3), MemoryStore("mirror")
        news: list[News] = []
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        assert await mirroring.begin()
        await mirroring.step()
        begun = (await root_view.state_of(mirror)).begin
        assert begun is not None
        assert (begun.start, begun.origin, begun.world_size) == (4, await read_id(origin), 0)
        assert not await mirroring.has_news()
        await save(origin, 2, start=7)
        assert await mirroring.has_news()
        await mirroring.step()
        assert (await root_view.state_of(mirror)).start == 8
        assert told(news) == {"global_step1": "mirrored", "global_step2": "mirrored"}
        await mirroring.end()
        await check_whole(mirror, origin)

    simulated(main())


def test_a_log_of_the_mirror_that_is_damaged_while_it_is_followed_is_made_again() -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1), MemoryStore("mirror"), list[News]()
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        assert await mirroring.begin()
        await mirroring.step()
        await RootLog.of(mirror).goes_on_from(LogState())  # else this process knows what the entry said
        flip(mirror, next(key for key, data in contents(mirror).items() if commits_in(key, data)))
        await save(origin, 2)
        await mirroring.step()
        await mirroring.end()
        assert told(news) == {"global_step1": "mirrored", "global_step2": "mirrored"}
        assert await tags_of(mirror) == ["global_step2", "global_step1"]
        assert await whole_ones(mirror) == ["global_step2", "global_step1"]

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
