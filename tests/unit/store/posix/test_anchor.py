"""Invariants ANCHOR-1 and ANCHOR-2 of `checkpointd.store.posix.anchor`, both ways of resolving a path; and every call
of the disk at a link.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from checkpointd.errors import LinkError
from checkpointd.store.base import Store
from checkpointd.store.posix import anchor
from checkpointd.store.posix.anchor import Anchor, LinkMet
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.posix.store import PosixStore

WAYS = {"openat2": 0, "without-openat2": errno.ENOSYS, "openat2-forbidden": errno.EPERM}


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How paths are resolved: a kernel without openat2, and a seccomp filter that refuses it, are stood in for."""

    def refused(_: int, path: str) -> int:
        raise OSError(WAYS[request.param], os.strerror(WAYS[request.param]), path)

    if WAYS[request.param]:
        monkeypatch.setattr(anchor, "_beneath", refused)
    return str(request.param)


@pytest.fixture(autouse=True)
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory that links lead to; nothing in it changes."""
    made = tmp_path / "outside"
    (made / "sub").mkdir(parents=True)
    (made / "secret").write_bytes(b"secret")
    before = tree(made)
    yield made
    assert tree(made) == before


def tree(folder: Path) -> list[tuple[str, int, int, int]]:
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(p), (s := p.stat()).st_ino, s.st_mode, s.st_mtime_ns) for p in paths]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "tag").mkdir(parents=True)
    (made / "tag" / "file").write_bytes(b"own")
    return made


@pytest_asyncio.fixture
async def disk(root: Path) -> AsyncIterator[OsDisk]:
    made = OsDisk(str(root))
    yield made
    await made.close()


Call = Callable[[OsDisk, str, str], Awaitable[object]]
"""A call of a disk on the file, or at the directory, and with the name of another file."""

ON_FILES: dict[str, Call] = {
    "read": lambda disk, path, _: disk.read(path, 100),
    "read-past-cache": lambda disk, path, _: disk.read(path, 100, past_cache=True),
    "read_at": lambda disk, path, _: disk.read_at(path, 0, memoryview(bytearray(3))),
    "read_at-past-cache": lambda disk, path, _: disk.read_at(path, 0, memoryview(bytearray(3)), past_cache=True),
    "sync_file": lambda disk, path, _: disk.sync_file(path),
    "protect": lambda disk, path, _: disk.protect(path),
    "size": lambda disk, path, _: disk.size(path),
    "locked": lambda disk, path, _: disk.locked(path),
    "clone": lambda disk, path, other: disk.clone(path, other),
}
ON_NAMES: dict[str, Call] = {
    "create": lambda disk, path, _: disk.create(path + "-new"),
    "unlink": lambda disk, path, _: disk.unlink(path),
    "status": lambda disk, path, _: disk.status(path),
    "make_directory": lambda disk, path, _: disk.make_directory(path + "-new"),
    "remove_directory": lambda disk, path, _: disk.remove_directory(os.path.dirname(path) + "/sub"),
    "link-from": lambda disk, path, other: disk.link(path, other),
    "link-to": lambda disk, path, other: disk.link(os.path.dirname(other) + "/tag/file", path + "-new"),
    "rename-from": lambda disk, path, other: disk.rename(path, other),
    "rename-to": lambda disk, path, other: disk.rename(os.path.dirname(other) + "/tag/file", path),
    "exchange": lambda disk, path, other: disk.exchange(os.path.dirname(other) + "/tag/file", path),
    "clone-to": lambda disk, path, other: disk.clone(os.path.dirname(other) + "/tag/file", path + "-new"),
    "children": lambda disk, path, _: disk.children(os.path.dirname(path) + "/sub"),
    "sync_directory": lambda disk, path, _: disk.sync_directory(os.path.dirname(path) + "/sub"),
}


@pytest.mark.parametrize("call", [*ON_FILES, *ON_NAMES])
async def test_anchor_1_no_call_goes_through_a_link_on_the_way(disk: OsDisk, root: Path, outside: Path, call: str) -> None:
    (root / "away").symlink_to(outside)
    with pytest.raises(LinkMet) as caught:
        await {**ON_FILES, **ON_NAMES}[call](disk, f"{root}/away/secret", f"{root}/other")
    assert caught.value.filename == str(root / "away")


@pytest.mark.parametrize("call", ON_FILES)
async def test_anchor_1_no_call_opens_what_a_link_leads_to(disk: OsDisk, root: Path, outside: Path, call: str) -> None:
    (root / "tag" / "linked").symlink_to(outside / "secret")
    with pytest.raises(LinkMet) as caught:
        await ON_FILES[call](disk, f"{root}/tag/linked", f"{root}/other")
    assert caught.value.filename == str(root / "tag" / "linked")
    assert not (root / "other").exists()


@pytest.mark.parametrize("call", ["children", "sync_directory", "remove_directory"])
async def test_anchor_1_no_call_goes_into_a_directory_that_a_link_leads_to(
    disk: OsDisk, root: Path, outside: Path, call: str
) -> None:
    (root / "sub").symlink_to(outside / "sub")
    with pytest.raises(LinkMet):
        await ON_NAMES[call](disk, f"{root}/name", f"{root}/other")


@pytest.mark.parametrize("call", [*ON_FILES, *ON_NAMES])
async def test_anchor_1_nothing_leads_upwards(disk: OsDisk, root: Path, call: str) -> None:
    with pytest.raises(OSError, match="leads upwards"):
        await {**ON_FILES, **ON_NAMES}[call](disk, f"{root}/tag/../../outside/sub/../secret", f"{root}/other")


async def test_anchor_1_a_link_that_takes_the_place_of_a_directory_again_and_again_leads_nowhere(
    disk: OsDisk, root: Path, outside: Path
) -> None:
    """Whatever the moment: each call does its work in the directory, or fails; 300 files, exchanged all the while."""
    (root / "other").symlink_to(outside)
    over = threading.Event()

    def exchange() -> None:
        while not over.is_set():
            for one, two in (("tag", "away"), ("other", "tag"), ("tag", "other"), ("away", "tag")):
                os.rename(root / one, root / two)

    exchanging = threading.Thread(target=exchange)
    exchanging.start()
    refused = 0
    try:
        for number in range(300):
            try:
                await (await disk.create(f"{root}/tag/new{number}")).close()
            except OSError:
                refused += 1
    finally:
        over.set()
        exchanging.join()
    assert len(list((root / "tag").glob("new*"))) == 300 - refused


async def test_the_root_itself_and_what_lies_above_may_be_links(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").symlink_to("root")
    async with PosixStore(tmp_path / "mnt") as store:
        await store.put("tag/object", b"1")
        assert await store.get("tag/object") == b"1"
    assert (root / "tag" / "object").read_bytes() == b"1"


async def test_with_the_anchor_above_no_link_is_followed_in_the_roots_own_path(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").symlink_to("root")
    async with PosixStore(tmp_path / "mnt", anchor="/") as store:
        with pytest.raises(LinkError, match=f"{tmp_path}/mnt is a symbolic link"):
            await store.put("tag/object", b"1")
        with pytest.raises(LinkError):
            await store.get("tag/file")
        with pytest.raises(LinkError):
            await store.list("")


async def test_anchor_2_no_descriptor_is_left(disk: OsDisk, root: Path, outside: Path) -> None:
    (root / "away").symlink_to(outside)
    await disk.read(f"{root}/tag/file", 10)  # the threads are there now
    before = len(os.listdir("/proc/self/fd"))
    for name, call in {**ON_FILES, **ON_NAMES}.items():
        if name not in ("locked", "create"):
            with pytest.raises(OSError, match="symbolic link"):
                await call(disk, f"{root}/away/secret", f"{root}/other")
    await disk.read(f"{root}/tag/file", 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_does_not_exist_is_no_link(root: Path) -> None:
    Anchor("/").check(f"{root}/not/there")
    Anchor("/").check(f"{root}/tag/file/below")


# --- the store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["latest", "tag/vote"])
async def test_an_object_that_is_a_link_is_an_error_that_names_it_and_says_what_to_do(
    root: Path, outside: Path, what: str
) -> None:
    (root / what).symlink_to(outside / "secret")
    async with PosixStore(root) as store:
        for call in (store.get(what), store.stat(what), store.settle(what), store.put_if_absent(what, b"x")):
            with pytest.raises(LinkError, match=rf"{root}/{what} is a symbolic link.*Remove the link") as caught:
                await call
        assert not await store.put_if_match(what, b"secret", b"x"), "what a link leads to is not its content"
        assert not caught.value.retryable
        assert what.rpartition("/")[2] not in [entry.name for entry in await store.list(what.rpartition("/")[0])]


async def test_a_link_is_replaced_by_an_object_and_what_it_leads_to_stays(root: Path, outside: Path) -> None:
    secret = (outside / "secret").read_bytes()
    (root / "latest").symlink_to(outside / "secret")
    async with PosixStore(root) as store:
        assert await store.put_if_match("latest", None, b"x")
        assert await store.get("latest") == b"x"
    assert not (root / "latest").is_symlink()
    assert (outside / "secret").read_bytes() == secret


@pytest.mark.parametrize("service", [".checkpointd", ".checkpointd/tmp", ".checkpointd/lock"])
async def test_what_belongs_to_the_store_is_never_a_link(root: Path, outside: Path, service: str) -> None:
    (root / service).parent.mkdir(exist_ok=True)
    (root / service).symlink_to(outside / "nologin" if service.endswith("lock") else outside)
    async with PosixStore(root) as store:
        with pytest.raises(LinkError, match=f"{service} is a symbolic link"):
            await store.put_if_match("latest", None, b"x")


async def test_a_tag_that_is_a_link_takes_nothing(root: Path, outside: Path) -> None:
    (root / "linked").symlink_to(outside)
    async with PosixStore(root) as store:
        with pytest.raises(LinkError, match="linked is a symbolic link"):
            await store.open_writer("linked/00000001-0/00000.chunks")
        with pytest.raises(LinkError):
            await store.put_if_absent("linked/00000001-0/outcome", b"x")
        with pytest.raises(LinkError):
            await store.delete("linked/secret")
        assert [entry.name for entry in await store.list("")] == ["tag"]


async def shown(tmp_path: Path) -> tuple[Store, PlainFiles]:
    store = PosixStore(tmp_path / "run" / ".checkpointd")
    await store.put("tag/file", b"1")
    assert store.plain_files is not None
    return store, store.plain_files


@pytest.mark.parametrize("at", ["linked", "linked/cron.d"])
async def test_files_are_shown_through_no_link(tmp_path: Path, outside: Path, at: str) -> None:
    store, plain = await shown(tmp_path)
    (tmp_path / "run" / "linked").symlink_to(outside)
    with pytest.raises(LinkError, match=f"{tmp_path}/run/linked is a symbolic link"):
        await plain.publish("hidden-1-0", at, {"evil": "tag/file"}, {}, None)
    with pytest.raises(LinkError):
        await plain.changed(at, {"secret": "tag/file"})
    await store.close()


@pytest.mark.parametrize("folder", ["", "linked"])
async def test_a_pointer_is_read_and_moved_through_no_link(tmp_path: Path, outside: Path, folder: str) -> None:
    store, plain = await shown(tmp_path)
    if folder:
        (tmp_path / "run" / folder).symlink_to(outside)
    else:
        (tmp_path / "run" / "latest").symlink_to(outside / "secret")
    with pytest.raises(LinkError):
        await plain.pointed(folder)
    with pytest.raises(LinkError):
        await plain.point(folder, "tag")
    await store.close()


async def test_hiding_removes_nothing_through_a_link(tmp_path: Path, outside: Path) -> None:
    store, plain = await shown(tmp_path)
    (tmp_path / "run" / "deep").mkdir()
    await plain.publish("hidden-1-0", "deep/at", {"secret": "tag/file"}, {}, None)
    os.rename(tmp_path / "run" / "deep", tmp_path / "run" / "deep-old")
    (tmp_path / "run" / "deep").symlink_to(outside)
    with pytest.raises(LinkError):
        await plain.withdraw("hidden-1-0", "deep/at")
    os.rename(tmp_path / "run" / "deep-old" / "at", tmp_path / "run" / "at-old")
    (tmp_path / "run" / "at").symlink_to(outside)
    await plain.withdraw("hidden-1-0", "at")
    assert (tmp_path / "run" / "at").is_symlink()
    await store.close()
