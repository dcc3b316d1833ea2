"""Files of a checkpoint: making them durable, and putting them into or out of the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def files(root: Path) -> list[Path]:
    """Every regular file under `root`, or `root` itself where it is one."""
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())


def size(root: Path) -> int:
    """Bytes of every file under `root`."""
    return sum(path.stat().st_size for path in files(root))


def fsync(path: Path) -> None:
    """Make a file's contents, or a directory's entries, durable."""
    with _opened(path) as fd:
        os.fsync(fd)


def fsync_tree(root: Path) -> None:
    """fsync every file under `root`, every directory under it, and the directory that names it."""
    for path in files(root):
        fsync(path)
    fsync_directories(root)


def fsync_directories(root: Path) -> None:
    """fsync every directory at and under `root`, and the one that names it."""
    if root.is_dir():
        for folder in [path for path in root.rglob("*") if path.is_dir()] + [root]:
            fsync(folder)
    fsync(root.parent)


def warm(root: Path) -> None:
    """Read every file under `root` once, so that its pages are cached."""
    buffer = bytearray(8 << 20)
    for path in files(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(root: Path) -> float:
    """Put every file under `root` out of the page cache; the share of their pages that stayed, 0 to 1."""
    stayed, total = 0, 0
    for path in files(root):
        with _opened(path) as fd:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            stayed += _resident_pages(fd)
            total += -(-os.fstat(fd).st_size // PAGE)
    return stayed / total if total else 0.0


def _resident_pages(fd: int) -> int:
    length = os.fstat(fd).st_size
    if length == 0:
        return 0
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as mapping:
        flags = np.zeros(-(-length // PAGE), dtype=np.uint8)
        window = np.frombuffer(mapping, dtype=np.uint8)
        failed = _LIBC.mincore(ctypes.c_void_p(window.ctypes.data), ctypes.c_size_t(length), ctypes.c_void_p(flags.ctypes.data))
        del window  # a mapping with a view on it cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((flags & 1).sum())


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
