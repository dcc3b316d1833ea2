"""The simulated file system allows exactly the faults SIMFS-1 to SIMFS-7 that it states (`checkpointd/testing/simfs.py`)."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable

import pytest

from checkpointd.testing.simfs import SECTOR_BYTES, SimFs

SEEDS = range(300)


def after_cuts(make: Callable[[SimFs], None], look: Callable[[SimFs], object]) -> set[object]:
    """What `look` finds after a power cut, over many seeds, on a file system that `make` has prepared."""
    found = set()
    for seed in SEEDS:
        fs = SimFs()
        make(fs)
        fs.power_cut(random.Random(seed))
        found.add(look(fs))
    return found


def content(fs: SimFs, path: str) -> bytes | None:
    try:
        return bytes(fs.file(path).data)
    except FileNotFoundError:
        return None


def write(fs: SimFs, path: str, data: bytes) -> None:
    fs.write(fs.create(path), 0, data)


def test_a_synced_name_does_not_save_its_content() -> None:  # SIMFS-1
    def make(fs: SimFs) -> None:
        write(fs, "/a", b"data")
        fs.sync_directory("/")

    assert after_cuts(make, lambda fs: content(fs, "/a")) == {b"data", b"", bytes(4)}


def test_unsynced_content_tears_at_sectors_alone() -> None:  # SIMFS-1
    old, new = b"o" * 3 * SECTOR_BYTES, b"n" * 3 * SECTOR_BYTES

    def make(fs: SimFs) -> None:
        write(fs, "/a", old)
        fs.make_all_durable()
        fs.write(fs.file("/a"), 0, new)

    def sectors(fs: SimFs) -> str:
        data = content(fs, "/a") or b""
        cut = [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
        assert all(len(set(sector)) == 1 for sector in cut)
        return "".join(chr(sector[0]) for sector in cut)

    assert after_cuts(make, sectors) == {a + b + c for a in "on" for b in "on" for c in "on"}


def test_a_sector_is_one_of_the_file_not_of_the_write() -> None:  # SIMFS-1
    def make(fs: SimFs) -> None:
        write(fs, "/a", bytes(2 * SECTOR_BYTES))
        fs.make_all_durable()
        fs.write(fs.file("/a"), SECTOR_BYTES - 1, b"xy")

    found = after_cuts(make, lambda fs: (content(fs, "/a") or b"")[SECTOR_BYTES - 1 : SECTOR_BYTES + 1])
    assert found == {b"\0\0", b"x\0", b"\0y", b"xy"}


def test_names_survive_independently() -> None:  # SIMFS-2
    def make(fs: SimFs) -> None:
        for name in "abc":
            fs.create(f"/{name}")

    found = after_cuts(make, lambda fs: "".join(sorted(fs.directory("/").live)))
    assert found == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_rename_survives_whole_or_not_at_all() -> None:  # SIMFS-2
    def make(fs: SimFs) -> None:
        for name in ("target", "source"):
            write(fs, f"/{name}", name.encode())
        fs.make_all_durable()
        fs.rename("/source", "/target")

    found = after_cuts(make, lambda fs: (content(fs, "/target"), content(fs, "/source")))
    assert found == {(b"target", b"source"), (b"source", None)}


def test_a_link_and_an_unlink_may_be_undone() -> None:  # SIMFS-2
    def make(fs: SimFs) -> None:
        write(fs, "/a", b"a")
        fs.make_all_durable()
        fs.link("/a", "/b")
        fs.unlink("/a")

    found = after_cuts(make, lambda fs: (content(fs, "/a"), content(fs, "/b")))
    assert found == {(b"a", b"a"), (b"a", None), (None, b"a"), (None, None)}


def test_a_rename_across_directories_needs_one_sync_to_arrive_and_two_to_leave() -> None:  # SIMFS-3
    def make(fs: SimFs, synced: str) -> None:
        fs.make_directory("/from")
        fs.make_directory("/to")
        write(fs, "/from/a", b"a")
        fs.make_all_durable()
        fs.rename("/from/a", "/to/a")
        fs.sync_directory(synced)

    def names(fs: SimFs) -> tuple[bool, bool]:
        return content(fs, "/from/a") is not None, content(fs, "/to/a") is not None

    assert after_cuts(lambda fs: make(fs, "/to"), names) == {(True, True), (False, True)}
    assert after_cuts(lambda fs: make(fs, "/from"), names) == {(False, True)}


def test_what_was_superseded_never_comes_back() -> None:  # SIMFS-4
    def make(fs: SimFs) -> None:
        fs.make_directory("/from")
        fs.make_directory("/to")
        for path in ("/to/old", "/from/new"):
            write(fs, path, path.encode())
        fs.make_all_durable()
        fs.link("/to/old", "/to/a")
        fs.rename("/from/new", "/to/a")
        fs.sync_directory("/from")

    assert after_cuts(make, lambda fs: content(fs, "/to/a")) == {b"/from/new"}


def after_failed_fsync(seed: int, *, later_sync: bool) -> tuple[bytes | None, bytes | None]:
    """What a reader sees after a failed fsync of `new` over `old`, and what a power cut then leaves."""
    fs = SimFs()
    write(fs, "/a", b"old")
    fs.make_all_durable()
    fs.write(fs.file("/a"), 0, b"new")
    fs.drop_dirty(fs.file("/a"), random.Random(seed))
    if later_sync:
        fs.sync(fs.file("/a"))
    seen = content(fs, "/a")
    fs.power_cut(random.Random(seed))
    return seen, content(fs, "/a")


@pytest.mark.parametrize("later_sync", [False, True])
def test_a_failed_fsync_loses_the_pages_for_good(later_sync: bool) -> None:  # SIMFS-5
    found = {after_failed_fsync(seed, later_sync=later_sync) for seed in SEEDS}
    assert found == {(b"new", b"new"), (b"new", b"old"), (b"old", b"old")}


def test_a_truncation_may_be_undone() -> None:  # SIMFS-1
    def make(fs: SimFs) -> None:
        write(fs, "/a", b"0123456789")
        fs.make_all_durable()
        fs.truncate(fs.file("/a"), 4)

    assert after_cuts(make, lambda fs: content(fs, "/a")) == {b"0123456789", b"0123"}


@pytest.mark.parametrize(
    ("act", "number"),
    [
        (lambda fs: fs.create("/a"), errno.EEXIST),
        (lambda fs: fs.create("/none/a"), errno.ENOENT),
        (lambda fs: fs.create("/a/b"), errno.ENOTDIR),
        (lambda fs: fs.make_directory("/d"), errno.EEXIST),
        (lambda fs: fs.remove_directory("/d"), errno.ENOTEMPTY),
        (lambda fs: fs.remove_directory("/a"), errno.ENOTDIR),
        (lambda fs: fs.link("/d/b", "/a"), errno.EEXIST),
        (lambda fs: fs.link("/d", "/e"), errno.EISDIR),
        (lambda fs: fs.rename("/none", "/a"), errno.ENOENT),
        (lambda fs: fs.rename("/a", "/d"), errno.EISDIR),
        (lambda fs: fs.unlink("/none"), errno.ENOENT),
        (lambda fs: fs.unlink("/d"), errno.EISDIR),
        (lambda fs: fs.sync_directory("/a"), errno.ENOTDIR),
    ],
)
def test_errors_are_those_of_the_kernel(act: Callable[[SimFs], None], number: int) -> None:
    fs = SimFs()
    fs.create("/a")
    fs.make_directory("/d")
    fs.create("/d/b")
    before = fs.dump()
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        act(fs)
    assert caught.value.errno == number
    assert fs.dump() == before


def test_renaming_a_name_of_the_same_file_does_nothing() -> None:
    fs = SimFs()
    fs.create("/a")
    fs.link("/a", "/b")
    fs.rename("/a", "/b")
    assert fs.dump() == ["/a 0", "/b 0"]
