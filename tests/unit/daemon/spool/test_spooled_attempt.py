"""SPOOL-9 and QUEUE-3: how one save goes through the spool, in virtual time. `tests/simulation/test_spools.py` has jobs."""

from __future__ import annotations

import asyncio
import gc

import pytest

from checkpointd.commit.machine import FINAL, IN_SPOOL, Phase
from checkpointd.errors import SupersededError
from checkpointd.pipeline.shard import Shard
from checkpointd.store.memory import MemoryStore
from tests.spooled_saves import HOUR_S, AwayStore, Node, committed, node_at, phases, run, spool, until


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


def test_queue_3_what_a_newer_commit_replaces_ends_on_all_ranks_and_says_so() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        first = await node_at(root, 2, keep="newest")
        second = await Node(root, spool(), rank=1, world_size=2, nonce=first.nonce).begin()
        root.away = True
        for step in (1, 2, 3):
            first.save(step)
            second.save(step)
            await until(lambda: first.attempts[-1].phase in IN_SPOOL and second.attempts[-1].phase in IN_SPOOL)
        root.away = False
        await asyncio.gather(first.over(), second.over())
        assert await committed(root) == ["global_step3"]
        assert first.directory.counts.superseded == 2
        for attempt in (*first.attempts[:-1], *second.attempts[:-1]):
            assert isinstance(attempt.error, SupersededError)
            assert "superseded in the spool by global_step3" in str(attempt.error)

    run(main())


@pytest.mark.nightly
def test_queue_3_a_commit_of_a_save_that_found_no_room_replaces_what_waits() -> None:
    """So the spool has room again, before all that fills it is uploaded."""

    async def main() -> None:
        node = await node_at(MemoryStore(), keep="newest", bandwidth_bps=1.0)
        node.save(1, nbytes=1 << 20)
        await until(lambda: node.attempts[0].phase is Phase.UPLOADING)
        waiting = node.save(2)
        await until(lambda: waiting.phase is Phase.SPOOLED)
        node.place.limit = 0
        for save_latest in (False, True):
            assert waiting.phase is Phase.SPOOLED
            node.save(3 + save_latest, save_latest=save_latest)
            await until(lambda: node.attempts[-1].phase is Phase.COMMITTED)
        await until(lambda: waiting.phase in FINAL)
        assert isinstance(waiting.error, SupersededError)
        assert "by global_step4 before" in str(waiting.error)
        node.directory.hurry()
        await node.over()
        assert node.directory.counts.superseded == 1

    run(main())


@pytest.mark.nightly
def test_a_limit_of_bandwidth_slows_uploads_and_no_save_until_a_process_is_told_to_leave() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bandwidth_bps=1 << 20)
        attempt = node.save(1, nbytes=60 << 20)
        await until(lambda: bool(node.freed))
        assert asyncio.get_running_loop().time() < 5.0
        await node.over()
        assert 55.0 < asyncio.get_running_loop().time() < 70.0
        assert attempt.phase is Phase.COMMITTED
        last = node.save(2, nbytes=60 << 20)
        await until(lambda: last.phase is Phase.UPLOADING)
        node.directory.hurry()
        await node.over()
        assert asyncio.get_running_loop().time() < 90.0

    run(main())


def test_nothing_of_the_snapshot_is_held_while_its_shard_waits_for_the_root() -> None:
    def shards() -> list[Shard]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is Shard]

    async def main() -> None:
        root, of_others = AwayStore(MemoryStore()), shards()
        node = await node_at(root)
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in (Phase.SPOOLED, Phase.UPLOADING))
        held = [one for one in shards() if not any(one is other for other in of_others)]
        root.away = False
        await node.over()
        assert not held, "an upload may wait for hours, and thousands may wait"

    run(main())
