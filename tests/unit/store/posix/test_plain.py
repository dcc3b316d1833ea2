"""Directories beside a store: what goes wrong on the way to their names."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from checkpointd.errors import StoreError
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.posix import osdisk
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.showing import plain_files_of

SERVICE, NAME = ".checkpointd", "hidden-1-0"


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = open_store(tmp_path / SERVICE)
    await made.put("tag/one", b"1")
    await made.put("tag/two", b"2")
    yield made
    await made.close()


def plain_of(store: Store) -> PlainFiles:
    plain = plain_files_of(store)
    assert plain is not None
    return plain


async def empty(plain: PlainFiles, *ours: str) -> None:
    await plain.empty(NAME, "shown", lambda path, _: path in {"file", "other", *ours})


async def show(plain: PlainFiles, **files: str) -> None:
    await plain.publish(NAME, "shown", files, {}, None)
    await empty(plain)


async def hide(plain: PlainFiles) -> None:
    await plain.withdraw(NAME, "shown")
    await empty(plain)


def hidden(tmp_path: Path) -> list[str]:
    return [name for below in ("tmp", "unfinished") for name in os.listdir(tmp_path / SERVICE / SERVICE / below)]


def exchange_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    monkeypatch.setattr(osdisk, "_libc", SimpleNamespace(renameat2=lambda *_: ctypes.set_errno(errno.EINVAL) or -1))


async def test_a_showing_that_failed_does_not_keep_the_next_from_working(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "link", full)
        patch.setattr(OsDisk, "clone", full)
        with pytest.raises(StoreError):
            await show(plain_of(store), file="tag/one")
    await empty(plain_of(store))
    await show(plain_of(store), file="tag/one")
    assert (tmp_path / "shown" / "file").read_bytes() == b"1"
    assert hidden(tmp_path) == []


async def test_what_is_put_into_the_directory_meanwhile_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody writes just before the new directory takes the name."""
    await show(plain_of(store), file="tag/one")
    exchange = OsDisk.exchange

    async def exchanged(disk: OsDisk, one: str, other: str) -> bool:
        (tmp_path / "shown" / "notes").write_bytes(b"mine")
        return await exchange(disk, one, other)

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "exchange", exchanged)
        await show(plain_of(store), file="tag/two")
    found = {path.name: path.read_bytes() for path in (tmp_path / "shown").iterdir()}
    assert found == {"file": b"2", "notes": b"mine"}


@pytest.mark.parametrize("fails", [False, True])
async def test_where_two_names_cannot_be_exchanged_the_old_directory_steps_aside(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As on NFS. Where the new one cannot take its place, the old one comes back."""
    exchange_nothing(monkeypatch)
    await show(plain_of(store), file="tag/one")
    (tmp_path / "shown" / "notes").mkdir()
    rename = OsDisk.rename

    async def renamed(disk: OsDisk, source: str, target: str) -> None:
        if fails and source.endswith(f"{NAME}/shown"):
            raise OSError(errno.EIO, "the server went away")
        await rename(disk, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "rename", renamed)
        if fails:
            with pytest.raises(StoreError):
                await show(plain_of(store), file="tag/two")
            assert not (tmp_path / "shown").exists()
        else:
            await show(plain_of(store), file="tag/two")
    await empty(plain_of(store))
    assert sorted(os.listdir(tmp_path / "shown")) == ["file", "notes"]
    assert (tmp_path / "shown" / "file").read_bytes() == (b"1" if fails else b"2")
    assert hidden(tmp_path) == [], "nothing is left aside"


async def test_what_goes_back_replaces_nothing_that_came_meanwhile(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user has given the names again while the old directory was hidden, as after a crash."""
    plain, shown = plain_of(store), tmp_path / "shown"
    await show(plain, file="tag/one")
    (shown / "notes").write_bytes(b"old")
    (shown / "figures").mkdir()
    (shown / "figures" / "old").write_bytes(b"old")
    await plain.publish(NAME, "shown", {"file": "tag/two"}, {}, None)
    (shown / "notes").write_bytes(b"new")
    (shown / "figures").mkdir()
    (shown / "figures" / "new").write_bytes(b"new")
    await empty(plain)
    assert "notes was replaced, and its name was taken again" in caplog.text
    assert {str(path.relative_to(shown)): path.read_bytes() for path in shown.rglob("*") if path.is_file()} == {
        "file": b"2",
        "notes": b"new",
        "notes.1": b"old",
        "figures/new": b"new",
        "figures/old": b"old",
    }
    assert hidden(tmp_path) == []


# --- symbolic links ----------------------------------------------------------------------------------------------


LINKS = {"to-directory": "../exports", "to-file": "../exports/model", "to-nowhere": "../gone", "to-itself": "to-itself"}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("what", ["shown again", "hidden"])
async def test_links_of_the_users_stay_where_they_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, exchanges: bool
) -> None:
    """PLAINDIR-2. From where the directory is hidden, a relative link leads to nowhere."""
    if not exchanges:
        exchange_nothing(monkeypatch)
    plain, shown = plain_of(store), tmp_path / "shown"
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "model").write_bytes(b"weights")
    await show(plain, file="tag/one", other="tag/one")
    for name, to in LINKS.items():
        (shown / name).symlink_to(to)
    (shown / "other").unlink()
    (shown / "other").symlink_to("../exports/model")  # instead of a file that is shown: it goes as that one would
    if what == "shown again":
        await show(plain, file="tag/two", other="tag/two")
        assert (shown / "file").read_bytes() == (shown / "other").read_bytes() == b"2"
        assert not (shown / "other").is_symlink()
    else:
        await hide(plain)
        assert not (shown / "file").exists()
        assert not (shown / "other").exists()
    assert {path.name: os.readlink(path) for path in shown.iterdir() if path.is_symlink()} == LINKS
    assert (tmp_path / "exports" / "model").read_bytes() == b"weights"
    assert hidden(tmp_path) == []


async def test_what_a_link_in_the_place_of_a_directory_leads_to_stays(store: Store, tmp_path: Path) -> None:
    plain, moved = plain_of(store), tmp_path / "elsewhere"
    await show(plain, file="tag/one")
    (tmp_path / "shown").rename(moved)
    (tmp_path / "shown").symlink_to(moved)
    with pytest.raises(StoreError, match="shown is a symbolic link"):
        await show(plain, file="tag/two")
    await hide(plain)
    assert (tmp_path / "shown").is_symlink()
    assert await plain.is_there("shown"), "a user who leaves a link has not removed the checkpoint"
    with pytest.raises(StoreError, match="shown is a symbolic link"):
        await plain.is_there("shown/below")
    assert (moved / "file").read_bytes() == b"1"


async def test_what_was_filled_appears_with_its_links_and_what_they_lead_to_stays(store: Store, tmp_path: Path) -> None:
    plain, theirs = plain_of(store), tmp_path / "theirs"
    place = Path(plain.unfinished.path("00000001-0", "shown"))
    for folder in (place / "deep", theirs):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    (place / "deep" / "link").symlink_to(theirs)
    (place / "nowhere").symlink_to("gone")
    place.parent.with_name("00000001-1").symlink_to(theirs)
    await plain.unfinished.settle("00000001-0")
    assert await plain.unfinished.names() == ["00000001-0"]
    found = await plain.unfinished.files("00000001-0", "shown")
    assert sorted(found) == ["deep/file", "deep/link", "nowhere"]
    assert await plain.unfinished.files("00000001-1", "shown") == {}
    await plain.publish(NAME, "shown", {"file": "tag/one"}, {path: f"{place}/{path}" for path in found}, "file")
    await empty(plain)
    for name in ("00000001-0", "00000001-1", "00000001-2"):
        await plain.unfinished.discard(name)
    assert not place.parent.exists()
    assert os.readlink(tmp_path / "shown" / "deep" / "link") == str(theirs)
    assert os.readlink(tmp_path / "shown" / "nowhere") == "gone"
    assert (tmp_path / "shown" / "latest").read_text() == "file"
    assert (theirs / "file").exists()


# --- what programs do to what is shown ---------------------------------------------------------------------------


async def test_what_is_shown_cannot_be_opened_for_writing_where_it_is_an_object_by_another_name(
    store: Store, tmp_path: Path
) -> None:
    await show(plain_of(store), file="tag/one")
    shown, stored = tmp_path / "shown" / "file", tmp_path / SERVICE / "tag" / "one"
    if shown.stat().st_ino == stored.stat().st_ino:
        assert not stat.S_IMODE(shown.stat().st_mode) & 0o222
    else:  # a clone: whoever writes to it does not write to the object
        shown.write_bytes(b"changed")
    assert stored.read_bytes() == b"1"


@pytest.mark.root
def test_a_program_of_the_same_user_cannot_write_over_an_object() -> None:
    """Root may write everywhere: here, another user owns the files and the program."""
    nobody = 65534
    folder = Path(tempfile.mkdtemp())
    try:
        asyncio.run(_show_one(folder))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, nobody, nobody)
        folder.chmod(0o755)
        shown = folder / "shown" / "file"
        done = subprocess.run(["sh", "-c", f"echo changed > {shown}"], user=nobody, group=nobody, extra_groups=[], check=False)
        assert (folder / SERVICE / "tag" / "one").read_bytes() == b"1"
        assert done.returncode or shown.stat().st_nlink == 1, "only a clone can be written to"
    finally:
        shutil.rmtree(folder)


async def _show_one(folder: Path) -> None:
    store = open_store(folder / SERVICE)
    await store.put("tag/one", b"1")
    await show(plain_of(store), file="tag/one")
    await store.close()


async def test_a_file_that_was_changed_or_removed_is_named(store: Store, tmp_path: Path) -> None:
    plain, files = plain_of(store), {"file": "tag/one", "other": "tag/two"}
    await show(plain, **files)
    assert await plain.changed("shown", files) == {}
    for name, content in (("file", b"3"), ("other", b"2")):
        (tmp_path / "shown" / name).unlink()
        (tmp_path / "shown" / name).write_bytes(content)  # one is changed; the other is a copy, as from a backup
    assert await plain.changed("shown", files) == {"file": "changed"}
    (tmp_path / "shown" / "other").unlink()
    assert await plain.changed("shown", files) == {"file": "changed", "other": "gone"}


@pytest.mark.parametrize("clones", [False, True])
async def test_a_lone_file_replaces_a_file_or_a_link_of_its_name_and_shows_again_what_it_shows(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clones: bool
) -> None:
    """PLAINDIR-1 and PLAINDIR-4: a link is replaced, and its target stays."""
    if clones:

        async def clone(disk: OsDisk, source: str, target: str) -> bool:
            shutil.copy2(source, target)
            return True

        monkeypatch.setattr(OsDisk, "clone", clone)
    plain = plain_of(store)
    (tmp_path / "other").write_bytes(b"mine")
    (tmp_path / "last.ckpt").symlink_to("other")
    for key in ("tag/one", "tag/one", "tag/two"):
        await plain.show_lone("last.ckpt", key)
        assert (tmp_path / "last.ckpt").read_bytes() == await store.get(key)
        assert await plain.is_there("last.ckpt")
        assert await plain.changed("last.ckpt", {"last.ckpt": key}) == {}
    assert await plain.changed("last.ckpt", {"last.ckpt": "tag/one"}) == {"last.ckpt": "changed"}
    assert (tmp_path / "other").read_bytes() == b"mine"
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == []
    await plain.hide_lone("last.ckpt")
    await plain.hide_lone("last.ckpt")
    assert not await plain.is_there("last.ckpt")
    assert await plain.changed("last.ckpt", {"last.ckpt": "tag/two"}) == {"last.ckpt": "gone"}


async def test_a_lone_file_takes_the_place_of_no_directory_and_hides_no_link(store: Store, tmp_path: Path) -> None:
    plain = plain_of(store)
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes").write_bytes(b"mine")
    (tmp_path / "best.ckpt").symlink_to("last.ckpt")
    with pytest.raises(StoreError, match=r"last\.ckpt"):
        await plain.show_lone("last.ckpt", "tag/one")
    with pytest.raises(StoreError, match=r"last\.ckpt"):
        await plain.hide_lone("last.ckpt")
    await plain.hide_lone("best.ckpt")
    assert (tmp_path / "best.ckpt" / "notes").read_bytes() == b"mine"
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == []
