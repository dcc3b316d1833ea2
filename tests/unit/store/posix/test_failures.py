"""System errors in words (STORE-6)."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from checkpointd.errors import StoreError, StoreFullError, UnreadableError
from checkpointd.store.posix.directories import DirectoryNotSynced
from checkpointd.store.posix.failures import is_without_links, links_error, store_error, swept_error


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_names_what_where_and_why(number: int) -> None:
    error = store_error(OSError(number, os.strerror(number)), doing="writing", key="t/a/outcome", url="/mnt/ckpts")
    assert type(error) is (StoreFullError if number in {errno.ENOSPC, errno.EDQUOT} else StoreError)
    for word in ("writing", "t/a/outcome", "/mnt/ckpts", errno.errorcode[number], os.strerror(number)):
        assert word in str(error)


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_whatever_keeps_from_reading_is_no_damage_and_says_nothing_of_writing(number: int) -> None:
    error = store_error(OSError(number, os.strerror(number)), doing="reading", key="k", url="/r", reads=True)
    assert type(error) is UnreadableError
    assert errno.errorcode[number] in str(error)
    assert "save again" not in str(error)


def test_missing_hard_links_and_swept_files_are_told() -> None:
    error = OSError(errno.EPERM, os.strerror(errno.EPERM))
    assert is_without_links(error)
    assert not is_without_links(OSError(errno.ENOSPC, ""))
    assert "hard links" in str(links_error(error, key="k", url="/r"))
    assert "newer start of this job" in str(swept_error(key="k", url="/r"))


def test_a_full_file_system_says_how_much_is_free(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert re.search(
        r"No space left on device \([\d.]+ .iB are free\): free some space",
        str(store_error(full, doing="writing", key="k", url=str(tmp_path))),
    )
    assert "free)" not in str(store_error(full, doing="writing", key="k", url="memory://"))


def test_a_file_system_without_fsync_of_directories_is_named() -> None:
    error = DirectoryNotSynced(errno.EINVAL, "Invalid argument", "/r/t")
    assert "fsync of a directory" in str(store_error(error, doing="creating", key="t/a/outcome", url="/r"))
    assert "fsync" not in str(store_error(OSError(errno.EINVAL, "Invalid argument"), doing="creating", key="k", url="/r"))
