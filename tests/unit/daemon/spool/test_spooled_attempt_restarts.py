"""SPOOL-2 to SPOOL-4: what an earlier process has left in the spool is uploaded, or goes, in virtual time."""

from __future__ import annotations

import pytest

from checkpointd.commit.machine import IN_SPOOL, Phase
from checkpointd.errors import FencedError
from checkpointd.layout.log_records import AnnounceRecord
from checkpointd.pipeline.outcome.outlived import anyhow
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.memory import MemoryStore
from tests.spooled_saves import (
    HOUR_S,
    AwayStore,
    MemoryPlace,
    Node,
    begun_root,
    committed,
    contents,
    damage,
    node_at,
    run,
    spool,
    until,
)


@pytest.mark.parametrize("after", range(1, 40, 2))
def test_sending_2_a_death_at_any_call_of_an_upload_costs_nothing(after: int) -> None:
    """The process dies after so many calls to the root; the next one goes on."""

    async def main() -> None:
        root = DiesAfter(MemoryStore())
        node = await node_at(root)
        root.calls = -1000
        node.save(1)
        await until(lambda: node.attempts[0].phase in (Phase.SPOOLED, Phase.UPLOADING), 0.0001)
        root.calls, root.most = 0, after
        await until(lambda: root.calls >= after or node.tasks[0].done(), 0.0001)
        await node.dies()
        root.most = 1 << 30
        node = await node.restarts()
        await node.over()
        assert await committed(root) == ["global_step1"]
        assert [attempt.phase for attempt in node.attempts] in ([], [Phase.COMMITTED])

    run(main())


class DiesAfter(AwayStore):
    """It takes `most` calls, and then hangs."""

    calls = 0
    most = 1 << 30

    def _check(self, *, reads: bool) -> None:
        self.calls += 1
        self.away = self.calls > self.most
        super()._check(reads=reads)


def test_a_shard_of_a_job_that_a_newer_start_has_fenced_is_dropped_and_says_so() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        node.save(1)
        await until(lambda: node.attempts[0].phase in IN_SPOOL)
        await node.dies()
        root.away = False
        await begun_root(root)  # a start that knows nothing of the spool
        node = await node.restarts()
        await node.over()
        assert node.attempts[0].phase is Phase.FAILED
        assert "start 1" in str(node.attempts[0].error)
        assert isinstance(node.attempts[0].error, FencedError)
        assert not [key for key in node.place.keys if "global_step1" in key]
        assert await committed(root) == []

    run(main())


def test_a_vote_that_stands_is_left_to_the_start_that_has_fenced_it() -> None:
    """It has committed the attempt if all ranks had voted, and aborted it otherwise."""

    async def main() -> None:
        root = MemoryStore()
        nonce = await begun_root(root, 2)
        node = await Node(root, spool(), rank=1, world_size=2, nonce=nonce).begin()
        attempt = node.save(1)
        await RootLog.of(root).add(AnnounceRecord(attempt=attempt.info.prefix, n=0, step=1))
        await until(lambda: attempt.phase is Phase.PREPARED)
        await node.dies()
        await begun_root(root, 2)
        node = await node.restarts()
        attempt = node.attempts[0]
        await node.over()
        assert attempt.phase is Phase.ABORTED
        assert attempt.outcome is not None
        assert attempt.outcome.abort is not None
        assert (attempt.outcome.abort.decided_by, attempt.outcome.abort.error.code) == (-1, "FencedError")
        assert not [key for key in node.place.keys if "global_step1" in key]

    run(main())


@pytest.mark.nightly
def test_outlived_1_who_makes_room_decides_nothing_that_waits_in_its_own_spool() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bandwidth_bps=1.0)
        attempt = node.save(1, nbytes=1 << 20)
        await until(lambda: attempt.phase is Phase.UPLOADING)
        await node.state._decide_older([attempt.info.prefix], HOUR_S, anyhow)
        assert attempt.phase is Phase.UPLOADING
        node.directory.hurry()
        await node.over()
        assert await committed(root) == ["global_step1"]

    run(main())


@pytest.mark.nightly
def test_outlived_1_who_makes_room_decides_nothing_that_lies_in_the_spool() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        left = await node_at(root, bandwidth_bps=1.0)
        attempt = left.save(1, nbytes=1 << 20)
        await until(lambda: attempt.phase is Phase.UPLOADING)
        await left.dies()
        node = await left.restarts()
        await node.state._decide_older([attempt.info.prefix], HOUR_S, anyhow)
        assert node.attempts[0].phase in IN_SPOOL
        node.directory.hurry()
        await node.over()
        assert await committed(root) == ["global_step1"]

    run(main())


def test_a_damaged_record_is_dropped_with_a_word_and_the_others_are_uploaded(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        for step in (1, 2):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        await node.dies()
        (store,) = node.place.stores.values()
        first = min(key for key in contents(store) if "/spooled/" in key and "." not in key.rpartition("/")[2])
        damage(store, first, 60)
        node = await node.restarts()
        assert node.directory.counts.damaged == 1
        root.away = False
        await node.over()
        assert len(await committed(root)) == 1

    run(main())
    assert "the spool has a damaged record" in caplog.text


def test_spool_4_a_record_of_a_root_that_was_made_again_is_replaced() -> None:
    """The attempts of the new root have the names of the old one's, whose record and notes are still in the spool."""

    async def main() -> None:
        bucket, place = AwayStore(MemoryStore()), MemoryPlace()
        old = await Node(bucket, spool(), nonce=await begun_root(bucket), place=place).begin()
        old.save(1)
        await old.over()
        assert [key for key in place.keys if key.endswith(".committed")]
        await old.dies()
        again = AwayStore(MemoryStore())
        node = await Node(again, spool(), nonce=await begun_root(again), place=place).begin()
        (store,) = place.stores.values()
        for key in [key for key in contents(store) if key.startswith("global_step1/")]:
            await store.delete(key)
        again.away = True
        node.save(1)
        await until(lambda: node.attempts[0].phase in IN_SPOOL)
        await node.dies()
        (left,) = await (await Node(again, node.config, nonce=node.nonce, place=place).begin()).directory.found()
        assert left.record.nonce == node.nonce
        again.away = False
        node = await node.restarts()
        await node.over()
        assert await committed(again) == ["global_step1"]

    run(main())
