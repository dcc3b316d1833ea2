"""The real disk, beyond what the store contract shows of it."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpointd.store.posix import osdisk
from checkpointd.store.posix.anchor import Anchor
from checkpointd.store.posix.disk import Child
from checkpointd.store.posix.osdisk import OsDisk


@pytest.fixture
async def disk() -> AsyncIterator[OsDisk]:
    disk = OsDisk()
    yield disk
    await disk.close()


async def test_a_read_that_is_cancelled_with_all_its_tasks_leaves_no_file_open(
    disk: OsDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a loop."""
    (tmp_path / "vote").write_bytes(b"yes")
    opened, release, closed = threading.Event(), threading.Event(), threading.Event()
    really = osdisk._opened

    @contextmanager
    def slowly(anchor: Anchor, path: str, flags: int = 0) -> Iterator[int]:
        with really(anchor, path, flags) as descriptor:
            opened.set()
            release.wait(60)
            yield descriptor
        closed.set()

    monkeypatch.setattr(osdisk, "_opened", slowly)
    task = asyncio.create_task(disk.read(str(tmp_path / "vote"), 100))
    await asyncio.to_thread(opened.wait, 60)
    for one in asyncio.all_tasks() - {asyncio.current_task()}:
        one.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()


async def test_a_lock_has_one_holder(disk: OsDisk, tmp_path: Path) -> None:
    """Holders wait without keeping a thread: there are more of them than threads, and the one that holds can still work."""
    holders, most = 0, 0

    async def hold() -> None:
        nonlocal holders, most
        lock = await disk.locked(str(tmp_path / "lock"))
        holders += 1
        most = max(most, holders)
        await disk.sync_directory(str(tmp_path))
        holders -= 1
        await lock.release()

    await asyncio.gather(*(hold() for _ in range(20)))
    assert most == 1


async def test_a_lock_is_free_when_its_holder_dies(disk: OsDisk, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    pipe = asyncio.subprocess.PIPE
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(path), stdin=pipe, stdout=pipe)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    waiting = asyncio.create_task(disk.locked(str(path)))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    holder.kill()
    await holder.wait()
    await (await waiting).release()


async def test_waiting_for_a_lock_can_be_given_up(disk: OsDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    held = await disk.locked(path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await disk.locked(path)
    await held.release()
    await (await disk.locked(path)).release()
    assert not _open_files(tmp_path)


async def test_a_file_whose_creation_was_cancelled_is_closed(
    disk: OsDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, entered, go_on = os.open, threading.Event(), threading.Event()

    def slow(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            entered.set()
            assert go_on.wait(60)
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", slow)
    task = asyncio.create_task(disk.create(str(tmp_path / "file")))
    await asyncio.to_thread(entered.wait)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "file").exists()
    assert not _open_files(tmp_path)


async def test_a_link_that_is_there_already_was_our_own(disk: OsDisk, tmp_path: Path) -> None:
    """A file server that did not get its answer across makes the link, and says that it exists."""
    source, other = tmp_path / "source", tmp_path / "other"
    source.write_bytes(b"x")
    other.write_bytes(b"x")
    await disk.link(str(source), str(tmp_path / "target"))
    await disk.link(str(source), str(tmp_path / "target"))
    with pytest.raises(FileExistsError):
        await disk.link(str(other), str(tmp_path / "target"))


async def test_children_are_files_and_directories_and_no_links(disk: OsDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "directory").mkdir()
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "to-directory").symlink_to("directory")
    (tmp_path / "to-nowhere").symlink_to("gone")
    assert sorted(await disk.children(str(tmp_path)), key=lambda child: child.name) == [
        Child("directory", 0, True),
        Child("file", 3, False),
    ]


async def test_links_are_listed_as_such_where_they_are_asked_for(disk: OsDisk, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"123")
    for name, to in (("a", "directory"), ("b", "file"), ("c", "gone"), ("d", "d")):
        (tmp_path / name).symlink_to(to)
    found = sorted(await disk.children(str(tmp_path), links=True), key=lambda child: child.name)
    links = [Child(name, 0, is_directory=False, is_link=True) for name in "abcd"]
    assert found == [*links, Child("directory", 0, True), Child("file", 3, False)]
    assert sorted(child.name for child in await disk.children(str(tmp_path))) == ["directory", "file"]
    assert (await disk.status(str(tmp_path / "b"))).is_link
    await disk.link(str(tmp_path / "c"), str(tmp_path / "e"))
    assert os.readlink(tmp_path / "e") == "gone"


async def test_read_refuses_what_is_longer(disk: OsDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert await disk.read(str(tmp_path / "file"), 5) == b"12345"
    with pytest.raises(OSError, match="longer") as caught:
        await disk.read(str(tmp_path / "file"), 4)
    assert caught.value.errno == errno.EFBIG


async def test_read_at_stops_at_the_end(disk: OsDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    out = bytearray(4)
    assert await disk.read_at(str(tmp_path / "file"), 3, memoryview(out)) == 2
    assert out == b"45\0\0"
    assert await disk.read_at(str(tmp_path / "file"), 9, memoryview(out)) == 0


async def test_size_is_of_files_only(disk: OsDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    assert await disk.size(str(tmp_path / "file")) == 3
    with pytest.raises(IsADirectoryError):
        await disk.size(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        await disk.size(str(tmp_path / "other"))


def test_it_works_under_plain_asyncio_too(tmp_path: Path) -> None:
    async def work() -> bytes:
        disk = OsDisk()
        file = await disk.create(str(tmp_path / "file"))
        await asyncio.gather(file.write_at(0, b"12"), file.write_at(2, b"34"))
        await file.sync()
        await file.close()
        await disk.rename(str(tmp_path / "file"), str(tmp_path / "named"))
        await disk.sync_directory(str(tmp_path))
        lock = await disk.locked(str(tmp_path / "lock"))
        await lock.release()
        content = await disk.read(str(tmp_path / "named"), 100)
        await disk.close()
        return content

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        assert runner.run(work()) == b"1234"


def _open_files(below: Path) -> list[str]:
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [name for name in names if name.startswith(str(below))]


async def test_a_pipe_in_place_of_a_file_is_an_error_and_keeps_no_thread_waiting(disk: OsDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "object")
    os.mkfifo(path)
    for call in (disk.read(path, 10), disk.read_at(path, 0, memoryview(bytearray(4))), disk.sync_file(path)):
        with pytest.raises(OSError, match="neither a file nor a directory") as caught:
            await call
        assert caught.value.errno == errno.EINVAL


async def test_a_directory_in_place_of_a_file_is_named_as_one(disk: OsDisk, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        await disk.read(str(tmp_path), 10)


async def test_many_files_by_one_call_and_what_is_no_file_is_left_out(disk: OsDisk, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"12345")
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "linked").symlink_to("below")
    os.mkfifo(tmp_path / "pipe")
    names = ["below/file", "file", "below", "link", "linked/file", "pipe", "missing", "missing/too", "file/below"]
    paths = [str(tmp_path / name) for name in names]
    large, file, *others = await disk.read_each(paths, 4)
    assert (file, getattr(large, "errno", None)) == (b"123", errno.EFBIG)
    assert [(await disk.read_each(paths, 5))[0], file] == [b"12345", b"123"]
    for path, found in zip(paths[2:], others, strict=True):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # the same as `read_each` gives
            await disk.read(path, 4)
        assert isinstance(found, OSError)
        assert found.errno == caught.value.errno
    left = await disk.unlink_each([path for path in paths if not path.endswith("file") or "linked" in path])
    assert left == [str(tmp_path / name) for name in ("below", "linked/file", "file/below")]
    assert sorted(child.name for child in await disk.children(str(tmp_path), links=True)) == ["below", "file", "linked"]
    assert await disk.unlink_each(paths[:2]) == []
    assert await disk.children(str(tmp_path / "below")) == []


async def test_small_calls_do_not_wait_for_the_removal_of_many_files(
    disk: OsDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / str(number)) for number in range(64)]
    for path in paths:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    release, really = threading.Event(), os.unlink

    def slowly(path: str, *, dir_fd: int | None = None) -> None:
        release.wait()
        really(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", slowly)
    removals = [asyncio.ensure_future(disk.unlink_each(paths[first : first + 8])) for first in range(0, 64, 8)]
    try:
        async with asyncio.timeout(60):
            assert (await disk.status(str(tmp_path))).number
            await disk.sync_directory(str(tmp_path))
    finally:
        release.set()
    assert await asyncio.gather(*removals) == [[]] * 8
    assert await disk.children(str(tmp_path)) == []
