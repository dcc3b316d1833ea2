"""SPOOL-1 to SPOOL-10 and TURN-2: saves go through the spool, whatever the root does meanwhile, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from checkpointd.commit.machine import FINAL, IN_SPOOL, Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, LoadConfig, SpoolConfig
from checkpointd.errors import NotFoundError, StoreError, StoreFullError, SupersededError, UnreadableError
from checkpointd.pipeline.outcome.outlived import anyhow
from checkpointd.pipeline.outcome.recover import resolve
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import catalog, epochs
from checkpointd.pipeline.spool.side import UNREAD_S
from checkpointd.pipeline.spool.turns import HOLD_S
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.spooled_saves import AwayStore, MemoryPlace, Node, begun_root, contents, damage, until

HOUR_S = 3600.0


def run(main: Coroutine[Any, Any, None], seed: int = 1) -> None:
    simloop.run(seed, main)


def spool(**settings: Any) -> SpoolConfig:
    return SpoolConfig(directory="/spool", **settings)


async def committed(root: Store) -> list[str]:
    """The tags of the checkpoints at the root, newest first, after each was read and verified."""
    found = await catalog.checkpoints(root)
    for checkpoint in found:
        verdict = await verify(root, checkpoint, LoadConfig())
        assert verdict.whole, verdict
    return [checkpoint.tag for checkpoint in found]


async def node_at(root: Store, world_size: int = 1, *, keep: Any = "all", **settings: Any) -> Node:
    nonce = await begun_root(root, world_size)
    return await Node(root, spool(keep=keep, **settings), nonce=nonce, world_size=world_size).begin()


def phases(node: Node, at: int = 0) -> list[Phase]:
    return [phase for _, phase in node.phases[at]]


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
        assert await catalog.latest(root) == "global_step12"

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


# --- after the process has died ----------------------------------------------------------------------------------


def test_spool_4_the_next_process_uploads_what_was_left() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        waiting = [node.save(step) for step in (1, 2)]
        await until(lambda: all(attempt.phase in IN_SPOOL for attempt in waiting))
        await node.dies()
        node = await node.restarts()
        assert len(node.attempts) == 2
        await asyncio.sleep(HOUR_S)
        root.away = False
        await node.over()
        assert await committed(root) == ["global_step2", "global_step1"], [(a.phase, a.error) for a in node.attempts]

    run(main())


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
        assert node.attempts[0].phase is Phase.ABORTED
        assert "epoch 1" in str(node.attempts[0].error)
        assert "FencedError" in str(node.attempts[0].error.code if node.attempts[0].error else "")
        assert not [key for key in node.place.keys if "global_step1" in key]
        assert await committed(root) == []

    run(main())


def test_a_vote_that_stands_is_left_to_the_start_that_has_fenced_it() -> None:
    """It commits the attempt if all ranks have voted."""

    async def main() -> None:
        root = MemoryStore()
        nonce = await begun_root(root, 2)
        node = await Node(root, spool(), rank=1, world_size=2, nonce=nonce).begin()
        attempt = node.save(1)
        await until(lambda: attempt.phase is Phase.PREPARED)
        await node.dies()
        await begun_root(root, 2)
        node = await node.restarts()
        attempt = node.attempts[0]
        await until(lambda: attempt.phase not in IN_SPOOL)
        assert attempt.phase is Phase.PREPARED
        await resolve(root, await catalog.view(root, attempt.info.tag, attempt.info.attempt))
        await node.over()
        assert attempt.outcome is not None
        assert attempt.outcome.decided_by == -1

    run(main())


def test_outlived_1_who_makes_room_decides_nothing_that_waits_in_its_own_spool() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, windows="12:00-13:00")
        attempt = node.save(1)
        await until(lambda: attempt.phase is Phase.SPOOLED)
        await node.state._decide_older([attempt.info.prefix], HOUR_S, anyhow)
        assert attempt.phase is Phase.SPOOLED
        await node.over()
        assert await committed(root) == ["global_step1"]

    run(main())


def test_outlived_1_who_makes_room_decides_nothing_that_another_process_uploads_from_the_same_spool() -> None:
    """Without a sidecar, the process of any rank of this node may have taken up what rank 0 has left."""

    async def main() -> None:
        root = AwayStore(MemoryStore())
        left = await node_at(root, windows="12:00-13:00")
        attempt = left.save(1)
        await until(lambda: attempt.phase is Phase.SPOOLED)
        await left.dies()
        other = await left.restarts()
        node = await Node(root, left.config, nonce=left.nonce, place=left.place).begin()
        await node.state._decide_older([attempt.info.prefix], HOUR_S, anyhow)
        assert other.attempts[0].phase is Phase.SPOOLED
        await other.over()
        assert await committed(root) == ["global_step1"]

    run(main())


def test_spool_3_two_processes_never_work_at_one_record() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        node.save(1)
        await until(lambda: node.attempts[0].phase in IN_SPOOL)
        other = await Node(root, node.config, nonce=node.nonce, place=node.place).begin()
        (shard,) = await other.directory.found()
        assert not await shard.claimed()
        await node.dies()
        assert await shard.claimed()

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


def test_turn_2_the_last_save_that_all_ranks_have_is_not_dropped_for_one_that_only_some_have() -> None:
    """The job dies when one rank has the newer save in its spool."""

    async def main() -> None:
        root = AwayStore(MemoryStore())
        first = await node_at(root, 2, keep="newest", timeout_s=HOUR_S)
        second = await Node(root, first.config, rank=1, world_size=2, nonce=first.nonce).begin()
        root.away = True
        whole = [first.save(1), second.save(1)]
        await until(lambda: all(attempt.phase in IN_SPOOL for attempt in whole))
        newer = first.save(2)
        await until(lambda: newer.phase in IN_SPOOL)
        await asyncio.sleep(60)
        await first.dies()
        root.away = False
        first, second = await first.restarts(), await second.restarts()
        await asyncio.gather(first.over(), second.over())
        assert await committed(root) == ["global_step1"]

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


def test_a_superseded_save_stays_superseded_after_a_restart() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, keep="newest")
        root.away = True
        for step in (1, 2):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        await until(lambda: any(key.endswith(".superseded") for key in node.place.keys))
        await node.dies()
        node = await node.restarts()
        root.away = False
        await node.over()
        assert await committed(root) == ["global_step2"]
        assert [type(a.error) for a in node.attempts] == [SupersededError, type(None)]

    run(main())


# --- a full spool, and a damaged one -----------------------------------------------------------------------------


def test_spool_8_a_full_spool_sends_the_save_straight_to_the_root() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bytes_max=4 << 20)
        node.save(1, nbytes=2 << 20)
        await until(lambda: bool(node.freed))
        root.away = False
        node.save(2, nbytes=2 << 20)
        node.save(3, nbytes=32 << 20)
        await node.over()
        assert Phase.SPOOLED not in phases(node, 2)
        assert node.directory.counts.direct_full >= 1
        assert await committed(root) == ["global_step3", "global_step2", "global_step1"]

    run(main())


class FullStore(MemoryStore):
    """A disk that is full although it said that it had room."""

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> Any:
        from checkpointd.errors import StoreFullError

        raise StoreFullError("no space left on device")


class BrokenStore(MemoryStore):
    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> Any:
        from checkpointd.errors import StoreError

        raise StoreError("input/output error")


@pytest.mark.parametrize(("kind", "count"), [(FullStore, "direct_full"), (BrokenStore, "direct_failed")])
def test_spool_8_a_spool_that_fails_costs_no_save(kind: type[MemoryStore], count: str) -> None:
    async def main() -> None:
        root = MemoryStore()
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=kind)).begin()
        node.save(1)
        await node.over()
        assert await committed(root) == ["global_step1"]
        assert getattr(node.directory.counts, count) == 1
        assert not [key for key in node.place.keys if "global_step1" in key]

    run(main())


def test_spool_9_a_disk_that_gives_a_shard_no_more_keeps_no_other_one_from_its_turn() -> None:
    class Dying(MemoryStore):
        lost = "?"

        async def get_range(self, key: str, offset: int, out: memoryview) -> None:
            if key.startswith(self.lost):
                raise UnreadableError("input/output error")
            await super().get_range(key, offset, out)

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=Dying)).begin()
        root.away = True
        for step in (1, 2, 3):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        assert isinstance(store, Dying)
        store.lost = "global_step3/"
        root.away = False
        await until(lambda: {attempt.phase for attempt in node.attempts[:2]} == {Phase.COMMITTED})
        assert node.attempts[2].phase is Phase.UPLOADING
        assert asyncio.get_running_loop().time() < UNREAD_S / 4
        await node.over()
        assert [attempt.phase for attempt in node.attempts] == [Phase.COMMITTED, Phase.COMMITTED, Phase.FAILED]
        assert "the spool's disk fails: input/output error" in str(node.attempts[2].error)
        assert asyncio.get_running_loop().time() < HOUR_S
        assert await committed(root) == ["global_step2", "global_step1"]

    run(main())


@pytest.mark.parametrize("error", [UnreadableError("input/output error"), NotFoundError("there is no such object")])
def test_spool_9_a_disk_that_is_away_for_minutes_loses_no_shard(error: Exception) -> None:
    """It fails, or is not mounted, so that another directory lies at its path."""

    class Away(MemoryStore):
        away = False

        async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
            if self.away:
                raise error
            return await super().get(key, size_max=size_max)

        async def stat(self, key: str) -> int | None:
            return None if self.away else await super().stat(key)

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=Away)).begin()
        root.away = True
        for step in (1, 2):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        assert isinstance(store, Away)
        store.away, root.away = True, False
        await asyncio.sleep(UNREAD_S / 2)
        store.away = False
        await node.over()
        assert await committed(root) == ["global_step2", "global_step1"]

    run(main())


def test_spool_9_a_disk_that_fails_now_and_then_beside_the_root_loses_no_shard() -> None:
    class Refusing(AwayStore):
        refuses = False

        async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
            if self.refuses:
                raise StoreError("slow down")
            return await super().open_writer(key, size_hint=size_hint, size_max=size_max)

    class Glitching(MemoryStore):
        tries = 0

        async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
            if key.endswith(".index"):
                self.tries += 1
                root.refuses = self.tries in (2, 4, 6, 8)
                if self.tries in (1, 3, 5, 7, 9):
                    raise UnreadableError("input/output error")
            return await super().get(key, size_max=size_max)

    root = Refusing(MemoryStore())

    async def main() -> None:
        nonce = await begun_root(root)
        node = await Node(root, spool(), nonce=nonce, place=MemoryPlace(made=Glitching)).begin()
        node.save(1)
        await node.over()
        (store,) = node.place.stores.values()
        assert isinstance(store, Glitching)
        assert (store.tries, await committed(root)) == (10, ["global_step1"])

    run(main())


@pytest.mark.parametrize("error", ["full", "read-only"])
def test_spool_9_a_disk_that_takes_no_more_writes_ends_no_upload(error: str) -> None:
    """It can be full of other programs' files, and then only the uploads make room."""

    class Frozen(MemoryStore):
        frozen = False

        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            if self.frozen:
                raise StoreFullError("no space left on device") if error == "full" else StoreError("read-only file system")
            return await super().put_if_absent(key, data, durable=durable)

        async def delete(self, key: str, *, durable: bool = True) -> None:
            if self.frozen and error != "full":
                raise StoreError("read-only file system")
            await super().delete(key, durable=durable)

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=Frozen)).begin()
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        assert isinstance(store, Frozen)
        store.frozen = True
        root.away = False
        await node.over()
        assert attempt.phase is Phase.COMMITTED
        assert asyncio.get_running_loop().time() < HOUR_S
        assert await committed(root) == ["global_step1"]

    run(main())


def test_spool_6_only_committed_shards_go_for_room() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bytes_max=5 << 20)
        node.save(1, nbytes=2 << 20)
        await node.over()
        assert [key for key in node.place.keys if key.startswith("global_step1/")], "it stays for restarts"
        root.away = True
        node.save(2, nbytes=2 << 20)
        await until(lambda: node.attempts[1].phase in IN_SPOOL)
        assert not [key for key in node.place.keys if key.startswith("global_step1/")]
        node.save(3, nbytes=2 << 20)
        await asyncio.sleep(60)
        assert node.attempts[1].phase in IN_SPOOL
        assert [key for key in node.place.keys if key.startswith("global_step2/")]
        root.away = False
        await node.over()
        assert node.attempts[2].phase is Phase.FAILED, "as without a spool"
        assert await committed(root) == ["global_step2", "global_step1"]

    run(main())


@pytest.mark.parametrize("what", [".chunks", ".index"])
def test_sending_1_damage_in_the_spool_never_becomes_a_checkpoint(what: str) -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        (key,) = [key for key in contents(store) if key.endswith(what)]
        damage(store, key, 500)
        root.away = False
        await node.over()
        assert attempt.phase is Phase.FAILED
        assert "spool lost this shard" in str(attempt.error)
        assert await committed(root) == []
        assert not [key for key in contents(root) if key.endswith((".chunks", ".index"))]
        node.save(2)
        await node.over()
        assert await committed(root) == ["global_step2"]

    run(main())


def test_sending_1_a_truncated_object_is_found() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        (key,) = [key for key in contents(store) if key.endswith(".chunks")]
        contents(store)[key] = contents(store)[key][:-5000]
        root.away = False
        await node.over()
        assert attempt.phase is Phase.FAILED
        assert await committed(root) == []

    run(main())


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


# --- what an earlier process has left ----------------------------------------------------------------------------


def test_a_start_of_one_root_leaves_the_other_roots_in_the_spool_alone() -> None:
    async def main() -> None:
        one, two = AwayStore(MemoryStore("one")), AwayStore(MemoryStore("two"))
        place = MemoryPlace()
        node = await Node(one, spool(), nonce=await begun_root(one), place=place).begin()
        other = await Node(two, spool(), nonce=await begun_root(two), place=place).begin()
        one.away = two.away = True
        node.save(1)
        other.save(7)
        await until(lambda: node.attempts[0].phase in IN_SPOOL and other.attempts[0].phase in IN_SPOOL)
        writing = await other.directory.at(two.url)
        await writing.store.put_if_absent("global_step8/00000001-0/00000-0.chunks", b"being written by a living process")
        (left,) = await node.directory.found(one.url)
        assert left.prefix == "global_step1/00000001-0"
        assert await node.directory.sweep(one.url, before_epoch=9) == 0
        assert await writing.store.stat("global_step8/00000001-0/00000-0.chunks") is not None

    run(main())


def test_spool_2_objects_without_a_record_go_and_those_with_one_stay() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        node.save(1)
        await until(lambda: node.attempts[0].phase in IN_SPOOL)
        await node.dies()
        (store,) = node.place.stores.values()
        await store.put_if_absent("global_step9/00000001-0/00000-0.chunks", b"cut off")
        node = await node.restarts()
        assert await node.directory.sweep() == 1
        root.away = False
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


def test_turn_1_what_was_decided_before_a_restart_keeps_nobody_waiting() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        for step in (1, 2):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        await node.dies()
        root.away = False
        decided = await Node(root, spool(), nonce=node.nonce, place=MemoryPlace(), saves=1).begin()
        decided.save(2)  # another node has taken it over, and committed it
        await decided.over()
        node = await node.restarts()
        await node.over()
        assert await committed(root) == ["global_step2", "global_step1"]

    run(main())


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


def test_spool_8_a_record_whose_put_failed_is_not_left_behind() -> None:
    class Torn(MemoryStore):
        """A disk that fails after it has put a record."""

        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            put = await super().put_if_absent(key, data, durable=durable)
            if "/spooled/" in key:
                raise StoreError("input/output error")
            return put

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=Torn)).begin()
        node.save(1)
        await node.over()
        assert node.directory.counts.direct_failed == 1
        assert await committed(root) == ["global_step1"]
        assert not [key for key in node.place.keys if "/spooled/" in key or key.startswith("global_step1/")]

    run(main())


def test_turn_3_a_save_of_this_start_waits_for_none_that_another_node_has_lost() -> None:
    """The second node was replaced: it has no shard of the attempt that the first one still uploads, and votes for."""

    async def main() -> None:
        root = AwayStore(MemoryStore())
        first = await node_at(root, 2)
        second = await Node(root, spool(), rank=1, world_size=2, nonce=first.nonce).begin()
        root.away = True
        first.save(1)
        second.save(1)
        await until(lambda: first.attempts[0].phase in IN_SPOOL and second.attempts[0].phase in IN_SPOOL)
        await first.dies()
        root.away = False
        epoch = await epochs.take(root, 2, [first.attempts[0].info.prefix])
        first = await first.restarts()
        await until(lambda: first.attempts[0].phase is Phase.PREPARED)
        began = asyncio.get_running_loop().time()
        second = await Node(root, spool(), rank=1, world_size=2, nonce=epoch.nonce, epoch=epoch.epoch).begin()
        assert first.state.spool is not None
        first.state.spool.nonce = epoch.nonce
        first.epoch = epoch.epoch
        new = [first.save(2), second.save(2)]
        await until(lambda: all(attempt.phase in FINAL for attempt in new))
        assert [attempt.phase for attempt in new] == [Phase.COMMITTED] * 2
        assert asyncio.get_running_loop().time() < began + HOLD_S / 4
        first.attempts[0].give_up("it cannot be whole")
        await first.over()

    run(main())
