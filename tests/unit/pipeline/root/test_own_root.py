"""OWNROOT-1: whose root it is, told by its id, and by the directory where the store can tell one from another."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.errors import LinkError, NotFoundError, RootGoneError, StoreError, UnreadableError
from checkpointd.layout.keys import LOG_ROOT
from checkpointd.pipeline import root_id
from checkpointd.pipeline.root import own_root, starts
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.store.base import SMALL_BYTES_MAX, Entry
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import LOOKS_MIN
from checkpointd.store.posix.failures import store_error
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore
from tests.builders import plan_save


@pytest.fixture(autouse=True)
def absence_is_short_and_answers_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.01)
    monkeypatch.setattr(root_id, "ABSENCE_S", 0.01)
    monkeypatch.setattr(own_root, "ANSWER_S", 60.0)


async def begun(store: MemoryStore | PosixStore) -> OwnRoot:
    start = await starts.take(store, 1)
    root = OwnRoot(store)
    await root.begun(start.start, start.nonce)
    await root.check(1)
    return root


async def test_ownroot_1_another_jobs_root_in_its_place() -> None:
    store = MemoryStore()
    root = await begun(store)
    other = MemoryStore()
    await starts.take(other, 1)
    await store.put(LOG_ROOT, await other.get(LOG_ROOT))
    with pytest.raises(RootGoneError, match="another root lies there"):
        await root.check(1)
    await store.delete(LOG_ROOT)
    with pytest.raises(RootGoneError, match="log/root is not there"):
        await root.check(1)


class Lagging(MemoryStore):
    """The start's record is out of sight for the next `unseen` looks. Nothing can be read while there is an `error`."""

    unseen = 0
    error: StoreError | None = None
    hangs = False

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        if self.unseen > 0:
            self.unseen -= 1
            raise NotFoundError(key)
        return await super().get(key, size_max=size_max)

    async def list(self, prefix: str) -> list[Entry]:
        return [] if self.unseen > 0 else await super().list(prefix)


async def test_what_somebody_else_says_is_refused_where_the_store_shows_that_it_is_not_so() -> None:
    store = Lagging()
    start = await starts.take(store, 1)
    assert await OwnRoot(store).confirm(1, start.nonce) is None
    for number, nonce in ((1, "another"), (2, start.nonce)):
        with pytest.raises(RootGoneError):
            await OwnRoot(store).confirm(number, nonce)
    store.error = LinkError("a link")
    with pytest.raises(LinkError):
        await OwnRoot(store).confirm(1, start.nonce)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
async def test_an_error_that_may_pass_refuses_nothing_and_the_next_look_decides(number: int) -> None:
    store = Lagging()
    start = await starts.take(store, 1)
    store.error = store_error(OSError(number, os.strerror(number)), doing="reading", key="k", url="u", reads=True)
    root = OwnRoot(store)
    unseen = await root.confirm(1, start.nonce)
    assert errno.errorcode[number] in str(unseen)
    store.error = None
    await root.check(1)
    await store.delete(LOG_ROOT)
    with pytest.raises(RootGoneError):
        await root.check(1)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
async def test_a_permission_that_is_missing_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    async def closed(*_: object, **__: object) -> bytes:
        raise OSError(number, os.strerror(number))

    async with PosixStore(tmp_path / "root") as store:
        start = await starts.take(store, 1)
        monkeypatch.setattr(OsDisk, "read", closed)
        with pytest.raises(UnreadableError, match=errno.errorcode[number]):
            await OwnRoot(store).confirm(1, start.nonce)
        await OwnRoot(store).begun(1, start.nonce)


async def test_a_writer_that_was_not_told_takes_the_start_as_it_finds_it() -> None:
    store = MemoryStore()
    root = OwnRoot(store)
    await root.check(1)
    await starts.take(store, 1)
    await root.check(1)
    await store.delete(LOG_ROOT)
    with pytest.raises(RootGoneError):
        await root.check(1)


LAG_LOOKS = LOOKS_MIN + 1
"""More than an absence that is known already takes, and less than ABSENCE_S in the tests below."""


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_look_that_told_nothing_proves_no_absence(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    store = Lagging()
    start = await starts.take(store, 1)
    root = OwnRoot(store)
    monkeypatch.setattr(own_root, "ANSWER_S", 0.05)
    store.hangs, store.error = how == "hangs", UnreadableError("EIO") if how == "fails" else None
    assert await root.confirm(1, start.nonce) is not None
    store.hangs, store.error, store.unseen = False, None, LAG_LOOKS
    monkeypatch.setattr(own_root, "ABSENCE_S", 60.0)
    monkeypatch.setattr(root_id, "ABSENCE_S", 60.0)
    await root.check(1)
    assert store.unseen == 0


async def test_ownroot_1_a_root_that_goes_after_the_commit_costs_its_successor_nothing(
    tmp_path: Path,
) -> None:
    """The coordinator removes and reads back after the save is reported as committed."""
    root = tmp_path / "root"

    def replace_root(phase: Phase) -> None:
        if phase is Phase.COMMITTED:
            root.rename(tmp_path / "away")
            root.mkdir()

    async with PosixStore(root) as store:
        save = await plan_save(store, world_size=1)
        attempt = save._attempt(COORDINATOR, replace_root)
        await attempt.run(save._staged(COORDINATOR))
    assert attempt.phase is Phase.COMMITTED
    assert [path for path in root.rglob("*") if path.is_file()] == []
