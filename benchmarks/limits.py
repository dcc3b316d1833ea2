"""The machine's own limits, measured in the same run as the systems: seconds per GiB.

Run as `python benchmarks/limits.py DIR GIB`, it prints one JSON object.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

_BLOCK = 8 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds per GiB, one thread."""

    memcpy_reused: float
    memcpy_fresh: float
    write_buffered: float
    write_buffered_fsync: float
    write_direct_fsync: float
    read_cached: float
    read_dropped: float
    read_direct: float


def measure(directory: Path, size: int) -> Limits:
    """Copy, write and read `size` bytes once by each method; the file under `directory` is removed again."""
    size -= size % _BLOCK
    source, reused = mmap.mmap(-1, size), mmap.mmap(-1, size)
    _view(reused).fill(1)  # its pages exist
    _view(source)[:] = np.frombuffer(np.random.default_rng(7).bytes(size), dtype=np.uint8)
    per_gib = _GIB / size
    path = directory / "limits.bin"
    direct = os.O_DIRECT
    try:
        copies = [_seconds(lambda: _copy(source, reused)), _seconds(lambda: _copy(source, mmap.mmap(-1, size)))]
        buffered = _seconds(lambda: _write(path, source, 0, sync=False))
        os.sync()
        synced = _seconds(lambda: _write(path, source, 0, sync=True))
        written = _seconds(lambda: _write(path, source, direct, sync=True))
        _read(path, reused, 0)
        cached = _seconds(lambda: _read(path, reused, 0))
        _drop(path)
        dropped = _seconds(lambda: _read(path, reused, 0))
        _drop(path)
        straight = _seconds(lambda: _read(path, reused, direct))
    finally:
        path.unlink(missing_ok=True)
    times = [*copies, buffered, synced, written, cached, dropped, straight]
    return Limits(**dict(zip(Limits.__dataclass_fields__, (t * per_gib for t in times), strict=True)))


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _view(memory: mmap.mmap) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(memory, dtype=np.uint8)


def _copy(source: mmap.mmap, target: mmap.mmap) -> None:
    np.copyto(_view(target), _view(source))


def _write(path: Path, source: mmap.mmap, flags: int, *, sync: bool) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(source))
        with memoryview(source) as view:
            for at in range(0, len(source), _BLOCK):
                _whole(os.pwrite(fd, view[at : at + _BLOCK], at))
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, target: mmap.mmap, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        with memoryview(target) as view:
            for at in range(0, len(target), _BLOCK):
                _whole(os.preadv(fd, [view[at : at + _BLOCK]], at))
    finally:
        os.close(fd)


def _whole(moved: int) -> None:
    if moved != _BLOCK:
        raise OSError(f"moved {moved} bytes of a block of {_BLOCK}: is the disk full?")


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Path(sys.argv[1]), int(float(sys.argv[2]) * _GIB)))))
