"""Errors of the system in words, and whether waiting can help."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import get_args

import pytest

from checkpointd import system_errors
from checkpointd.errors import LinkError, StoreError, StoreFullError, UnreadableError
from checkpointd.system_errors import NeverReached, Place, explained, in_words, lasts

MET = (
    *("EACCES", "EDQUOT", "EFBIG", "EIO", "EMFILE", "ENAMETOOLONG", "ENFILE", "ENODEV", "ENOLCK", "ENOMEM", "ENOSPC"),
    *("ENOSYS", "ENOTCONN", "ENOTDIR", "EOPNOTSUPP", "EPERM", "EROFS", "ESTALE", "ETIMEDOUT", "EUCLEAN"),
)
"""What people meet on real machines."""


def of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("place", get_args(Place))
@pytest.mark.parametrize("name", MET)
def test_what_people_meet_has_a_reason_and_advice_at_every_place(name: str, place: Place) -> None:
    number = getattr(errno, name)
    reason, advice = explained(of(number), place)
    assert reason == f"[{errno.errorcode[number]}] {os.strerror(number)}"
    assert advice
    assert in_words(of(number), place) == f"{reason}: {advice}"


@pytest.mark.parametrize(
    ("name", "place", "named"),
    [
        ("EINVAL", "directory", "fsync of a directory"),
        ("EOPNOTSUPP", "directory", "fsync of a directory"),
        ("ENOSYS", "directory", "fsync of a directory"),
        ("ENOSYS", "snapshot", "memfd"),
        ("EPERM", "snapshot", "memfd"),
        ("EAGAIN", "snapshot", "ulimit -l"),
        ("EMLINK", "link", "hard links"),
        ("EDQUOT", "root", "quota"),
        ("EMFILE", "spool", "ulimit -n"),
        ("EADDRINUSE", "listener", "another process listens"),
        ("ECONNREFUSED", "socket", "nobody listens"),
        ("ENOSPC", "export", "another file system"),
    ],
)
def test_what_stands_in_the_way_is_named(name: str, place: Place, named: str) -> None:
    assert named in in_words(of(getattr(errno, name)), place)


@pytest.mark.parametrize("place", ["root", "snapshot", "export", "spool"])
def test_a_limit_on_file_sizes_is_named_with_its_size(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ulimit" not in in_words(of(errno.EFBIG), place)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 << 20, 8 << 20))
    assert "(`ulimit -f` is 4.0 MiB)" in in_words(of(errno.EFBIG), place)


@pytest.mark.parametrize(
    ("inodes", "free", "blocks", "words"),
    [
        (60, 0, 50_000, "(0 of 60 inodes and 195.3 MiB are free): .*no inodes"),
        (60, 3, 50_000, "(3 of 60 inodes and 195.3 MiB are free): .*no inodes"),
        (60, 3, 1, "(4.0 KiB are free): free some space"),
        (10_000, 9_000, 50_000, "(195.3 MiB are free): free some space"),
        (0, 0, 50_000, "(195.3 MiB are free): free some space"),  # such as btrfs, which has no fixed number
    ],
)
def test_a_full_file_system_says_what_it_lacks(
    inodes: int, free: int, blocks: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs_result((4096, 4096, 2 * blocks, blocks, blocks, inodes, free, free, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    start, _, rest = words.partition(": ")
    assert re.search(f"{re.escape(start)}: {rest}", in_words(of(errno.ENOSPC), "root", "/somewhere"))


def test_a_place_that_cannot_be_looked_at_says_nothing_of_its_space(tmp_path: Path) -> None:
    assert "free)" not in in_words(of(errno.ENOSPC), "root", str(tmp_path / "missing"))


def test_an_error_without_a_number_is_told_in_its_own_words() -> None:
    assert in_words(OSError("AF_UNIX path too long"), "listener") == "AF_UNIX path too long"


LASTING = ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "ENAMETOOLONG", "ENOSYS", "EOPNOTSUPP", "EINVAL", "ELOOP")
PASSING = ("EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EBUSY", "EMFILE", "ENFILE", "ENOTCONN", "ENOENT", "ENODEV", "EINTR")


@pytest.mark.parametrize("name", [*LASTING, *PASSING])
def test_waiting_helps_only_where_it_can(name: str) -> None:
    cause = of(getattr(errno, name))
    assert lasts(cause) == (name in LASTING)
    told = StoreError("so this failed")
    told.__cause__ = UnreadableError("it failed")
    told.__cause__.__cause__ = cause
    assert lasts(told) == (name in LASTING)


def test_what_lasts_without_a_number() -> None:
    assert lasts(StoreFullError("no space"))
    assert lasts(NeverReached("no answer"))
    assert lasts(PermissionError("403"))
    assert not lasts(None)
    assert not lasts(StoreError("the server is away"))
    assert not lasts(LinkError("a link"))


def test_every_place_of_the_table_is_one_and_every_entry_is_a_sentence_part() -> None:
    for (number, place), words in system_errors._WORDS.items():
        assert place is None or place in get_args(Place)
        assert number in errno.errorcode
        assert words[0].islower() or words.startswith(("/proc", "`"))
        assert not words.endswith(".")
