"""ATTEMPT-4 of pipeline/attempt.py: a rank that has failed does not wait for a coordinator that says nothing.

Nor for a store that can take no word of the save before somebody acts.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NoReturn

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig
from checkpointd.errors import LinkError, SkippedError, StagingError, StoreFullError
from checkpointd.layout.keys import AttemptId, vote_name
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline import attempt
from checkpointd.pipeline.announcement import DecidedBefore
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.root.catalog_log import note, record_of
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.pipeline.write.vote import drop_shard
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import make_shard, rank_arrays

DEADLINE_S = 600.0


def saved_by(
    ranks: dict[int, Exception | None], world_size: int, kind: type[MemoryStore] = MemoryStore
) -> tuple[list[Attempt], float]:
    """One attempt of `ranks`, each of which fails where it has an error, in virtual time: how they end, and after how long."""

    async def main() -> tuple[list[Attempt], float]:
        store = kind()
        attempts = [
            Attempt(
                WriterState(store=store, commit=CommitConfig(timeout_s=DEADLINE_S)),
                AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=rank, world_size=world_size, step=1, n=0),
                deadline=DEADLINE_S,
            )
            for rank in ranks
        ]

        async def staged(rank: int, error: Exception | None) -> Shard:
            if error is not None:
                raise error
            return make_shard(rank_arrays(rank))

        await asyncio.gather(*(a.run(staged(*of)) for a, of in zip(attempts, ranks.items(), strict=True)))
        return attempts, asyncio.get_running_loop().time()

    return simloop.run(1, main())


def test_a_rank_that_failed_ends_the_attempt_where_the_coordinator_is_silent() -> None:
    (failed, other), seconds = saved_by({1: StagingError("the copy was torn"), 2: None}, world_size=3)
    assert seconds < attempt.NO_S + 2.0
    assert (failed.phase, other.phase) == (Phase.FAILED, Phase.ABORTED)
    assert isinstance(other.error, StagingError)
    assert other.error.ranks == (1,)
    assert "rank 1 failed while staging: the copy was torn" in str(other.error)


def test_a_rank_that_skips_ends_it_too() -> None:
    (skipped,), seconds = saved_by({1: SkippedError("no room")}, world_size=2)
    assert (skipped.phase, seconds < attempt.NO_S + 2.0) == (Phase.SKIPPED, True)


def test_a_coordinator_that_is_there_decides_at_once() -> None:
    ended, seconds = saved_by({0: None, 1: StagingError("torn"), 2: None}, world_size=3)
    assert seconds < attempt.NO_S
    assert [a.phase for a in ended] == [Phase.ABORTED, Phase.FAILED, Phase.ABORTED]
    assert all(a.outcome is not None and a.outcome.decided_by == 0 for a in ended)


class HasNoRoom(MemoryStore):
    """Has room for a vote, and none for an outcome, until `until`, in seconds."""

    until = DEADLINE_S * 2

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if key.endswith("/outcome") and asyncio.get_running_loop().time() < self.until:
            raise StoreFullError("No space left on device")
        return await super().put_if_absent(key, data, durable=durable)


def test_the_only_rank_does_not_wait_for_room_for_its_abort() -> None:
    (failed,), seconds = saved_by({0: StagingError("the copy was torn")}, 1, HasNoRoom)
    assert (failed.phase, seconds < attempt.NO_S + 2.0) == (Phase.FAILED, True)
    assert "failed: the copy was torn; the failure could not be stored (No space left on device)" in str(failed.error)
    assert seconds < 1.0


def test_where_other_ranks_wait_for_it_there_may_be_room_before_the_deadline() -> None:
    ended, seconds = saved_by({0: StagingError("the copy was torn"), 1: None}, 2, HasNoRoom)
    assert ([a.phase for a in ended], seconds >= DEADLINE_S) == ([Phase.FAILED] * 2, True)
    assert "could not be stored for the other ranks" in str(ended[0].error)


def test_a_coordinator_whose_vote_is_the_last_decides_at_once_however_rarely_it_looks() -> None:
    async def main() -> None:
        info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=0, world_size=1, step=1, n=0)
        commit = CommitConfig(timeout_s=DEADLINE_S, poll_max_s=30.0)
        coordinator = Attempt(WriterState(store=MemoryStore(), commit=commit), info, deadline=DEADLINE_S)

        async def staged() -> Shard:
            await asyncio.sleep(100.0)
            return make_shard(rank_arrays(0))

        await coordinator.run(staged())
        assert coordinator.phase is Phase.COMMITTED
        assert asyncio.get_running_loop().time() < 101.0

    simloop.run(1, main())


class LosesAVote(MemoryStore):
    """As a file server that loses power once the commit is durable: what rank 1 had put without a sync is gone."""

    lost = (".vote",)

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        is_put = await super().put_if_absent(key, data, durable=durable)
        if key.endswith("/outcome"):
            for end in self.lost:
                await self.delete(key.replace("outcome", f"00001{end}"))
        return is_put


class LosesAllOfIt(LosesAVote):
    lost = (".vote", ".index")


def test_commit_5_a_vote_that_is_lost_after_the_commit_is_not_missed() -> None:
    ended, seconds = saved_by({0: None, 1: None}, 2, LosesAVote)
    assert ([a.phase for a in ended], seconds < DEADLINE_S / 2) == ([Phase.COMMITTED] * 2, True)


def test_commit_5_a_rank_of_which_nothing_is_left_reports_no_commit() -> None:
    ended, _ = saved_by({0: None, 1: None}, 2, LosesAllOfIt)
    assert [a.phase for a in ended] == [Phase.COMMITTED, Phase.FAILED]


class LinkedStore(MemoryStore):
    """One in which a symbolic link stands at the tag."""

    async def list(self, prefix: str) -> NoReturn:
        raise LinkError("global_step1 is a symbolic link")

    async def get(self, key: str, *, size_max: int | None = None) -> NoReturn:
        raise LinkError("global_step1 is a symbolic link")

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> NoReturn:
        raise LinkError("global_step1 is a symbolic link")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_in_the_way_ends_a_save_that_another_hand_may_write(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    info = AttemptInfo(
        tag="global_step1", attempt=AttemptId(1, 0), rank=rank, world_size=2, step=1, n=0, takeover=1, may_be_taken_over=True
    )

    async def staged() -> Shard:
        await asyncio.sleep(DEADLINE_S / 10)  # while this rank looks in vain
        return make_shard(rank_arrays(rank))

    async def main() -> tuple[Attempt, float]:
        saved = Attempt(WriterState(store=LinkedStore(), commit=CommitConfig(timeout_s=DEADLINE_S)), info, deadline=DEADLINE_S)
        await saved.run(staged())
        return saved, asyncio.get_running_loop().time()

    saved, seconds = simloop.run(1, main())
    assert seconds < DEADLINE_S / 2
    assert (saved.phase, type(saved.error)) == (Phase.FAILED, LinkError)
    assert "global_step1 is a symbolic link" in str(saved.error)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot look for the outcome" in line for line in said) == 1
    assert any(
        f"rank {rank} cannot store its no: global_step1 is" in line and "tries to store the abort" in line for line in said
    )
    assert all("the other ranks" not in line for line in said)


def test_a_writer_that_comes_too_late_learns_the_outcome_although_a_look_from_before_it_missed_it() -> None:
    """Found by simulation, seed 802295."""
    info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=0, world_size=1, step=1, n=0, may_be_taken_over=True)

    async def main() -> list[Attempt]:
        store, end, loop = MemoryStore(), asyncio.Event(), asyncio.get_running_loop()
        first, late = (
            Attempt(WriterState(store=store, commit=CommitConfig(timeout_s=DEADLINE_S)), of, deadline=DEADLINE_S)
            for of in (info, replace(info, takeover=1))
        )
        coordinate, come_too_late = late._coordinate, late._come_too_late

        async def look_slowly() -> Outcome | None:
            found = await coordinate()
            await end.wait()
            return found

        async def comes_too_late(error: DecidedBefore) -> None:
            await come_too_late(error)
            loop.call_later(1.0, end.set)

        late._coordinate, late._come_too_late = look_slowly, comes_too_late  # type: ignore[method-assign]

        async def staged(seconds: float, *gone: str) -> Shard:
            await asyncio.sleep(seconds)
            for name in gone:
                await store.delete(info.key(name))
            return make_shard(rank_arrays(0))

        # A collection removes the votes of what is decided.
        await asyncio.gather(first.run(staged(1.0)), late.run(staged(30.0, vote_name(0))))
        return [first, late]

    assert [saved.phase for saved in simloop.run(1, main())] == [Phase.COMMITTED] * 2


@pytest.mark.parametrize(("look_s", "removal_s"), [(5.0, 0.0), (0.0, 5.0)], ids=["in its look", "while it tidies up"])
def test_announce_1_a_writer_that_comes_too_late_puts_no_outcome_although_the_deadline_passes(
    look_s: float, removal_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt was removed and forgotten, so nothing tells what became of it."""
    deadline_s = 31.0
    info = AttemptInfo(
        tag="global_step1", attempt=AttemptId(1, 0), rank=0, world_size=1, step=1, n=0, takeover=1, may_be_taken_over=True
    )

    async def main() -> tuple[Attempt, list[str]]:
        store, loop = MemoryStore(), asyncio.get_running_loop()
        late = Attempt(WriterState(store=store, commit=CommitConfig(timeout_s=deadline_s)), info, deadline=deadline_s)
        coordinate, come_too_late = late._coordinate, late._come_too_late

        async def look_slowly() -> Outcome | None:
            found = await coordinate()
            await asyncio.sleep(0.0 if loop.time() < deadline_s - 0.5 else look_s)
            return found

        async def drop_slowly(store: Store, info: AttemptInfo) -> None:
            await asyncio.sleep(removal_s)
            await drop_shard(store, info)

        async def comes_too_late(error: DecidedBefore) -> None:
            await asyncio.sleep(deadline_s - 0.1 - loop.time())
            await come_too_late(error)

        late._coordinate, late._come_too_late = look_slowly, comes_too_late  # type: ignore[method-assign]

        monkeypatch.setattr(attempt, "drop_shard", drop_slowly)

        async def staged() -> Shard:
            await asyncio.sleep(deadline_s - 0.5)
            await note(store, record_of("forgotten", info.tag, str(info.attempt)))
            return make_shard(rank_arrays(0))

        await late.run(staged())
        return late, [entry.name for entry in await store.list(info.prefix)]

    late, left = simloop.run(1, main())
    assert (late.phase, left) == (Phase.FAILED, [])
    assert str(late.error) == f"{info.prefix} failed: {info.prefix} was decided before this writer voted"
