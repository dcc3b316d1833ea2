"""File systems of a test's own, made to fail: full, read-only, without power.

Needs root; skips, with the reason, where mounting is not allowed. Whatever happens in the test, nothing stays mounted and no
loop device stays taken.

Tests that use these belong to one group under xdist, as loop devices are few: `pytest.mark.xdist_group("mounts")`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1024 * 1024

# EXT4_IOC_SHUTDOWN, and its flag for "flush nothing, not even the journal".
_SHUTDOWN = 0x8004587D
_SHUTDOWN_NOTHING_FLUSHED = struct.pack("I", 2)
_COMMIT_S = 600
_NOT_ALLOWED = ("permission denied", "operation not permitted", "must be superuser", "cannot find an unused loop device")


@dataclass(frozen=True, slots=True)
class Ext4:
    """An ext4 in the file `image`, mounted at `path`."""

    path: Path
    image: Path


@contextmanager
def tmpfs(size: int, *options: str) -> Iterator[Path]:
    """A tmpfs of `size` bytes, and with more mount options; yields where it is mounted."""
    with _mount_point() as path:
        _run("mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(path))
        yield path


@contextmanager
def ramfs() -> Iterator[Path]:
    """A ramfs, which has no O_DIRECT; yields where it is mounted."""
    with _mount_point() as path:
        _run("mount", "-t", "ramfs", "ramfs", str(path))
        yield path


@contextmanager
def overlay(layers: Path, *options: str, lower: Path | None = None) -> Iterator[Path]:
    """An overlay whose layers lie in new folders of `layers`, or of `lower`; yields where it is mounted."""
    folders = {"lower": (lower or layers) / "lower", "upper": layers / "upper", "work": layers / "work"}
    for folder in folders.values():
        folder.mkdir()
    with _mount_point() as path:
        placed = ",".join([*(f"{name}dir={folder}" for name, folder in folders.items()), *options])
        _run("mount", "-t", "overlay", "overlay", "-o", placed, str(path))
        yield path


@contextmanager
def ext4_image(size: int, backing_dir: Path) -> Iterator[Ext4]:
    """An ext4 of `size` bytes in a sparse file in `backing_dir`. Where that is smaller, only fsync finds it full."""
    descriptor, name = tempfile.mkstemp(suffix=".ext4", dir=backing_dir)
    image = Path(name)
    try:
        os.ftruncate(descriptor, size)
        os.close(descriptor)
        # The journal is written now: where space ends later, it ends for data.
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=0", name)
        with _mount_point() as path:
            mounted = Ext4(path, image)
            _mount_image(mounted)
            yield mounted
    finally:
        image.unlink()


@contextmanager
def cloning(kind: str, backing_dir: Path) -> Iterator[Path]:
    """A file system that clones files, of `kind` "btrfs" or "xfs", in a sparse file in `backing_dir`; yields its path."""
    program = shutil.which(f"mkfs.{kind}")
    if program is None:
        pytest.skip(f"needs mkfs.{kind}")
    descriptor, name = tempfile.mkstemp(suffix=f".{kind}", dir=backing_dir)
    os.ftruncate(descriptor, 512 * MIB)
    os.close(descriptor)
    try:
        _run(program, "-q", name)
        with _mount_point() as path:
            _run("mount", "-t", kind, "-o", "loop", name, str(path))
            yield path
    finally:
        os.unlink(name)


@contextmanager
def bound(directory: Path, point: Path) -> Iterator[None]:
    """`directory` mounted at `point`, too; nothing is mounted there afterwards."""
    mount(directory, point, "--bind")
    try:
        yield
    finally:
        while is_mounted(point):
            unmount(point)


def is_mounted(point: Path) -> bool:
    """Whether something is mounted at `point`; `Path.is_mount` does not see a directory of the same file system there."""
    mounted = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return str(point.resolve()) in mounted


def mount(what: Path | str, point: Path, *options: str) -> None:
    _run("mount", *options, str(what), str(point))


def power_cut(mounted: Ext4, *, while_off: Callable[[], None] = lambda: None) -> None:
    """Cut the power and put it on again: what was not synced is gone. Files open across the cut only give errors from then on.

    `while_off` is where to end the processes that a real cut would end with it. What had reached the disk stays, flushed or
    not: the disk's own cache is not part of this.
    """
    descriptor = os.open(mounted.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, _SHUTDOWN_NOTHING_FLUSHED)
    finally:
        os.close(descriptor)
    while_off()
    unmount(mounted.path)
    _mount_image(mounted)


def fill(path: Path) -> None:
    """Take all space that there is."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def remount(path: Path, options: str) -> None:
    """Mount what is at `path` anew with `options`, such as `ro` or `size=16m`."""
    _run("mount", "-o", f"remount,{options}", str(path))


@contextmanager
def _mount_point() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="checkpointd-mount-"))
    try:
        yield path
    finally:
        while path.is_mount():
            unmount(path)
        path.rmdir()


def _mount_image(mounted: Ext4) -> None:
    device = _run("losetup", "--find", "--show", str(mounted.image))
    try:
        # No commit by the clock: what nobody syncs is lost in a cut every time, not only most times.
        _run("mount", "-t", "ext4", "-o", f"commit={_COMMIT_S}", device, str(mounted.path))
    finally:
        # Mounted, this leaves the device until the last user is gone, whoever that is.
        _run("losetup", "--detach", device)


def unmount(path: Path) -> None:
    """Unmount, at once or, where a file is still open there, as soon as it is closed."""
    if subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip()
        if any(words in reason.lower() for words in _NOT_ALLOWED):
            pytest.skip(f"cannot mount here: {reason}")
        raise RuntimeError(f"{' '.join(command)}: {reason}")
    return done.stdout.strip()
