"""The log of a root beside other processes: LOG-12 of root_id.py, and what a process knows that has not looked for long."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from checkpointd.commit.log_access import STATE_EVERY, STATES_KEPT
from checkpointd.errors import RootGoneError
from checkpointd.layout.keys import LOG
from checkpointd.layout.log_records import AbortRecord, AnnounceRecord, LogState, RemoveRecord
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline import root_id
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.gc.collect import sweep
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import log as root_logs
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import save_checkpoint

FIRST = "global_step1/00000001-0"


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_id, "ABSENCE_S", 0.01)


def beside(store: MemoryStore) -> MemoryStore:
    """The same objects, as another process sees them."""
    other = MemoryStore()
    other.__dict__.update({name: value for name, value in store.__dict__.items() if name != "_root_log"})
    return other


def announce(n: int) -> AnnounceRecord:
    return AnnounceRecord(attempt=f"t{n}/00000001-0", n=n, step=n)


def abort(n: int) -> AbortRecord:
    error = ErrorReport(code="AbortedError", message="no")
    return AbortRecord(attempt=f"t{n}/00000001-0", error=error, decided_by=0, writer=writer())


def is_decided(state: LogState) -> bool:
    return "t0/00000001-0" in state.attempts and state.attempts["t0/00000001-0"].status == "aborted"


async def test_who_follows_and_has_fallen_behind_what_is_removed_reads_the_newest_state() -> None:
    store = MemoryStore()
    await starts.take(store, 2)
    log, follower = RootLog.of(store), RootLog.of(beside(store))
    await follower.look()
    assert await log.add(announce(0)) == ""
    assert not await follower.follow(is_decided)
    assert await log.add(abort(0)) == ""
    for n in range(1, STATE_EVERY * (STATES_KEPT + 1)):
        assert await log.add(announce(n)) == ""
        await log.compact()
    assert min(entry.name for entry in await store.list(LOG)) > "000000000003"
    looks = 1
    while not await follower.follow(is_decided):
        looks += 1
    assert 1 < looks <= root_logs.FOLLOWS_IN_VAIN
    assert follower.state.number == log.state.number


async def test_a_list_that_lags_behind_does_not_take_back_what_was_read() -> None:
    class Lagging(MemoryStore):
        lags = False

        async def list(self, prefix: str) -> list[Entry]:
            found = await super().list(prefix)
            return [entry for entry in found if "000000000003" not in entry.name] if self.lags else found

    store = Lagging()
    await starts.take(store, 2)
    log = RootLog.of(store)
    for n in range(2):
        assert await log.add(announce(n)) == ""
    store.lags = True
    assert (await log.look()).number == 3
    await store.delete(f"{LOG}/000000000003.json")  # somebody has cut the log
    assert (await log.look()).number == 2


async def test_the_log_of_a_store_is_one_and_goes_with_the_store() -> None:
    store = MemoryStore()
    assert RootLog.of(store) is RootLog.of(store) is RootLog.of(RootLog.of(store).store)
    assert RootLog.of(beside(store)) is not RootLog.of(store)


async def test_attempts_of_one_process_append_together() -> None:
    class Slow(MemoryStore):
        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            await asyncio.sleep(0)
            return await super().put_if_absent(key, data, durable=durable)

    store = Slow()
    await starts.take(store, 2)
    log = RootLog.of(store)
    before = log.state.number
    assert await asyncio.gather(*(log.add(announce(n)) for n in range(20))) == [""] * 20
    assert log.state.number <= before + 2
    assert await asyncio.gather(log.add(abort(0)), log.add(announce(0)), log.add(abort(1))) == ["", "", ""]


@pytest.mark.parametrize("by", ["a copy", "another root"])
async def test_log_12_a_command_that_has_read_one_root_appends_nothing_to_another_one_in_its_place(
    tmp_path: Path, by: str
) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    async with PosixStore(root) as job:
        for n in range(2):
            await save_checkpoint(job, tag=f"global_step{n + 1}", n=n, world_size=1)
    async with PosixStore(root) as store:
        await root_view.state_of(store)
        root.rename(away)
        if by == "a copy":
            shutil.copytree(away, root)
        else:
            async with PosixStore(root) as made:
                for n in range(2):
                    await save_checkpoint(made, tag=f"global_step{n + 1}", n=n, world_size=1)
        removal = RemoveRecord(attempts=(FIRST,), reason="the test", writer=writer())
        with pytest.raises(RootGoneError):
            await RootLog.of(store).add(removal)
        assert (await root_view.state_of(store)).attempts[FIRST].status == "checkpoint"  # as it begins anew there
        assert await RootLog.of(store).add(removal) == ""
    async with PosixStore(away) as left:
        assert (await root_view.state_of(left)).attempts[FIRST].status == "checkpoint"


async def test_log_12_a_job_reads_and_appends_nothing_at_another_root(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    async with PosixStore(root) as store:
        start = await starts.take(store, 1)
        await save_checkpoint(store, tag="global_step1", world_size=1)
        state = WriterState(store=store)
        await state.own_root.begun(start.start, start.nonce)
        root.rename(away)
        async with PosixStore(root) as made:
            await starts.take(made, 1)
            await save_checkpoint(made, tag="global_step1", world_size=1)
            removal = RemoveRecord(attempts=(FIRST,), reason="the test", writer=writer())
            assert await RootLog.of(made).add(removal) == ""
            for work in (sweep(store), root_view.state_of(store), state.log.add(announce(7))):
                with pytest.raises(RootGoneError):
                    await work
            assert await made.list(FIRST)
        shutil.rmtree(root)
        away.rename(root)
        assert (await root_view.state_of(store)).attempts[FIRST].status == "checkpoint"
        assert await state.log.add(announce(7)) == ""
