"""Attempts that outlive their trainer in a daemon, in virtual time: who waits for them, who decides them, and what follows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.errors import DamagedError, RootGoneError, StoreError, UnreadableError
from checkpointd.layout.keys import AttemptId, attempt_lease_key, file_name
from checkpointd.layout.log_records import CommitRecord
from checkpointd.pipeline.gc.collect import remove
from checkpointd.pipeline.gc.retire import retire
from checkpointd.pipeline.outcome import outlived as outlived_module
from checkpointd.pipeline.outcome.outlived import outlived
from checkpointd.pipeline.outcome.publish import Draft
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from tests.builders import attempts_at, leave_in_doubt, save_checkpoint
from tests.lease_builders import LENGTH_S, PREFIX, now, put_lease, renew_on, sight, simulated


async def status(store: Store) -> str:
    """What has become of the attempt."""
    return (await root_view.state_of(store)).attempts[PREFIX].status


def test_outlived_1_a_surviving_attempt_is_waited_for_and_decided_once_nobody_works_at_it() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0, 1))
        renewing = asyncio.get_running_loop().create_task(renew_on(store, attempt_lease_key(PREFIX)))
        await asyncio.sleep(1.0)
        assert await outlived(store, [PREFIX], 5.0, sight("a")) == (PREFIX,)
        assert await status(store) == "undecided"
        renewing.cancel()
        await put_lease(store, attempt_lease_key(PREFIX), 5000)
        assert await outlived(store, [PREFIX], 600.0, sight("a", "ended")) == ()
        assert (await root_view.find(store, "global_step1")).commit.decided_by == -1
        assert await store.get("latest") == b"global_step1\n"

    simulated(work)


def test_what_cannot_be_looked_at_for_a_moment_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store, failures = MemoryStore(), 3
        await leave_in_doubt(store, voting=(0, 1))
        get = store.get

        async def failing(key: str, **options: Any) -> bytes:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise UnreadableError("Stale file handle")
            return await get(key, **options)

        monkeypatch.setattr(store, "get", failing)
        assert await outlived(store, [PREFIX], 600.0, sight("a")) == ()
        assert await status(store) == "checkpoint"
        await leave_in_doubt(store, tag="global_step2")
        failures = 1 << 30
        assert await outlived(store, ["global_step2/00000001-0"], 5.0, sight("a")) == ("global_step2/00000001-0",)

    simulated(work)


def test_a_surviving_attempt_whose_other_votes_do_not_come_is_not_waited_for_until_the_end() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        renewing = asyncio.get_running_loop().create_task(renew_on(store, attempt_lease_key(PREFIX)))
        await asyncio.sleep(1.0)
        began = now()
        assert await outlived(store, [PREFIX], 600.0, sight("a")) == (PREFIX,)
        assert now() - began < 20
        renewing.cancel()

    simulated(work)


def test_outlived_1_what_a_process_of_this_machine_works_at_is_not_decided_although_its_lease_is_old() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        await put_lease(store, attempt_lease_key(PREFIX))
        assert await outlived(store, [PREFIX], 100.0, sight("a", "running"), hurried=False) == (PREFIX,)
        assert await status(store) == "undecided"
        # It may be left over from before an outage.
        assert await outlived(store, [PREFIX], 200.0, sight("a", "running"), hurried=False) == ()

    simulated(work)


def test_outlived_1_who_has_time_waits_for_a_lease_that_is_not_there_yet() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        deciding = asyncio.create_task(outlived(store, [PREFIX], 2 * LENGTH_S, sight("a"), hurried=False))
        await asyncio.sleep(LENGTH_S / 2)
        renewing = asyncio.create_task(renew_on(store, attempt_lease_key(PREFIX)))
        assert await deciding == (PREFIX,)
        assert await status(store) == "undecided"
        renewing.cancel()

    simulated(work)


def test_outlived_1_an_attempt_that_others_still_write_is_not_decided_although_its_coordinator_is_gone() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        await put_lease(store, attempt_lease_key(PREFIX))

        async def write() -> None:
            for number in range(8):
                await asyncio.sleep(LENGTH_S / 2)
                await store.put(f"{PREFIX}/{file_name(1, number)}", b"chunks")

        writing = asyncio.create_task(write())
        assert await outlived(store, [PREFIX], 4 * LENGTH_S, sight("a"), hurried=False) == (PREFIX,)
        await writing
        assert await outlived(store, [PREFIX], 4 * LENGTH_S, sight("a"), hurried=False) == ()

    simulated(work)


@pytest.mark.parametrize("failing", ["latest", "showing"])
@pytest.mark.parametrize("hurried", [True, False])
def test_outlived_3_who_has_time_tries_latest_and_the_files_until_they_work_and_no_load_waits_for_them(
    hurried: bool, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load shows the files itself, and the next commit moves `latest`."""
    shown: list[str] = []

    async def work() -> None:
        store, failures = MemoryStore(), 3

        def fails(what: str) -> bool:
            nonlocal failures
            failures -= failing == what
            return failing == what and failures >= 0

        async def show(_: object, commit: CommitRecord) -> None:
            if fails("showing"):
                raise StoreError("another program has saved there")
            shown.append(commit.tag)

        put = store.put_if_match

        async def put_if_match(key: str, expected: bytes | None, data: bytes) -> bool:
            if key == "latest" and fails("latest"):
                raise StoreError("the lock is held")
            return await put(key, expected, data)

        monkeypatch.setattr(outlived_module, "show", show)
        monkeypatch.setattr(store, "put_if_match", put_if_match)
        await leave_in_doubt(store, voting=(0, 1))
        began = now()
        assert await outlived(store, [PREFIX], 100.0, sight("a", "ended"), hurried=hurried) == ()
        assert now() - began < (1 if hurried else 60)
        assert (await root_view.find(store, "global_step1")).prefix == PREFIX
        pointed = await store.stat("latest") is not None
        assert (pointed, bool(shown)) == ((not hurried or failing == "showing"), not hurried)

    simulated(work)


@pytest.mark.parametrize("removed_by", ["retention", "a user"])
def test_outlived_2_latest_never_ends_at_a_checkpoint_that_was_removed_meanwhile(removed_by: str) -> None:
    """The lock of `latest` is held while the attempt is decided, and the checkpoint goes before the lock is free."""

    async def work() -> None:
        store, free = MemoryStore(), asyncio.Event()
        put = store.put_if_match

        async def once_free(key: str, expected: bytes | None, data: bytes) -> bool:
            if key == "latest":
                await free.wait()
            return await put(key, expected, data)

        await save_checkpoint(store, tag="global_step0", start=1, n=0)
        await leave_in_doubt(store)
        store.put_if_match = once_free  # type: ignore[method-assign]
        waiting = asyncio.create_task(outlived(store, [PREFIX], 150.0, sight("a", "ended"), hurried=False))
        await asyncio.sleep(LENGTH_S + 5)
        assert (await root_view.find(store, "global_step1")).prefix == PREFIX
        if removed_by == "retention":
            await starts.take(store, 2)
            await save_checkpoint(store, tag="global_step2", start=2)
            await retire(store, await attempts_at(store), Retention(keep_last=1))
        else:
            assert await remove(store, {"the test": [PREFIX]}) == ""
        assert await root_view.latest(store) == "global_step0"
        free.set()
        assert await waiting == ()
        assert await root_view.latest(store) == ("global_step2" if removed_by == "retention" else "global_step0")

    simulated(work)


def test_outlived_2_a_commit_whose_put_failed_and_is_there_all_the_same_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can it be read at once what has become of the put."""
    shown: list[str] = []

    async def work() -> None:
        store, is_away = MemoryStore(), False
        put, get = store.put_if_absent, store.get

        async def unsure(key: str, data: bytes, *, durable: bool = True) -> bool:
            nonlocal is_away
            won = await put(key, data, durable=durable)
            if b'"kind": "commit"' in data:
                is_away = True
                raise StoreError("the directory could not be synced")
            return won

        async def away_once(key: str, **options: Any) -> bytes:
            nonlocal is_away
            if is_away:
                is_away = False
                raise UnreadableError("Stale file handle")
            return await get(key, **options)

        async def show(_: object, commit: CommitRecord) -> None:
            shown.append(commit.tag)

        monkeypatch.setattr(store, "put_if_absent", unsure)
        monkeypatch.setattr(store, "get", away_once)
        monkeypatch.setattr(outlived_module, "show", show)
        await leave_in_doubt(store)
        assert await outlived(store, [PREFIX], 60.0, sight("a", "ended")) == ()
        assert await root_view.latest(store) == "global_step1"

    simulated(work)
    assert shown == ["global_step1"]


def test_outlived_1_an_outage_says_nothing_of_those_who_could_not_write_either() -> None:
    """The lease comes only after the outage, as its first put failed in it."""

    async def work() -> None:
        store, back = MemoryStore(), asyncio.Event()
        back.set()
        await leave_in_doubt(store, voting=(0,))
        listed = store.list

        async def once_back(prefix: str) -> list[Entry]:
            await back.wait()
            return await listed(prefix)

        store.list = once_back  # type: ignore[method-assign]
        deciding = asyncio.create_task(outlived(store, [PREFIX], 5 * LENGTH_S, sight("a"), hurried=False))
        await asyncio.sleep(2)
        back.clear()
        await asyncio.sleep(2 * LENGTH_S)
        back.set()
        await asyncio.sleep(3)
        renewing = asyncio.create_task(renew_on(store, attempt_lease_key(PREFIX)))
        assert await deciding == (PREFIX,)
        assert await status(store) == "undecided"
        renewing.cancel()

    simulated(work)


def test_an_attempt_that_cannot_be_decided_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store, other = MemoryStore(), "global_step2/00000001-0"
        await leave_in_doubt(store)
        await leave_in_doubt(store, tag="global_step2")
        await put_lease(store, attempt_lease_key(other))
        judge = outlived_module.judge

        async def damaged(asked: Store, tag: str, attempt: AttemptId) -> Draft:
            if tag == "global_step1":
                raise DamagedError("its index was damaged meanwhile")
            return await judge(asked, tag, attempt)

        monkeypatch.setattr(outlived_module, "judge", damaged)
        assert await outlived(store, [PREFIX, other], 5 * LENGTH_S, sight("a"), hurried=False) == (PREFIX,)
        assert await root_view.latest(store) == "global_step2"

    simulated(work)


def test_outlived_1_nothing_is_decided_at_a_root_that_is_another_one() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        before = await store.list("log")

        async def check() -> None:
            raise RootGoneError("another directory lies there")

        assert await outlived(store, [PREFIX], 2 * LENGTH_S, sight("a"), hurried=False, check=check) == (PREFIX,)
        assert await store.list("log") == before
        assert await status(store) == "undecided"

    simulated(work)


def test_outlived_1_a_commit_that_cannot_be_put_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store, tries = MemoryStore(), 0
        await leave_in_doubt(store, voting=(0, 1))
        put = store.put_if_absent

        async def failing(key: str, data: bytes, *, durable: bool = True) -> bool:
            nonlocal tries
            if b'"kind": "commit"' in data:
                tries += 1
                raise StoreError("the disk is full")
            return await put(key, data, durable=durable)

        monkeypatch.setattr(store, "put_if_absent", failing)
        assert await outlived(store, [PREFIX], 60.0, sight("a")) == (PREFIX,)
        assert 0 < tries < 30  # each try of `outlived` puts twice

    simulated(work)
