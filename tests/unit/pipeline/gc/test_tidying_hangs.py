"""TIDY-1 and TIDY-4 of tidying.py where the storage fails, hangs or takes long: that costs space, and no save."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter

import msgspec
import pytest

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.layout.keys import AttemptId, attempt_prefix
from checkpointd.layout.log_records import AbortRecord, AnnounceRecord, LoggedAttempt
from checkpointd.layout.manifest import NO_REASON
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.gc import retire as retirement
from checkpointd.pipeline.gc import room
from checkpointd.pipeline.gc.room import RoomUse
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import CheckpointVerdict
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.leases import ANSWER_S
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import SMALL_BYTES_MAX, Entry
from checkpointd.store.memory import MemoryStore
from tests.lease_builders import SINCE
from tests.saving_jobs import PERSIST, TIMEOUT_S, Disk, Job, run


@pytest.fixture(autouse=True)
def every_save_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SMALL_BYTES", 0)


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


class Away(Disk):
    """No call returns while it `is_away`."""

    is_away = False

    async def list(self, prefix: str) -> list[Entry]:
        if self.is_away:
            await asyncio.Event().wait()
        return await super().list(prefix)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        if self.is_away:
            await asyncio.Event().wait()
        return await super().get(key, size_max=size_max)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_full", [True, False])
def test_tidy_4_a_storage_that_does_not_answer_costs_space_and_no_save_and_closing_does_not_wait_for_it(
    rank: int, is_full: bool
) -> None:
    async def main(rng: random.Random) -> None:
        loop, disk = asyncio.get_running_loop(), Away(rng)
        start = (await starts.take(disk, 2)).start
        infos = [AttemptInfo(tag=f"t{n}", attempt=AttemptId(start, 0), rank=rank, world_size=2, step=n, n=n) for n in range(6)]
        state = WriterState(
            store=disk, persist=PERSIST, commit=CommitConfig(timeout_s=TIMEOUT_S, retention=Retention(keep_last=1))
        )
        tidier = state.tidier
        if is_full:
            await tidier.room_for(infos[0], loop.time() + TIMEOUT_S, 1 << 30)
            aborted = [AttemptId(start, n) for n in range(1, 4)]
            for n, attempt in enumerate(aborted):
                prefix = attempt_prefix("aborted", attempt)
                announced = AnnounceRecord(attempt=prefix, n=100 + n, step=0)
                abort = AbortRecord(attempt=prefix, error=NO_REASON, decided_by=0, writer=SINCE)
                assert await state.log.add(announced, abort) == ""
        disk.is_away = True
        for info in infos[1:2] if not is_full else infos[1:]:
            began = loop.time()
            tidier.expect(info)
            await tidier.room_for(info, began + TIMEOUT_S, 1 << 30)
            assert loop.time() - began == pytest.approx(TIMEOUT_S / 2 if is_full else 0, abs=1)
            tidier.ask(info)
        began = loop.time()
        await tidier.close()
        assert loop.time() - began <= ANSWER_S + 1

    run(0, main)


def test_tidy_4_a_proof_that_takes_longer_than_a_save_waits_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint is large, and saves come back to back, so that nothing is read in the background."""
    proofs = Counter[str]()

    async def slowly(store: MemoryStore, checkpoint: LoggedAttempt) -> CheckpointVerdict:
        proofs["begun"] += 1
        await asyncio.sleep(0.8 * TIMEOUT_S)
        proofs["ended"] += 1
        return await read_back(store, checkpoint)

    async def main(rng: random.Random) -> None:
        loop, disk = asyncio.get_running_loop(), Disk(rng)
        await Job(disk, rng, (await starts.take(disk, 1)).start).run(1)
        commit = CommitConfig(timeout_s=TIMEOUT_S, retention=Retention(keep_last=1))
        tidier = WriterState(store=disk, persist=PERSIST, commit=commit).tidier

        (newest,) = RootLog.of(disk).state.attempts.values()
        surplus = [msgspec.structs.replace(newest, prefix=f"older/00000001-{n}") for n in range(10)]
        monkeypatch.setattr(tidier, "_room_use", lambda: RoomUse(surplus=() if proofs["ended"] else surplus))
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
    monkeypatch.setattr(room, "SMALL_BYTES", 1 << 30)

    async def main(rng: random.Random) -> None:
        disk = Disk(rng)
        job = Job(disk, rng, (await starts.take(disk, 1)).start, rules=rules)
        tidier, looks, go_on = job.states[0].tidier, [0], asyncio.Event()
        remove = tidier._remove

        async def slow() -> None:
            looks[0] += 1
            await go_on.wait()
            await remove()

        monkeypatch.setattr(tidier, "_remove", slow)
        await job._rank(0, range(60), tag)
        assert job.phases() == {Phase.COMMITTED: 60}
        assert asyncio.get_running_loop().time() < TIMEOUT_S / 2
        assert looks[0] <= 1
        assert len(asyncio.all_tasks()) <= 2 + bool(tidier._removal) + 1  # this one, the reader, the removal, and its wait
        go_on.set()
        await tidier.rest()
        assert looks[0] <= 2
        assert not tidier._begun
        assert not tidier._nbytes
        assert not tidier._waiting
        kept = {None: 60 if rules.keeps_all else 3, "best": 2}[tag]
        assert len(disk.occupied) <= kept

    run(0, main)
