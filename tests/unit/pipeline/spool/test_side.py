"""SPOOL-9 and TURN-2: saves go through the spool, whatever the root does meanwhile, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from checkpointd.commit.machine import FINAL, IN_SPOOL, Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.errors import SupersededError
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from tests.spooled_saves import HOUR_S, AwayStore, Node, committed, contents, node_at, phases, run, spool, until


def test_a_save_goes_up_each_rung_and_its_slot_is_free_before_the_root_has_any_of_it() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        node.save(1)
        await node.over()
        assert node.freed == [3], "free when it is spooled, and not later"
        assert phases(node) == [
            Phase.STAGED,
            Phase.PERSISTING,
            Phase.SPOOLED,
            Phase.UPLOADING,
            Phase.PREPARED,
            Phase.COMMITTED,
        ]
        assert await committed(root) == ["global_step1"]

    run(main())


def test_spool_9_a_bucket_that_is_away_for_an_hour_loses_no_save() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        node.save(0)
        await node.over()
        root.away = True
        for step in range(1, 13):
            node.save(step)
            await asyncio.sleep(HOUR_S / 12)
            assert node.attempts[-1].phase in IN_SPOOL
        assert len(node.freed) == 13
        root.away = False
        await node.over()
        assert {attempt.phase for attempt in node.attempts} == {Phase.COMMITTED}
        assert await committed(root) == [f"global_step{step}" for step in range(12, -1, -1)]
        assert await root_view.latest(root) == "global_step12"

    run(main())


def test_an_upload_that_the_bucket_cuts_off_is_sent_again_and_finished_objects_are_not() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        attempt = node.save(1, nbytes=64 << 20)
        await until(lambda: root.written > 0, 0.001)
        root.away = True
        await asyncio.sleep(HOUR_S)
        assert attempt.phase is Phase.UPLOADING
        root.away = False
        await node.over()
        assert await committed(root) == ["global_step1"]
        assert len(root.opened) == 2

    run(main())


def test_two_ranks_commit_although_one_uploads_hours_later() -> None:
    async def main() -> None:
        bucket = MemoryStore()
        first = await node_at(bucket, 2)
        far = AwayStore(bucket)
        second = await Node(far, spool(), rank=1, world_size=2, nonce=first.nonce).begin()
        far.away = True
        first.save(1)
        second.save(1)
        await until(lambda: first.attempts[0].phase is Phase.PREPARED)
        await asyncio.sleep(1.5 * HOUR_S)
        assert (first.attempts[0].phase, second.attempts[0].phase) == (Phase.PREPARED, Phase.UPLOADING)
        far.away = False
        await asyncio.gather(first.over(), second.over())
        assert {first.attempts[0].phase, second.attempts[0].phase} == {Phase.COMMITTED}
        assert await committed(bucket) == ["global_step1"]

    run(main())


def test_the_time_out_of_the_spool_ends_a_save_whose_bucket_never_comes_back() -> None:
    async def main() -> None:
        bucket = MemoryStore()
        first = await node_at(bucket, 2, timeout_s=HOUR_S)
        far = AwayStore(bucket)
        second = await Node(far, spool(timeout_s=HOUR_S), rank=1, world_size=2, nonce=first.nonce).begin()
        far.away = True
        first.save(1)
        second.save(1)
        await first.over()
        assert HOUR_S < asyncio.get_running_loop().time() < 1.1 * HOUR_S
        assert first.attempts[0].phase is Phase.ABORTED
        assert "within 3600 s" in str(first.attempts[0].error)
        far.away = False
        await second.over()
        assert second.attempts[0].phase is Phase.ABORTED
        assert not [key for key in second.place.keys if "global_step1" in key]

    run(main())


# --- saves faster than the bucket --------------------------------------------------------------------------------


def test_turn_2_a_newer_save_replaces_those_that_wait_and_says_so() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, keep="newest")
        root.away = True
        for step in range(1, 6):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        await until(lambda: [a.phase for a in node.attempts[:-1]] == [Phase.FAILING] * 4)
        assert not [key for key in node.place.keys if "global_step1/" in key]
        assert node.directory.counts.superseded == 4
        root.away = False
        await node.over()
        assert await committed(root) == ["global_step5"]
        for attempt in node.attempts[:-1]:
            assert isinstance(attempt.error, SupersededError)
            assert "superseded in the spool by" in str(attempt.error)
        assert not [key for key in contents(root) if key.endswith((".chunks", ".index")) and "step5" not in key]

    run(main())


def test_turn_2_a_required_save_and_one_that_retention_keeps_stay() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, keep="newest")
        node.state.commit = CommitConfig(retention=Retention(keep_last=9, every_steps=3), read_back=False)
        root.away = True
        node.save(1, required=True)
        node.save(2, save_latest=False)
        for step in (3, 4, 5):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        root.away = False
        await node.over()
        phases = {attempt.info.step: attempt.phase for attempt in node.attempts}
        assert phases == {
            1: Phase.COMMITTED,
            2: Phase.COMMITTED,
            3: Phase.COMMITTED,
            4: Phase.FAILED,
            5: Phase.COMMITTED,
        }

    run(main())


def test_one_rank_that_supersedes_ends_the_save_on_all_ranks() -> None:
    async def main() -> None:
        bucket = MemoryStore()
        first = await node_at(bucket, 2)
        far = AwayStore(bucket)
        second = await Node(far, spool(keep="newest"), rank=1, world_size=2, nonce=first.nonce).begin()
        far.away = True
        for step in (1, 2):
            first.save(step)
            second.save(step)
            await until(lambda: second.attempts[-1].phase in IN_SPOOL)
        assert second.state.spool is not None
        second.state.spool.all_have(1, (1, 1))
        far.away = False
        await asyncio.gather(first.over(), second.over())
        assert [attempt.phase for attempt in first.attempts] == [Phase.ABORTED, Phase.COMMITTED]
        assert isinstance(first.attempts[0].error, SupersededError)
        assert await committed(bucket) == ["global_step2"]

    run(main())


def test_turn_2_a_commit_of_a_save_that_found_no_room_drops_those_that_still_wait() -> None:
    """So the spool has room again, before all that fills it is uploaded."""

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, keep="newest", windows="12:00-13:00")
        waiting = node.save(1)
        await until(lambda: waiting.phase is Phase.SPOOLED)
        limit, node.place.limit = node.place.limit, 0
        for save_latest in (False, True):
            assert waiting.phase is Phase.SPOOLED
            node.save(2 + save_latest, save_latest=save_latest)
            await until(lambda: node.attempts[-1].phase is Phase.COMMITTED)
        node.place.limit = limit
        await until(lambda: waiting.phase in FINAL)
        assert isinstance(waiting.error, SupersededError)
        assert "by global_step3 before" in str(waiting.error)
        await node.over()
        assert node.directory.counts.superseded == 1

    run(main())


def test_turn_2_a_commit_drops_those_that_still_wait() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        first = await node_at(root, 2, keep="newest")
        second = await Node(root, spool(keep="newest"), rank=1, world_size=2, nonce=first.nonce).begin()
        root.away = True
        for step in (1, 2, 3):
            first.save(step)
            second.save(step)
            await until(lambda: first.attempts[-1].phase in IN_SPOOL and second.attempts[-1].phase in IN_SPOOL)
        assert first.directory.counts.superseded == 0
        root.away = False
        await asyncio.gather(first.over(), second.over())
        assert await committed(root) == ["global_step3"]
        assert [type(attempt.error) for attempt in first.attempts] == [SupersededError, SupersededError, type(None)]

    run(main())


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_turn_1_a_newer_save_that_ends_while_it_waits_keeps_no_older_one_from_its_turn(seed: int) -> None:
    """Another rank aborts the newer save, at which this rank's upload has failed before."""

    async def main() -> None:
        bucket = MemoryStore()
        first = await node_at(bucket, 2)
        far = AwayStore(bucket)
        second = await Node(far, spool(), rank=1, world_size=2, nonce=first.nonce).begin()
        far.away = True
        for step in (1, 2):
            first.save(step)
            second.save(step)
            await until(lambda: second.attempts[-1].phase in IN_SPOOL)
        await asyncio.sleep(HOUR_S)
        first.attempts[1].give_up("somebody gave it up")
        await until(lambda: first.tasks[1].done())
        far.away = False
        await asyncio.gather(first.over(), second.over())
        assert [attempt.phase for attempt in second.attempts] == [Phase.COMMITTED, Phase.ABORTED]
        assert asyncio.get_running_loop().time() < 1.2 * HOUR_S
        assert await committed(bucket) == ["global_step1"]

    run(main(), seed)


# --- pacing ------------------------------------------------------------------------------------------------------


def test_uploads_keep_to_the_windows_of_the_day() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, windows="22:00-06:00")
        await asyncio.sleep(8 * HOUR_S)  # it is 8 in the morning
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        await asyncio.sleep(13.9 * HOUR_S)
        assert (attempt.phase, root.opened) == (Phase.SPOOLED, [])
        await asyncio.sleep(0.2 * HOUR_S)
        assert attempt.phase is Phase.COMMITTED

    run(main())


def test_a_limit_of_bandwidth_slows_uploads_and_no_save() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bandwidth_bps=1 << 20)
        attempt = node.save(1, nbytes=60 << 20)
        await until(lambda: bool(node.freed))
        assert asyncio.get_running_loop().time() < 5.0
        await node.over()
        assert 55.0 < asyncio.get_running_loop().time() < 70.0
        assert attempt.phase is Phase.COMMITTED

    run(main())


def test_a_process_that_is_told_to_leave_may_lift_both() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, windows="22:00-06:00", bandwidth_bps=1 << 20)
        await asyncio.sleep(8 * HOUR_S)
        attempt = node.save(1, nbytes=60 << 20)
        await until(lambda: attempt.phase in IN_SPOOL)
        node.directory.pacing.lift()
        began = asyncio.get_running_loop().time()
        await node.over()
        assert asyncio.get_running_loop().time() - began < 10.0
        assert attempt.phase is Phase.COMMITTED

    run(main())
