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
from checkpointd.store.posix import store as posix_store
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.showing import plain_files_of

SERVICE = ".checkpointd"


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
    built = tmp_path / SERVICE / SERVICE / "tmp" / "elsewhere.1.1.1.aa.shown0" / "built"
    built.mkdir(parents=True)
    (built / "file").write_bytes(b"1")
    async with plain_of(store).alone():
        with monkeypatch.context() as patch:
            patch.setattr(posix_store, "_SWEEP_S", 0.1)
            assert await store.sweep() == 0  # type: ignore[attr-defined]  # of this store alone
        assert os.listdir(built) == ["file"]
    monkeypatch.setattr(posix_store, "_SWEEP_S", 60.0)
    assert await store.sweep() == 1  # type: ignore[attr-defined]
    assert not built.parent.exists()


@pytest.mark.parametrize("fails", [False, True])
async def test_where_two_names_cannot_be_exchanged_the_old_directory_steps_aside(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As on NFS. Where the new one cannot take its place, the old one comes back."""
    monkeypatch.setattr(osdisk, "_libc", SimpleNamespace(renameat2=lambda *_: ctypes.set_errno(errno.EINVAL) or -1))
    await plain_of(store).show("shown", {"file": "tag/one"}, never)
    (tmp_path / "shown" / "notes").mkdir()
    rename = OsDisk.rename

    async def renamed(disk: OsDisk, source: str, target: str) -> None:
        if fails and source.endswith("built"):
            raise OSError(errno.EIO, "the server went away")
        await rename(disk, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "rename", renamed)
        if fails:
            with pytest.raises(StoreError):
                await plain_of(store).show("shown", {"file": "tag/two"}, never)
        else:
            await plain_of(store).show("shown", {"file": "tag/two"}, never)
    assert sorted(os.listdir(tmp_path / "shown")) == ["file", "notes"]
    assert (tmp_path / "shown" / "file").read_bytes() == (b"1" if fails else b"2")
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == [], "nothing is left aside"


# --- symbolic links ----------------------------------------------------------------------------------------------


LINKS = {"to-directory": "../exports", "to-file": "../exports/model", "to-nowhere": "../gone", "to-itself": "to-itself"}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("what", ["shown again", "hidden"])
async def test_links_of_the_users_stay_where_they_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, exchanges: bool
) -> None:
    """PLAINDIR-2. From where the directory is built, a relative link leads to nowhere."""
    if not exchanges:
        monkeypatch.setattr(osdisk, "_libc", SimpleNamespace(renameat2=lambda *_: ctypes.set_errno(errno.EINVAL) or -1))
    plain, shown = plain_of(store), tmp_path / "shown"
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "model").write_bytes(b"weights")
    await plain.show("shown", {"file": "tag/one", "other": "tag/one"}, never)
    for name, to in LINKS.items():
        (shown / name).symlink_to(to)
    (shown / "other").unlink()
    (shown / "other").symlink_to("../exports/model")  # instead of a file that is shown: it goes as that one would
    if what == "shown again":
        await plain.show("shown", {"file": "tag/two", "other": "tag/two"}, never)
        assert (shown / "file").read_bytes() == (shown / "other").read_bytes() == b"2"
        assert not (shown / "other").is_symlink()
    else:
        await plain.hide("shown", ["file", "other"])
        assert not (shown / "file").exists()
        assert not (shown / "other").exists()
    assert {path.name: os.readlink(path) for path in shown.iterdir() if path.is_symlink()} == LINKS
    assert (tmp_path / "exports" / "model").read_bytes() == b"weights"
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == []


async def test_what_a_link_in_the_place_of_a_directory_leads_to_stays(store: Store, tmp_path: Path) -> None:
    plain, moved = plain_of(store), tmp_path / "elsewhere"
    await plain.show("shown", {"file": "tag/one"}, never)
    (tmp_path / "shown").rename(moved)
    (tmp_path / "shown").symlink_to(moved)
    with pytest.raises(StoreError, match="shown is a symbolic link"):
        await plain.show("shown", {"file": "tag/two"}, never)
    await plain.hide("shown", ["file"])
    assert (tmp_path / "shown").is_symlink()
    assert await plain.is_there("shown"), "a user who leaves a link has not removed the checkpoint"
    with pytest.raises(StoreError, match="shown is a symbolic link"):
        await plain.is_there("shown/below")
    assert (moved / "file").read_bytes() == b"1"
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == []


async def test_what_was_filled_with_links_in_it_is_moved_or_goes(store: Store, tmp_path: Path) -> None:
    unfinished, theirs = plain_of(store).unfinished, tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("x")
    for name in ("00000001-0", "00000001-1"):
        place = Path(unfinished.path(name, "checkpoint-8"))
        (place / "deep").mkdir(parents=True)
        (place / "deep" / "link").symlink_to(theirs)
        (place / "nowhere").symlink_to("gone")
    await unfinished.settle("00000001-0")
    (tmp_path / "checkpoint-8" / "deep").mkdir(parents=True)
    await unfinished.merge(unfinished.path("00000001-0", "checkpoint-8"), str(tmp_path / "checkpoint-8"))
    assert os.readlink(tmp_path / "checkpoint-8" / "deep" / "link") == str(theirs)
    assert os.readlink(tmp_path / "checkpoint-8" / "nowhere") == "gone"
    for name in ("00000001-0", "00000001-1"):
        await unfinished.discard(name)
        assert not Path(unfinished.path(name, "checkpoint-8")).parent.exists()
    assert (theirs / "file").exists()


# --- what programs do to what is shown ---------------------------------------------------------------------------


async def test_what_is_shown_cannot_be_opened_for_writing_where_it_is_an_object_by_another_name(
    store: Store, tmp_path: Path
) -> None:
    await plain_of(store).show("shown", {"file": "tag/one"}, never)
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
    await plain_of(store).show("shown", {"file": "tag/one"}, never)
    await store.close()


async def test_a_file_that_was_changed_or_removed_is_named(store: Store, tmp_path: Path) -> None:
    plain, files = plain_of(store), {"file": "tag/one", "other": "tag/two"}
    await plain.show("shown", files, never)
    assert await plain.changed("shown", files) == {}
    for name, content in (("file", b"3"), ("other", b"2")):
        (tmp_path / "shown" / name).unlink()
        (tmp_path / "shown" / name).write_bytes(content)  # one is changed; the other is a copy, as from a backup
    assert await plain.changed("shown", files) == {"file": "changed"}
    (tmp_path / "shown" / "other").unlink()
    assert await plain.changed("shown", files) == {"file": "changed", "other": "gone"}


async def test_what_has_no_name_to_go_back_to_stays_and_is_named(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The old directory of a showing that was cut off has a folder whose name the user has given again since."""
    place = tmp_path / SERVICE / SERVICE / "tmp" / "dead.shown0"
    (place / "built" / "notes").mkdir(parents=True)
    (place / "built" / "notes" / "old").write_bytes(b"mine")
    (place / "built" / "file").write_bytes(b"1")
    (place / "journal").write_text('{"at": "shown", "ours": ["file"], "linked": {}}')
    (tmp_path / "shown" / "notes").mkdir(parents=True)
    assert await plain_of(store).finish() == 0
    assert "move it where it belongs" in caplog.text
    assert [path.name for path in (place / "built").iterdir()] == ["notes"]
    (tmp_path / "shown" / "notes").rmdir()
    assert await plain_of(store).finish() == 1
    assert (tmp_path / "shown" / "notes" / "old").read_bytes() == b"mine"
    assert not place.exists()


async def test_what_cannot_be_put_back_keeps_nothing_else_from_being_shown(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has put a file where the directory was whose showing was cut off."""
    plain, place = plain_of(store), tmp_path / SERVICE / SERVICE / "tmp" / "dead.shown0"
    (place / "aside").mkdir(parents=True)
    (place / "aside" / "notes").write_bytes(b"mine")
    (place / "journal").write_text('{"at": "best", "ours": ["file"], "linked": {}}')
    (tmp_path / "best").write_text("in the way")
    assert await plain.finish() == 0
    assert f"left in {place} stay there for now" in caplog.text
    await plain.show("other", {"file": "tag/one"}, never)
    assert (tmp_path / "other" / "file").read_bytes() == b"1"
    assert await plain.unsettled() == {"best"}
    (tmp_path / "best").unlink()
    assert await plain.finish() == 1
    assert (await plain.unsettled(), (tmp_path / "best" / "notes").read_bytes()) == (set(), b"mine")


async def test_what_was_filled_goes_and_what_a_link_leads_to_stays(store: Store, tmp_path: Path) -> None:
    unfinished, theirs = plain_of(store).unfinished, tmp_path / "theirs"
    place = Path(unfinished.path("00000001-0", "checkpoint-8"))
    for folder in (place / "deep", theirs):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    place.parent.with_name("00000001-1").symlink_to(theirs)
    assert await unfinished.names() == ["00000001-0"]
    assert await unfinished.is_there("00000001-0", "checkpoint-8")
    assert not await unfinished.is_there("00000001-0", "checkpoint-9")
    for name in ("00000001-0", "00000001-1", "00000001-2"):
        await unfinished.discard(name)
    assert not place.parent.exists()
    assert (theirs / "file").exists()


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
    await plain.hide("last.ckpt", ["last.ckpt"])
    await plain.hide("last.ckpt", ["last.ckpt"])
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
        await plain.hide("last.ckpt", ["last.ckpt"])
    await plain.hide("best.ckpt", ["best.ckpt"])
    assert (tmp_path / "best.ckpt" / "notes").read_bytes() == b"mine"
    assert os.listdir(tmp_path / SERVICE / SERVICE / "tmp") == []
