"""Directories beside a store: what goes wrong on the way to their names."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from checkpointd.errors import StoreError
from checkpointd.store import open_store, osdisk, posix
from checkpointd.store.base import Store
from checkpointd.store.osdisk import OsDisk
from checkpointd.store.plain import PlainFiles

SERVICE = ".checkpointd"


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = open_store(tmp_path / SERVICE)
    await made.put("tag/one", b"1")
    await made.put("tag/two", b"2")
    yield made
    await made.close()


def plain_of(store: Store) -> PlainFiles:
    plain = store.plain_files
    assert plain is not None
    return plain


def never(_: str) -> bool:
    return False


async def test_a_showing_that_failed_does_not_keep_the_next_from_working(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "link", full)
        with pytest.raises(StoreError):
            await plain_of(store).show("shown", {"file": "tag/one"}, never)
    await plain_of(store).show("shown", {"file": "tag/one"}, never)
    assert (tmp_path / "shown" / "file").read_bytes() == b"1"
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == [], "what was built in vain is left"


@pytest.mark.parametrize("there", [False, True])
async def test_what_is_put_into_the_directory_meanwhile_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """A file that somebody writes after the directory was looked at, and before the new one takes its name."""
    if there:
        await plain_of(store).show("shown", {"file": "tag/one"}, never)
    sync, written = OsDisk.sync_directory, list[int]()

    async def synced(disk: OsDisk, path: str) -> None:
        await sync(disk, path)
        if not written:
            (tmp_path / "shown").mkdir(exist_ok=True)
            written.append((tmp_path / "shown" / "notes").write_bytes(b"mine"))

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "sync_directory", synced)
        await plain_of(store).show("shown", {"file": "tag/two"}, never)
    found = {path.name: path.read_bytes() for path in (tmp_path / "shown").iterdir()}
    assert found == {"file": b"2", "notes": b"mine"}


async def test_what_is_about_to_be_shown_is_not_swept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on another machine counts as dead: only the lock that it holds says that it is at work."""
    monkeypatch.setattr(posix, "_SWEEP_S", 0.1)
    built = tmp_path / SERVICE / SERVICE / "tmp" / "elsewhere.1.1.1.aa.shown0"
    built.mkdir()
    (built / "file").write_bytes(b"1")
    async with plain_of(store).alone():
        assert await store.sweep() == 0  # type: ignore[attr-defined]  # of this store alone
        assert os.listdir(built) == ["file"]
    assert await store.sweep() == 1  # type: ignore[attr-defined]
    assert not built.exists()


def test_an_exchange_by_way_of_a_third_name_that_fails_puts_back_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which cannot exchange two names."""
    monkeypatch.setattr(osdisk, "_libc", SimpleNamespace(renameat2=lambda *_: ctypes.set_errno(errno.EINVAL) or -1))
    one, other = tmp_path / "one", tmp_path / "other"
    other.mkdir()
    with pytest.raises(FileNotFoundError):
        osdisk._exchange(str(one), str(other))
    assert other.is_dir()
    one.mkdir()
    (one / "new").touch()
    osdisk._exchange(str(one), str(other))
    assert (os.listdir(one), os.listdir(other)) == ([], ["new"])
