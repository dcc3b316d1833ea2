"""TIDY-1 to TIDY-4 of tidying.py: what saves leave on the disk, counted at every write, on a loop of virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.export.own_lease import OwnExportLease
from checkpointd.layout.keys import (
    AttemptId,
    attempt_lease_key,
    attempt_prefix,
    chunks_name,
    default_tag,
    index_name,
    object_key,
    vote_name,
)
from checkpointd.layout.log_records import AbortRecord, AnnounceRecord
from checkpointd.layout.manifest import NO_REASON
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.gc import room, tidying
from checkpointd.pipeline.gc.collect import sweep
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.builders import attempts_at, restart
from tests.lease_builders import SINCE
from tests.saving_jobs import PERSIST, TIMEOUT_S, Disk, Job, run

SPARE = 3


async def announce(store: Store, *prefixes: str) -> None:
    """Announce these attempts, and put a lease for each."""
    for number, prefix in enumerate(prefixes):
        assert await RootLog.of(store).add(AnnounceRecord(attempt=prefix, n=1000 + number, step=0)) == ""
        await store.put(attempt_lease_key(prefix), b"")


async def state_of(store: Store, prefix: str) -> str:
    return (await root_view.state_of(store)).attempts[prefix].status


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.nightly)])
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(autouse=True)
def every_save_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SMALL_BYTES", 0)


@pytest.mark.parametrize("kept", [1, 3])
def test_tidy_2_saves_back_to_back_never_leave_more_than_three_beside_what_stays(seed: int, kept: int) -> None:
    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        job = Job(disk, rng, (await starts.take(disk, 1)).start, rules=Retention(keep_last=kept))
        await job.run(60)
        assert job.phases() == {Phase.COMMITTED: 60}
        assert disk.most <= kept + SPARE
        tags = [c.tag for c in await root_view.checkpoints(disk)]
        assert tags[:kept] == [default_tag(n) for n in range(59, 59 - kept, -1)]
        assert len(disk.occupied) == len(tags) <= kept + 1  # and the one that was verified

    run(seed, main)


@pytest.mark.parametrize("slow", [{0: 4.0}, {1: 4.0}, pytest.param({0: 1.0, 1: 1.0}, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("tag", [None, "best"])
def test_tidy_3_ranks_that_are_ahead_of_the_coordinator_count(seed: int, slow: dict[int, float], tag: str | None) -> None:
    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        rules = Retention(keep_last=2) if tag is None else Retention()
        job = Job(disk, rng, (await starts.take(disk, 2)).start, world_size=2, rules=rules, slowness=slow)
        await job.run(30, tag=tag)
        assert job.phases() == {Phase.COMMITTED: 60}
        assert disk.most <= (2 if tag is None else 1) + SPARE

    run(seed, main)


@pytest.mark.parametrize("outliving", [2, 6])
@pytest.mark.parametrize("tag", [None, "best"])
def test_tidy_2_saves_that_outlive_their_trainer_and_those_of_the_next_one_do_not_wait_for_each_other(
    seed: int, tag: str | None, outliving: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshots of a killed trainer are whole when the next one begins. Each of the saves has a lease."""
    done, count = 20, 20 + outliving

    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        rules = Retention(keep_last=1) if tag is None else Retention()
        old = Job(disk, rng, (await starts.take(disk, 1)).start, rules=rules)
        await old.run(done, tag=tag)
        names = [(1, n) for n in range(done, count)] + [(2, n) for n in range(count, count + 6)]
        prefixes = [attempt_prefix(tag or default_tag(n), AttemptId(start, n if tag else 0)) for start, n in names]
        for prefix in prefixes[: outliving + 2]:
            await disk.put(attempt_lease_key(prefix), b"")
        new = Job(disk, rng, (await starts.take(disk, 1, prefixes[:outliving])).start, rules=rules)
        await asyncio.gather(old.run(outliving, tag=tag, first=done), new.run(6, tag=tag, first=count))
        assert old.phases() == {Phase.COMMITTED: count}
        assert new.phases() == {Phase.COMMITTED: 6}
        assert disk.most <= 1 + 2 * SPARE

    run(seed, main)
    assert "take more room than they should" not in caplog.text


@pytest.mark.parametrize("next_job", ["has no save", "saves what it did not load"])
def test_tidy_4_what_outlives_its_trainer_does_not_wait_until_the_next_job_removes(
    seed: int, next_job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One checkpoint stays only because no newer one was verified, the newest is replaced soon, and two snapshots are whole."""

    async def main(rng: random.Random) -> None:
        disk, rules = Disk(rng), Retention(keep_last=1)
        old = Job(disk, rng, (await starts.take(disk, 2)).start, world_size=2, rules=rules, read_back=False)
        await old.run(3)
        outliving = asyncio.create_task(old.run(2, first=3))
        await asyncio.sleep(0.3)
        names = [attempt_prefix(default_tag(n), AttemptId(1, 0)) for n in (3, 4)]
        start = (await starts.take(disk, 2, names)).start
        new = Job(disk, rng, start, world_size=2, rules=rules, keeps_before=(start, 0))
        if next_job == "saves what it did not load":
            await asyncio.sleep(5)
            await new.run(3, first=10)
        await outliving
        assert old.phases() == {Phase.COMMITTED: 10}
        assert set(new.phases()) <= {Phase.COMMITTED}
        of_older_job = 4  # which the next job knows only if it has loaded
        assert disk.most <= (of_older_job if next_job == "has no save" else of_older_job + 1 + SPARE)

    run(seed, main)
    assert "take more room than they should" not in caplog.text


@pytest.mark.parametrize("has", ["no bytes", "bytes", "the coordinator's vote"])
def test_tidy_4_attempts_of_an_older_start_at_which_nobody_works_any_more_are_decided(
    seed: int, has: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They survived into this start in a daemon, which then died."""

    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        old = Job(disk, rng, (await starts.take(disk, 2)).start, world_size=2, rules=Retention(keep_last=1))
        await old.run(3)
        attempts = [(default_tag(n), AttemptId(1, 0)) for n in (3, 4)]
        prefixes = [attempt_prefix(*attempt) for attempt in attempts]
        await announce(disk, *prefixes)
        for prefix in prefixes:
            if has == "bytes":
                await disk.put(object_key(prefix, chunks_name(0, 0)), b"chunks")
            elif has == "the coordinator's vote":
                await disk.put(object_key(prefix, vote_name(0)), b"vote")
                await disk.put(object_key(prefix, index_name(0)), b"index")
        new = Job(disk, rng, (await starts.take(disk, 2, prefixes)).start, world_size=2, rules=Retention(keep_last=1))
        for n in range(10, 14):
            await new.run(1, first=n)
        assert new.phases() == {Phase.COMMITTED: 8}
        assert [await state_of(disk, attempt_prefix(*attempt)) for attempt in attempts] == ["aborted"] * 2
        assert not disk.occupied & set(prefixes)

    run(seed, main)
    assert "take more room than they should" not in caplog.text


def test_without_rules_a_tag_of_which_something_stays_for_an_export_is_due_again_with_the_next_save() -> None:
    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        job = Job(disk, rng, (await starts.take(disk, 1)).start)
        await job.run(1, tag="best")
        (first,) = await root_view.checkpoints(disk)
        lease = OwnExportLease(disk, "/models/run1", None, Sight())
        await lease.keep([first.prefix], first.commit.order)
        await job.run(1, tag="best", first=1)
        await job.run(1, tag="last", first=2)
        assert len(disk.occupied) == 3
        await lease.keep([], first.commit.order)  # its export has ended
        await job.run(1, tag="last", first=3)
        assert first.prefix not in disk.occupied
        assert len(disk.occupied) == 2
        await lease.release()

    run(0, main)


def test_tidy_1_a_job_that_keeps_everything_asks_the_storage_of_no_object_in_order_to_remove() -> None:
    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        job = Job(disk, rng, (await starts.take(disk, 1)).start, read_back=False)
        await job.run(2)
        disk.looks.clear()
        disk.looking.clear()  # whoever lists anything waits for ever
        job.states[0].tidier.ask(job.attempts[0].info)
        await job.states[0].tidier.finish()
        assert not disk.looks

    run(0, main)


@pytest.mark.parametrize("begun", ["this one", "the one before"])
async def test_tidy_3_another_rank_begins_what_the_log_shows_that_the_coordinator_has_begun(begun: str) -> None:
    loop, store = asyncio.get_running_loop(), MemoryStore()
    await starts.take(store, 2)
    commit = CommitConfig(timeout_s=600.0, poll_min_s=0.02, poll_max_s=0.02)
    tidier, root_log = WriterState(store=store, persist=PERSIST, commit=commit).tidier, RootLog.of(store)
    infos = [AttemptInfo(tag="best", attempt=AttemptId(1, n), rank=1, world_size=2, step=n, n=n) for n in range(2)]
    await tidier.room_for(infos[0], loop.time() + 600, 1 << 30)
    stands_in = AnnounceRecord(attempt=infos[0].prefix, step=0)
    assert await root_log.add(stands_in) == ""  # by this rank, which does not know whether the coordinator has begun it
    waiting = asyncio.create_task(tidier.room_for(infos[1], loop.time() + 600, 1 << 30))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    decided = AbortRecord(attempt=infos[0].prefix, error=NO_REASON, decided_by=0, writer=SINCE)
    own = AnnounceRecord(attempt=infos[1].prefix, n=1, step=1)
    assert await root_log.add(own if begun == "this one" else decided) == ""
    async with asyncio.timeout(60):
        await waiting


@pytest.mark.parametrize(("rank", "start"), [(1, 1), (0, 1)])
def test_on_a_full_disk_who_may_not_remove_waits_until_the_log_shows_that_objects_went(rank: int, start: int) -> None:
    async def main(rng: random.Random) -> None:
        loop, disk = asyncio.get_running_loop(), Disk(rng)
        await starts.take(disk, 2)
        await announce(disk, "aborted/00000001-0")
        await starts.take(disk, 2)
        tidier = WriterState(store=disk, persist=PERSIST, commit=CommitConfig(timeout_s=TIMEOUT_S)).tidier
        info = AttemptInfo(tag="t", attempt=AttemptId(start, 1), rank=rank, world_size=2, step=1, n=1)
        began = loop.time()
        assert not await tidier.more_room_for(info, began + TIMEOUT_S, tidier.freed)
        assert loop.time() - began >= tidying.FULL_S
        waiting = asyncio.create_task(tidier.more_room_for(info, loop.time() + TIMEOUT_S, tidier.freed))
        await asyncio.sleep(1)
        assert not waiting.done()
        await sweep(disk)
        assert await waiting

    run(0, main)


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_disk_without_room_what_may_go_goes_first(seed: int, world_size: int) -> None:
    """There is room for one more than stays, a verified one included. Each save begins as soon as the one before is committed,
    while what that one has replaced is still being removed.
    """

    async def main(rng: random.Random) -> None:
        kept = 3 - world_size
        disk = Disk(rng, room=kept + 2, removal_s=1.0)
        start = (await starts.take(disk, world_size)).start
        job = Job(disk, rng, start, world_size=world_size, rules=Retention(keep_last=kept))
        async with asyncio.TaskGroup() as running:
            for n in range(12):
                running.create_task(job.run(1, first=n))
                while len(job.attempts) < (n + 1) * world_size or not all(a.phase in FINAL for a in job.attempts):
                    await asyncio.sleep(0.1)
        assert job.phases() == {Phase.COMMITTED: 12 * world_size}
        assert disk.refused or world_size > 1

    run(seed, main)


def test_a_job_that_has_not_loaded_removes_nothing_of_an_earlier_one(seed: int) -> None:
    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        for start in (1, 2):
            await restart(disk, world_size=1)
            assert await starts.newest(disk) == start
            rules = Retention(keep_last=1)
            job = Job(disk, rng, start, rules=rules, keeps_before=(start if start == 2 else 0, 0))
            await job.run(3, tag="best", first=10 * start)
            await job.run(3, first=100 * start + 1)
        commits = [one.prefix for one in await attempts_at(disk) if one.status == "checkpoint"]
        first, second = sorted(prefix for prefix in commits if prefix.startswith("global_step"))[-2:]
        assert {first, second} == {f"global_step103/{AttemptId(1, 0)}", f"global_step203/{AttemptId(2, 0)}"}

    run(seed, main)
