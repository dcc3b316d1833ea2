"""The log of a root over any store: what it costs, callers that meet, compaction, and roots that are replaced."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpointd.commit.log_access import STATE_EVERY, STATES_KEPT
from checkpointd.errors import CheckpointdError, RootGoneError, StoreError, UnreadableError
from checkpointd.layout.keys import LOG, LOG_ROOT
from checkpointd.layout.log_records import LogState, Record, entry_key, state_key
from checkpointd.pipeline.root import log as root_log
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import OwnId, made_id
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from tests.logs import (
    STORES,
    Counting,
    add_entry,
    announce,
    commit,
    made,
    name,
    names_in,
    objects_of,
    run_on,
)

# --- reading and appending ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A job that has begun at the root `own`."""

    own: OwnId

    async def check(self) -> bool:
        await self.own.check()
        return True


# --- costs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_what_a_look_and_an_append_cost(kind: str, tmp_path: Path) -> None:
    """Wherever the log stands: also just before, at, and just after an entry that a state follows."""

    async def main(real: Store) -> None:
        store = Counting(real)
        await made_id(store)
        own = OwnId(store)
        await own.check()
        log, job = RootLog(store), Job(own)
        log.belongs_to(job.check)
        check = {"identity": 1} if kind == "posix" else {"get": 1}
        for at in range(1, 132):
            store.taken()
            await add_entry(log, at)
            # The first one does not know whether the log is empty.
            times = 2 if at == 1 else 1
            assert store.taken() == {"put": 1, "list": times, next(iter(check)): times}
            await log.compact()
            if at not in {1, 63, 64, 65, 127, 128, 129, 131}:
                continue
            store.taken()
            await log.look(settles=True)
            assert store.taken() == {"list": 1, **check}
            assert not await log.follow(lambda _: False)
            assert store.taken() == {"get": 1}
            await RootLog(store).look()
            state = at // 64 * 64
            id_of = [LOG_ROOT] * (2 if kind == "posix" else 1)  # on a disk, its inode is looked at, too
            asked = [*id_of, "log", *(entry_key(one) for one in range(max(state, 1), at + 1))]
            assert store.keys == [*asked, state_key(state) if state else "log"]

    run_on(kind, tmp_path, main)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("behind", [1, 5, 200])
def test_an_append_of_a_process_that_is_behind(kind: str, behind: int, tmp_path: Path) -> None:
    """However far: the put that fails, what has taken the number, the rest at once, one sync of it, and then as ever."""

    async def main(real: Store) -> None:
        store = Counting(real)
        await made(store, 3)
        log, other = RootLog(store), RootLog(store)
        await log.look(settles=True)
        for number in range(50, 50 + behind):
            await other.add(announce(number))
            await other.compact()
        store.taken()
        assert await log.add(announce(999)) == ""
        calls = store.calls
        assert (calls["put"], calls["settle"], calls["list"]) == (2, int(real.capabilities.can_lose), 2)
        assert calls["get"] <= max(behind, STATE_EVERY)

    run_on(kind, tmp_path, main)


@pytest.mark.parametrize("how", ["slept", "made again", "another root"])
async def test_a_follower_finds_a_log_that_goes_on_elsewhere(how: str) -> None:
    """The next entry will never come: it was removed since a state covers it, or has another number."""
    store = MemoryStore()
    states = await made(store, 10)
    log = RootLog(store)
    await log.look()
    writer = RootLog(store)
    if how == "slept":
        await made_on(store, 350)
        await writer.look()
    elif how == "made again":
        await store.put(entry_key(11), b"x")
        await writer.rebuild(nothing)
        await store.delete(entry_key(11))
    else:
        await put_all(store, {})
        await made(store, 4)
        await writer.look()
    await writer.add(announce(999))
    follows = 1
    while not await log.follow(lambda state: name(999) in state.attempts):
        follows += 1
    assert follows == root_log.FOLLOWS_IN_VAIN
    assert log.state == writer.state
    assert states[10].number == 10


async def nothing(_: LogState) -> list[Record]:
    return []


async def test_what_was_read_before_the_storage_failed_is_not_read_again() -> None:
    store = Held(MemoryStore())
    store.goes.set()
    states = await made(store, 60)
    log = RootLog(store)
    await log.goes_on_from(states[2])
    assert not await log.follow(lambda state: state.number > 60)
    log = RootLog(store)
    await log.goes_on_from(states[2])
    store.failures = {"list": UnreadableError("the disk failed")}
    with pytest.raises(UnreadableError):
        await log.follow(lambda state: state.number > 50)
    assert log.state == states[51]


# --- callers that meet ----------------------------------------------------------------------------------------------


class Held(PassingStore):
    """Calls for entries wait until `goes` is set; the next ones of these kinds fail."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.goes, self.is_waiting = asyncio.Event(), asyncio.Event()
        self.failures: dict[str, CheckpointdError] = {}
        self.listed: list[str] | None = None

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.is_waiting.set()
        await self.goes.wait()
        self._fail("put")
        done = await super().put_if_absent(key, data, durable=durable)
        self._fail("reply")
        return done

    async def list(self, prefix: str) -> list[Entry]:
        self._fail("list")
        found = await super().list(prefix)
        return found if self.listed is None else [one for one in found if one.name in self.listed]

    async def delete_each(self, keys: Sequence[str]) -> None:
        half = keys[: len(keys) // 2] if "delete" in self.failures else keys
        await super().delete_each(half)
        self._fail("delete")

    def _fail(self, kind: str) -> None:
        if kind in self.failures:
            raise self.failures.pop(kind)


async def held_log() -> tuple[Held, RootLog]:
    memory = MemoryStore()
    await made(memory, 3)
    store = Held(memory)
    log = RootLog(store)
    await log.look()
    return store, log


async def test_callers_that_meet_are_served_by_one_entry_and_a_refused_one_stops_nobody() -> None:
    store, log = await held_log()
    first = asyncio.ensure_future(log.add(announce(50)))
    await store.is_waiting.wait()
    calls = [log.add(announce(51)), log.add(commit(99)), log.add(announce(52), commit(52)), log.add(announce(52))]
    others = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    store.goes.set()
    assert await first == ""
    one, refused, *rest = await asyncio.gather(*others)
    assert (one, *rest) == ("", "", "")
    assert refused.startswith(name(99))
    assert log.state.number == 5
    assert {name(50), name(51), name(52)} <= set(log.state.attempts)


@pytest.mark.parametrize("leads", [True, False])
async def test_a_caller_that_is_cancelled_leaves_the_rest_alone(leads: bool) -> None:
    store, log = await held_log()
    calls = [asyncio.ensure_future(log.add(announce(50)))]
    await store.is_waiting.wait()
    calls += [asyncio.ensure_future(log.add(announce(number))) for number in (51, 52)]
    await asyncio.sleep(0)
    cancelled = calls.pop(0 if leads else 1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    store.goes.set()
    assert await asyncio.gather(*calls) == ["", ""]
    assert {name(52), name(51 if leads else 50)} <= set(log.state.attempts)
    assert name(50 if leads else 51) not in log.state.attempts


@pytest.mark.parametrize("kind", ["put", "reply", "list"])
async def test_a_store_that_fails_raises_for_the_caller_and_the_next_call_works(kind: str) -> None:
    store, log = await held_log()
    store.goes.set()
    store.failures = {kind: StoreError("the disk failed") if kind != "list" else UnreadableError("the disk failed")}
    if kind == "list":
        with pytest.raises(UnreadableError, match="the disk failed"):
            await log.add(announce(50))
    assert await log.add(announce(50)) == ""  # one failure of a put is tried again at once, whatever it did
    assert await log.add(announce(51)) == ""
    assert (log.state.number, (await RootLog(store).look()).number) == (5, 5)


async def test_a_put_that_fails_again_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    store, log = await held_log()

    async def refused(*_: object, **__: object) -> bool:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "put_if_absent", refused)
        store.goes.set()
        with pytest.raises(StoreError, match="the disk is full"):
            await log.add(announce(50))
    assert await log.add(announce(50)) == ""
    assert log.state.number == 4


# --- compaction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "entries"), [(0, 4 * STATE_EVERY + 3), (4, STATE_EVERY - 4)])
async def test_a_look_that_a_compaction_overtakes_reads_on_from_the_newest_state(known: int, entries: int) -> None:
    """What it has listed, a state or entries, is removed before it is read."""
    store = Held(MemoryStore())
    store.goes.set()
    writer, log = RootLog(store), RootLog(store)
    for at in range(1, entries + 1):
        await add_entry(writer, at)
        await writer.compact()
        if at == known:
            await log.look()
    listed, looks = store.list, 0

    async def overtaken(prefix: str) -> list[Entry]:
        nonlocal looks
        found, looks = await listed(prefix), looks + 1
        if looks == 1:
            store.list = listed  # type: ignore[method-assign]
            for at in range(writer.state.number + 1, 9 * STATE_EVERY):
                await add_entry(writer, at)
                await writer.compact()
        return found

    store.list = overtaken  # type: ignore[method-assign]
    assert (await log.look(), log.fault) == (writer.state, "")


async def test_deletes_that_fail_half_way_are_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    store = Held(MemoryStore())
    store.goes.set()
    log, other = RootLog(store), RootLog(store)
    for at in range(1, 1 + 8 * STATE_EVERY):
        await add_entry(log, at)
        if at % (2 * STATE_EVERY) == 0:
            store.failures = {"delete": StoreError("the disk failed")}
        await other.look()
        await asyncio.gather(log.compact(), other.compact())
        store.failures.clear()
    assert "a later save tries again" in caplog.text
    assert len(await names_in(store, ".state")) <= STATES_KEPT + 1
    assert len(await names_in(store, ".json")) <= (STATES_KEPT + 1) * STATE_EVERY
    await other.look()
    assert other.state == await RootLog(store).look() == log.state


# --- roots that are replaced ----------------------------------------------------------------------------------------


async def put_all(store: Store, objects: dict[str, bytes]) -> None:
    for key in await objects_of(store):
        await store.delete(key)
    for key, data in objects.items():
        await store.put(key, data)


@pytest.mark.parametrize("known", [3, 70, 200])
@pytest.mark.parametrize("new", [0, 1, 2, 71, 300])
async def test_a_look_reads_the_log_of_another_root_in_its_place(
    known: int, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = MemoryStore(), MemoryStore()
    await made(store, known)
    log = RootLog(store)
    await log.look()
    states = await made(other, new)
    await put_all(store, await objects_of(other))
    assert await log.look() == states[-1]
    assert log.fault == ""
    if new < STATE_EVERY:  # else a state covers the numbers that are known
        assert ("another root lies at" if new else "is not there any more") in caplog.text


@pytest.mark.parametrize("older", [1, 4, 64, 100, 129])
async def test_an_older_copy_of_the_log_is_read_and_it_is_said(older: int) -> None:
    store, copy = MemoryStore(), MemoryStore()
    states = await made(store, older)
    await put_all(copy, await objects_of(store))
    await made_on(store, 130)
    log = RootLog(store)
    await log.look()
    await put_all(store, await objects_of(copy))
    assert await log.look() == states[-1]
    assert log.fault.startswith(f"{entry_key(130)} was there, and is not any more: somebody has removed the newest entries")
    assert await log.look() == states[-1]
    assert log.fault == ""


async def made_on(store: Store, entries: int) -> None:
    log = RootLog(store)
    for at in range((await log.look()).number + 1, entries + 1):
        await add_entry(log, at)
        await log.compact()


@pytest.mark.parametrize("missed", [1, 3])
async def test_an_old_list_takes_nothing_back(missed: int) -> None:
    """As a file server may give it, whose other calls show what is new."""
    memory = MemoryStore()
    states = await made(memory, 10)
    store = Held(memory)
    log = RootLog(store)
    store.listed = [f"{number:012d}.json" for number in range(1, 11 - missed)]
    await log.goes_on_from(states[9])
    await log.follow(lambda _: False)
    assert (await log.look(), log.fault) == (states[10], "")


@pytest.mark.parametrize("replaced", ["removed", "made anew", "a copy", "an older copy"])
async def test_log_12_nothing_is_appended_to_another_root(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpointd.pipeline.root_id.ABSENCE_S", 0.01)
    root, aside = tmp_path / "root", tmp_path / "aside"
    async with PosixStore(root) as store:
        await made_id(store)
        own = OwnId(store)
        await own.check()
        await made(store, 4)
        shutil.copytree(root, tmp_path / "older")
        await made_on(store, 6)
        log, job = RootLog(store), Job(own)
        log.belongs_to(job.check)
        await log.look()
        root.rename(aside)
        if replaced == "made anew":
            async with PosixStore(root) as anew:
                await made_id(anew)
                await made(anew, 9)
        elif replaced == "a copy":
            shutil.copytree(aside, root)
            await made_on(PosixStore(root), 8)
        elif replaced == "an older copy":
            (tmp_path / "older").rename(root)
        before = {path: path.stat().st_size for path in root.rglob("*.*")}
        for _ in range(2):
            with pytest.raises(RootGoneError, match="no longer the directory in which this job began"):
                await log.add(announce(50))
            with pytest.raises(RootGoneError):
                await log.look()
        assert {path: path.stat().st_size for path in root.rglob("*.*")} == before
        if root.exists():
            shutil.rmtree(root)
        aside.rename(root)
        await log.look()
        assert await log.add(announce(50)) == ""
        assert log.state.number == 7


async def test_what_a_large_state_costs_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded and decoded on a thread."""
    threads = list[bool]()
    decode = root_log.decode_state

    def decoding(data: bytes, number: int) -> object:
        threads.append(asyncio._get_running_loop() is None)
        return decode(data, number)

    monkeypatch.setattr(root_log, "LARGE_STATE", 1000)
    monkeypatch.setattr(root_log, "decode_state", decoding)
    store = MemoryStore()
    states = await made(store, STATE_EVERY)
    assert await RootLog(store).look() == states[-1]
    assert threads == [True]
    assert await names_in(store, ".state") == [state_key(STATE_EVERY).removeprefix(f"{LOG}/")]
