"""TIDY-1 and TIDY-4 of tidying.py where the storage fails, hangs or takes long: that costs space, and no save."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.errors import ClosedError, StoreError
from checkpointd.layout.keys import AttemptId, attempt_prefix, object_key, vote_name
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.gc import retire as retirement
from checkpointd.pipeline.gc import tidying
from checkpointd.pipeline.gc.retire import Retired
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import CheckpointVerdict
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.root_view import Checkpoint
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.waits import to_the_end
from tests.builders import save_checkpoint
from tests.saving_jobs import PERSIST, TIMEOUT_S, Disk, Job, run


@pytest.fixture(autouse=True)
def every_save_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "SMALL_BYTES", 0)


def test_tidy_4_a_storage_that_removes_nothing_costs_space_and_no_save(caplog: pytest.LogCaptureFixture) -> None:
    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        disk.fails = True
        job = Job(disk, rng, (await starts.take(disk, 1)).start, rules=Retention(keep_last=1))
        await job.run(6)
        assert job.phases() == {Phase.COMMITTED: 6}
        disk.fails = False
        await job.run(1, first=6)
        assert len(disk.occupied) <= 2

    with caplog.at_level(logging.WARNING, "checkpointd"):
        run(0, main)
    assert "could not be removed: I/O error" in caplog.text


def test_tidy_4_a_removal_that_does_not_end_costs_space_and_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where what is to stay has to be read back first, and is large."""

    async def endless(*_: object, **__: object) -> Retired:
        await asyncio.sleep(3 * TIMEOUT_S)
        raise StoreError("I/O error")

    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        job = Job(disk, rng, (await starts.take(disk, 1)).start, rules=Retention(keep_last=1))
        monkeypatch.setattr(tidying, "retire", endless)
        await job.run(2)
        assert job.phases() == {Phase.COMMITTED: 2}

    run(0, main)


@pytest.mark.parametrize("rank", [0, 1])
def test_tidy_4_a_storage_that_does_not_answer_a_look_costs_space_and_no_save_and_keeps_few_of_its_threads(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directories of one tag lie on a server that is away. A system call cannot be cancelled."""
    hanging = 0

    async def main(rng: random.Random) -> None:
        loop, disk = asyncio.get_running_loop(), Disk(rng)
        commit = CommitConfig(timeout_s=TIMEOUT_S, retention=Retention())
        tidier = WriterState(store=disk, persist=PERSIST, commit=commit).tidier
        look = "attempts_of" if rank == 0 else "read_vote"
        answered = getattr(root_view, look)

        async def hang(store: MemoryStore, what: str, *objects: Store) -> object:
            nonlocal hanging
            if not what.startswith("away"):
                return await answered(store, what, *objects)
            hanging += 1
            await to_the_end(asyncio.sleep(30 * TIMEOUT_S))
            raise StoreError("the server is back")

        monkeypatch.setattr(root_view, look, hang)

        async def saved(tag: str, n: int) -> float:
            info = AttemptInfo(tag=tag, attempt=AttemptId(1, n), rank=rank, world_size=2, step=n, n=n)
            began = loop.time()
            tidier.expect(info)
            await tidier.room_for(info, began + TIMEOUT_S, 1 << 30)
            waited_s = loop.time() - began
            if rank == 0:
                tidier.end(info)
            return waited_s

        await saved("away", 0)
        for n in range(1, 6):
            waits = [asyncio.create_task(saved(tag, n)) for tag in ("away", "here")]
            if rank != 0 and n == 1:
                await disk.put(object_key(attempt_prefix("here", AttemptId(1, n)), vote_name(0)), b"unreadable")
            away_s, here_s = await asyncio.gather(*waits)
            assert away_s <= TIMEOUT_S / 2 + 1
            assert here_s < 1 or n > 1
        began = loop.time()
        await tidier.close()
        assert loop.time() - began <= tidying.ANSWER_S + 1
        assert 0 < hanging <= tidying.LOOKS_MAX
        if rank == 0:
            with pytest.raises(ClosedError):
                await saved("later", 9)

    run(0, main)


def test_tidy_4_a_look_keeps_one_thread_of_a_storage_of_which_many_directories_do_not_answer() -> None:
    """As where the directories of some tags lie on a metadata server that is away. A file system has four threads for looks."""
    hanging: set[str] = set()

    class PartlyAway(Disk):
        is_away = False

        async def list(self, prefix: str) -> list[Entry]:
            if self.is_away and prefix.startswith("away"):
                hanging.add(prefix)
                await asyncio.sleep(30 * TIMEOUT_S)
            return await super().list(prefix)

    async def main(rng: random.Random) -> None:
        loop, disk = asyncio.get_running_loop(), PartlyAway(rng)
        for n in range(8):
            await save_checkpoint(disk, tag=f"away{n}", step=n, world_size=1)
        commit = CommitConfig(timeout_s=TIMEOUT_S, retention=Retention(keep_last=1))
        tidier = WriterState(store=disk, persist=PERSIST, commit=commit).tidier
        disk.is_away = True
        info = AttemptInfo(tag="here", attempt=AttemptId(2, 0), rank=0, world_size=1, step=9, n=0)
        tidier.expect(info)
        await tidier.room_for(info, loop.time() + TIMEOUT_S, 1 << 30)
        assert 0 < len(hanging) <= tidying.LOOKS_MAX
        await tidier.close()

    run(0, main)


def test_tidy_4_a_proof_that_takes_longer_than_a_save_waits_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint is large, and saves come back to back, so that nothing is read in the background."""
    proofs = Counter[str]()

    async def slowly(store: MemoryStore, checkpoint: Checkpoint) -> CheckpointVerdict:
        proofs["begun"] += 1
        await asyncio.sleep(0.8 * TIMEOUT_S)
        proofs["ended"] += 1
        return await read_back(store, checkpoint)

    async def main(rng: random.Random) -> None:
        loop, disk = asyncio.get_running_loop(), Disk(rng)
        await Job(disk, rng, (await starts.take(disk, 1)).start).run(1)
        commit = CommitConfig(timeout_s=TIMEOUT_S, retention=Retention(keep_last=1))
        tidier = WriterState(store=disk, persist=PERSIST, commit=commit).tidier

        async def looked(*_: object, **__: object) -> tidying._Left:
            left = tidying._Left(surplus=0 if proofs["ended"] else 10, nbytes=1 << 40)
            tidier._left[tidying.EVERYTHING] = left
            return left

        monkeypatch.setattr(tidier, "_remove", looked)
        monkeypatch.setattr(tidier, "_seen", looked)
        waits = []
        for n in range(6):
            info = AttemptInfo(tag=f"t{n}", attempt=AttemptId(1, n), rank=0, world_size=2, step=n, n=n)
            began = loop.time()
            tidier.expect(info)
            await tidier.room_for(info, began + TIMEOUT_S, 1 << 30)
            waits.append(loop.time() - began)
            tidier.end(info)
            tidier.ask(info)
            await asyncio.sleep(5)
        assert waits[0] == pytest.approx(TIMEOUT_S / 2, abs=1)
        assert max(waits[2:]) < 1
        assert (proofs["begun"], proofs["ended"]) == (1, 1)
        await tidier.close()

    monkeypatch.setattr(retirement, "read_back", slowly)
    run(0, main)


@pytest.mark.parametrize("tag", [None, "best"])
@pytest.mark.parametrize("rules", [Retention(), Retention(keep_last=2)])
def test_tidy_1_saves_end_while_a_removal_hangs_and_leave_nothing_behind(
    tag: str | None, rules: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 saves, each has ended for its caller, one removal runs, and one is due that serves all of them."""
    monkeypatch.setattr(tidying, "SMALL_BYTES", 1 << 30)

    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        job = Job(disk, rng, (await starts.take(disk, 1)).start, rules=rules)
        tidier, looks, go_on = job.states[0].tidier, [0], asyncio.Event()
        remove = tidier._remove

        async def slow(scope: str) -> bool:
            looks[0] += 1
            await go_on.wait()
            return await remove(scope)

        monkeypatch.setattr(tidier, "_remove", slow)
        await job._rank(0, range(60), tag)
        assert job.phases() == {Phase.COMMITTED: 60}
        assert asyncio.get_running_loop().time() < TIMEOUT_S / 2
        assert looks[0] <= 1
        assert len(asyncio.all_tasks()) <= 2 + bool(tidier._look) + 1  # this one, the reader, the removal, and its wait
        go_on.set()
        await tidier.rest()
        assert looks[0] <= 2
        assert not tidier._begun
        assert not tidier._nbytes
        assert not tidier._waiting
        assert tidier._left.keys() <= {tidying.EVERYTHING}
        kept = {None: 60 if rules.keeps_all else 3, "best": 2}[tag]
        assert len(disk.occupied) <= kept

    run(0, main)
