"""LOG-12: whose root it is, told by its id, and by the directory where the store can tell one from another."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from checkpointd.errors import FormatError, NotFoundError, RootGoneError, StoreError, UnreadableError
from checkpointd.layout.keys import LOG_ROOT
from checkpointd.layout.manifest import VERSION, sealed
from checkpointd.pipeline import root_id
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root_id import OwnId, made_id, read_id
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, Store
from checkpointd.store.identity import Identity
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import LOOKS_MIN
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore

HERE = Identity(device=1, number=2, object_touched_ns=4)


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_id, "ABSENCE_S", 0.01)


class Placed(MemoryStore):
    """A store in memory that says where it lies. It lags behind for the next `unseen` looks, and fails while there is an
    `error`.
    """

    def __init__(self, here: Identity | None = HERE) -> None:
        super().__init__()
        self.here = here
        self.unseen = self.forgotten = self.reads = 0
        self.error: StoreError | None = None

    async def identity(self, key: str) -> Identity | None:
        self._look(key)
        return self.here

    def forget_synced(self) -> None:
        self.forgotten += 1

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        self.reads += 1
        self._look(key)
        return await super().get(key, size_max=size_max)

    async def list(self, prefix: str) -> list[Entry]:
        return [] if self.unseen > 0 else await super().list(prefix)

    def _look(self, key: str) -> None:
        if self.error is not None:
            raise self.error
        if self.unseen > 0:
            self.unseen -= 1
            raise NotFoundError(key)


async def seen(store: Store) -> OwnId:
    """A root that has been looked at."""
    await made_id(store)
    own = OwnId(store)
    await own.check()
    return own


# --- the id ---------------------------------------------------------------------------------------------------------


async def test_all_processes_see_one_id() -> None:
    store = MemoryStore()
    with pytest.raises(NotFoundError):
        await read_id(store)
    (found,) = set(await asyncio.gather(*(made_id(store) for _ in range(5))))
    assert (found, await read_id(store), len(found)) == (await made_id(store), found, 32)
    assert found != await made_id(MemoryStore())


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 99], ids=["empty", "no id", "other bytes"])
async def test_an_id_that_is_damaged_is_replaced_by_one(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Else one bad byte would keep all jobs from the root for ever."""
    store = MemoryStore()
    await store.put(LOG_ROOT, damage)
    with pytest.raises(FormatError):
        await read_id(store)
    (found,) = set(await asyncio.gather(*(made_id(store) for _ in range(5))))
    assert found == await read_id(store)
    assert f"{LOG_ROOT} is damaged" in caplog.text or "is not a checkpointd.root object" in caplog.text
    assert "gets a new id" in caplog.text


async def test_the_id_of_a_newer_release_stays() -> None:
    store = MemoryStore()
    newer = root_id.RootId(version=VERSION + 1, id="0" * 32, writer=writer())
    data = sealed(msgspec.json.format(msgspec.json.encode(newer), indent=2))
    await store.put(LOG_ROOT, data)
    with pytest.raises(FormatError, match=f"has format version {VERSION + 1}, and this release reads version {VERSION}"):
        await made_id(store)
    assert await store.get(LOG_ROOT) == data


# --- the same root --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kept", ["mounted anew, with another device", "an overlay that forgot its inode", "an object that was touched", "no change"]
)
async def test_log_12_the_same_directory(kept: str) -> None:
    store = Placed()
    own = await seen(store)
    store.here = {
        "mounted anew, with another device": replace(HERE, device=9),
        "an overlay that forgot its inode": replace(HERE, number=9),
        "an object that was touched": replace(HERE, object_touched_ns=9),
    }.get(kept, HERE)
    await own.check()
    reads = store.reads
    await own.check()
    assert store.reads == reads  # what is known is not read again


async def test_syncs_of_another_directory_do_not_count() -> None:
    store = Placed()
    own = await seen(store)
    assert store.forgotten == 1
    await own.check()
    assert store.forgotten == 1
    store.here = replace(HERE, object_touched_ns=9)
    await own.check()
    assert store.forgotten == 2


@pytest.mark.parametrize("other", [replace(HERE, number=9, object_touched_ns=9), replace(HERE, device=9, object_touched_ns=9)])
async def test_log_12_a_copy_is_another_directory(other: Identity) -> None:
    store = Placed()
    own = await seen(store)
    store.here = other
    for _ in range(2):
        with pytest.raises(RootGoneError, match="a copy of it lies in its place"):
            await own.check()
    store.here = HERE
    await own.check()


async def gone_check(store: Placed, own: OwnId) -> None:
    """`own.check()` while the object is missing."""
    here, store.unseen = store.here, 1000
    try:
        await own.check()
    finally:
        store.here, store.unseen = here, 0


async def test_a_process_that_was_told_the_id_takes_no_other() -> None:
    store = MemoryStore()
    known = await made_id(store)
    await OwnId(store, known).check()
    with pytest.raises(RootGoneError, match="another root lies there"):
        await OwnId(store, "0" * 32).check()


async def test_another_root_that_was_copied_over_it(tmp_path: Path) -> None:
    """The same directory, with the id of another root."""
    async with PosixStore(tmp_path / "root") as store, PosixStore(tmp_path / "other") as other:
        own = await seen(store)
        await made_id(other)
        (tmp_path / "other" / LOG_ROOT).replace(tmp_path / "root" / LOG_ROOT)
        with pytest.raises(RootGoneError, match="another root lies there"):
            await own.check()


# --- damage, and stores that do not tell ----------------------------------------------------------------------------


async def test_an_id_that_went_bad_in_its_own_directory_stops_nobody(tmp_path: Path) -> None:
    async with PosixStore(tmp_path / "root") as store:
        own = await seen(store)
        (tmp_path / "root" / LOG_ROOT).write_bytes(b"\xff" * 99)
        await own.check()
        await own.check()
        shutil.copytree(tmp_path / "root", tmp_path / "copy")
        (tmp_path / "root").rename(tmp_path / "aside")
        (tmp_path / "copy").rename(tmp_path / "root")
        with pytest.raises(RootGoneError, match="a copy of it"):
            await own.check()


@pytest.mark.parametrize("looked", [True, False])
async def test_an_id_that_went_bad_where_nothing_else_tells_is_said(*, looked: bool) -> None:
    store = MemoryStore()
    await made_id(store)
    own = OwnId(store)
    if looked:
        await own.check()
    await store.put(LOG_ROOT, b"\xff" * 99)
    with pytest.raises(UnreadableError, match=r"log/root is damaged.* Put it back from a copy, or start the job again"):
        await own.check()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.EPERM])
async def test_an_error_of_the_storage_is_no_absence(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object, **__: object) -> bytes:
        raise OSError(number, os.strerror(number))

    async with PosixStore(tmp_path / "root") as store:
        own = await seen(store)
        for call, checked in (("status_each", own), ("read", OwnId(store))):
            with monkeypatch.context() as patch:
                patch.setattr(OsDisk, call, failing)
                with pytest.raises(UnreadableError, match=errno.errorcode[number]):
                    await checked.check()
            await checked.check()


LAG_LOOKS = LOOKS_MIN + 1
"""More than an absence that is known already takes, and less than ABSENCE_S in the tests below."""


@pytest.mark.parametrize("here", [HERE, None])
async def test_a_file_server_that_lags_is_given_time(here: Identity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_id, "ABSENCE_S", 60.0)
    store = Placed(here)
    own = await seen(store)
    store.unseen = 2 * LAG_LOOKS
    await asyncio.gather(own.check(), own.check())  # each proves it, as those of a lease and of an attempt
    assert store.unseen <= 0


async def test_a_moment_out_of_sight_makes_nobody_take_a_copy() -> None:
    store = Placed()
    own = await seen(store)
    store.unseen = 2
    await own.check()
    store.here = replace(HERE, number=9, object_touched_ns=9)
    with pytest.raises(RootGoneError, match="a copy of it lies in its place"):
        await own.check()


async def test_an_absence_that_is_known_is_not_proved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Placed()
    own = await seen(store)
    with pytest.raises(RootGoneError):
        await gone_check(store, own)
    monkeypatch.setattr(root_id, "ABSENCE_S", 1e6)
    with pytest.raises(RootGoneError):
        await gone_check(store, own)
    await own.check()
