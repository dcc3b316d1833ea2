"""Tests whether the checkpoints fit: bytes, inodes, and quotas, which show only when the space is really reserved."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from functools import partial
from typing import Final

from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.phrases import byte_size
from checkpointd.system_errors import explained

INODES_PER_CHECKPOINT: Final = 16
"""Enough for a few ranks. A large job needs five files for each rank, and file systems of that size have enough inodes."""
SPARE: Final = 0.05
"""The share of a file system that should stay free: most file systems slow down or fragment when they are fuller."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_finding = partial(Finding, "space")


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The figures of statvfs: bytes and inodes, free for this user and in total. `all_inodes` 0: the number is not fixed."""

    free_bytes: int
    all_bytes: int
    free_inodes: int
    all_inodes: int


def room(path: str) -> FreeSpace:
    """The free space at `path`."""
    found = os.statvfs(path)
    return FreeSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, found.f_favail, found.f_files)


def free_space(found: FreeSpace, state: StateSize | None, copies: int) -> Finding:
    """Whether `copies` of the state fit. Counts raw bytes, since fast disks get uncompressed chunks."""
    seen = f"{byte_size(found.free_bytes)} of {byte_size(found.all_bytes)} are free"
    if found.free_bytes == 0:
        return _finding("free-space", "fail", seen, "free some space: nothing can be written")
    if state is None:
        return _finding("free-space", "note", seen, "how much is needed is not known yet: give --state-bytes, or save once")
    needed = state.total_bytes * copies
    seen = f"{seen}; {copies} x {byte_size(state.total_bytes)} are needed ({state.source})"
    if found.free_bytes < state.total_bytes:
        return _finding("free-space", "fail", seen, "not one checkpoint fits: free some space, or use a larger disk")
    if found.free_bytes < needed:
        return _finding("free-space", "warn", seen, "free some space, or keep fewer checkpoints: delete old tags")
    if found.free_bytes - needed < SPARE * found.all_bytes:
        return _finding(
            "free-space", "note", seen, "they fit, but leave less than 5 % free, which makes many file systems slow"
        )
    return _finding("free-space", "ok", seen)


def inodes(found: FreeSpace, copies: int) -> Finding:
    """Free inodes: every object is a file."""
    if found.all_inodes == 0:
        return _finding("inodes", "ok", "this file system has no fixed number of files")
    seen = f"{found.free_inodes} more files can be made"
    if found.free_inodes < INODES_PER_CHECKPOINT * copies:
        return _finding("inodes", "fail", seen, "remove files: checkpoints need inodes, and too few are free")
    return _finding("inodes", "ok", seen)


def reservation(place: str, found: FreeSpace, state: StateSize | None, *, volatile: bool = False) -> Finding:
    """Reserve the size of one state in a file below `place` and release it at once: this is how a quota shows.

    A file system in memory (`volatile`) is left out, because reserving would take the memory itself.
    """
    if volatile:
        return _finding("reservation", "ok", "not tried: this file system lives in memory")
    if state is None:
        return _finding("reservation", "note", "not tried: the size of the state is not known")
    if found.free_bytes < 2 * state.total_bytes:
        return _finding("reservation", "note", "not tried: it would leave too little space to other programs that write here")
    descriptor = os.open(f"{place}/reserved", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        failed = _libc.fallocate(descriptor, 0, 0, state.total_bytes) and ctypes.get_errno()
    finally:
        os.unlink(f"{place}/reserved")
        os.close(descriptor)
    if not failed:
        return _finding("reservation", "ok", f"{byte_size(state.total_bytes)} could be reserved, and were given back")
    if failed in (errno.EOPNOTSUPP, errno.ENOSYS):
        return _finding(
            "reservation",
            "note",
            "this file system cannot reserve space",
            "a full disk is noticed only in the middle of a save; that save then fails, and nothing else does",
        )
    reason, advice = explained(OSError(failed, os.strerror(failed)), "root", place)
    seen = f"{byte_size(state.total_bytes)} cannot be reserved: {reason}"
    if failed == errno.ENOSPC:  # although the file system reports that much as free
        advice = "look for a quota of this user, group or project"
    return _finding("reservation", "fail", seen, advice)
