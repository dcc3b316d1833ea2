"""A job whose storage refuses in the middle of a save, and then works again.

Each time: every rank's handle has the error at once (the deadline is one that no test lives to see), training goes on, nothing
of the failed save is left lying, and the next save commits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd_client import Checkpointer
from tests.builders import objects
from tests.faults import mounts, strace_faults
from tests.faults.jobs import End, Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("mounts")]

MIB = 1 << 20
SOON_S = 0.5
"""How long ranks wait for space where nobody frees any."""


def failed_at_once(job: Job, step: int, words: str) -> list[End]:
    """Save `step`, which fails on every rank, for the reason that `words` say."""
    ends = job.save(step)
    assert {end.phase for end in ends} <= {"failed", "aborted"}, ends
    assert any(words in end.message for end in ends), ends
    for end in ends:
        assert words in end.message or words in end.cause, ends
    return ends


def left_lying(root: Path, step: int) -> list[str]:
    """What the save of `step` still occupies, beside its record and the votes."""
    bulk = [path for suffix in (".chunks", ".index") for path in objects(root / f"global_step{step}", suffix)]
    return [str(path.relative_to(root)) for path in bulk + list((root / ".checkpointd" / "tmp").glob("*"))]


def goes_on(job: Job, root: Path, *, failed: int, step: int) -> None:
    """The storage works again: the next save commits, and nothing of the failed one is left."""
    job.must_commit(step)
    job.must_load(step)
    wait_until(lambda: not left_lying(root, failed), f"the pieces of global_step{failed} go")


# --- no space ---


@pytest.fixture
def small() -> Iterator[Path]:
    with mounts.tmpfs(16 * MIB) as path:
        yield path


@pytest.mark.root
@pytest.mark.parametrize("compression", ["none", "planes"])
def test_space_that_ends_in_the_middle_of_a_save(pair: Job, small: Path, compression: str) -> None:
    """Raw chunks reserve their space and fail at once; encoded ones fail wherever they are."""
    pair.all("look_for_room", seconds=SOON_S)
    root = small / "root"
    pair.open(root, nbytes=3 * MIB, compression=compression)
    pair.must_commit(1)
    ballast = small / "ballast"
    ballast.write_bytes(bytes(5 * MIB))
    failed_at_once(pair, 2, "No space left on device")
    wait_until(lambda: not left_lying(root, 2), "the pieces of global_step2 go")
    failed_at_once(pair, 3, "No space left on device")
    assert (root / "latest").read_text() == "global_step1\n"
    pair.must_load(1)
    ballast.unlink()
    goes_on(pair, root, failed=3, step=4)
    pair.all("close")
    pair.all("look_for_room")


@pytest.mark.nightly
@pytest.mark.root
def test_a_start_on_a_full_disk_finds_the_newest_checkpoint(pair: Job, small: Path) -> None:
    """A job that died has filled it, say; starting needs to write, too."""
    root = small / "root"
    pair.open(root, nbytes=2 * MIB)
    pair.must_commit(1)
    pair.all("close")
    ballast = small / "ballast"
    mounts.fill(ballast)
    pair.open(root, nbytes=2 * MIB)
    pair.must_load(1)
    failed_at_once(pair, 2, "No space left on device")
    ballast.unlink()
    goes_on(pair, root, failed=2, step=3)
    pair.all("close")


@pytest.mark.nightly
@pytest.mark.root
def test_a_checkpoint_can_be_deleted_on_a_disk_that_is_full_to_the_last_byte(small: Path) -> None:
    root = small / "root"
    with Checkpointer(root, retention=None) as ckpt:
        for step in range(3):
            ckpt.save(step, {"weights": torch.randn(1 << 18)}).wait()
    mounts.fill(small / "filler")
    for command in (("delete", "global_step0", "--yes"), ("gc", "--keep-last", "1"), ("recover",)):
        arguments = [sys.executable, "-m", "checkpointd", command[0], str(root), *command[1:]]
        found = subprocess.run(arguments, check=False, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
    with Checkpointer(root) as ckpt:
        assert [found.tag for found in ckpt.list()] == ["global_step2"]


@pytest.mark.nightly
@pytest.mark.root
@pytest.mark.parametrize(
    ("direct", "words"),
    [(True, "writing 'global_step2"), (False, "'global_step2")],
)
def test_space_that_is_promised_and_not_there(pair: Job, direct: bool, words: str) -> None:
    """An ext4 with more space than the memory below it: it reserves what is asked for, and a direct write then finds no place.

    Of what goes through the page cache, the end of a large write or fsync says so.
    """
    with mounts.tmpfs(32 * MIB) as memory, mounts.ext4_image(64 * MIB, memory) as mounted:
        reserve(mounted.image, 12 * MIB)
        root = mounted.path / "root"
        pair.open(root, nbytes=4 * MIB, compression="none", direct=direct)
        pair.must_commit(1)
        ballast = memory / "ballast"
        mounts.fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - MIB)  # the announcement finds a place, its chunks do not
        for end in failed_at_once(pair, 2, "[ENOSPC] No space left on device"):
            assert words in end.message
        pair.must_load(1)
        ballast.unlink()
        goes_on(pair, root, failed=2, step=3)
        pair.all("close")


def reserve(image: Path, nbytes: int) -> None:
    """Back the beginning of an image, where ext4 keeps its journal and its tables: space ends for data alone."""
    with image.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


# --- read-only ---


@pytest.mark.root
def test_a_root_that_becomes_read_only(pair: Job, small: Path) -> None:
    root = small / "root"
    pair.open(root, nbytes=MIB)
    pair.must_commit(1)
    mounts.remount(small, "ro")
    failed_at_once(pair, 2, "the file system is mounted read-only")
    pair.must_load(1)
    mounts.remount(small, "rw")
    goes_on(pair, root, failed=2, step=3)
    pair.all("close")


# --- errors of the device ---


@pytest.mark.parametrize("calls", ["fsync", pytest.param("pwrite64", marks=pytest.mark.nightly)])
def test_an_error_of_the_device_under_one_rank(tmp_path: Path, calls: str) -> None:
    root = tmp_path / "root"
    chunks = root / "global_step2" / "00000001-0" / "00001-0.chunks"
    log = tmp_path / "strace"
    prefix = strace_faults.prefix(calls=calls, on=[chunks], fault="error=EIO", log=log)
    with Job(folder=tmp_path, prefixes={1: prefix}) as job:
        job.open(root, compression="none")
        job.must_commit(1)
        ends = failed_at_once(job, 2, "[EIO] Input/output error: the device or the file server failed")
        assert [end.phase for end in ends] == ["aborted", "failed"]
        assert "(INJECTED)" in log.read_text()
        assert not chunks.exists()
        goes_on(job, root, failed=2, step=3)
