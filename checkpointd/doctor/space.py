"""Tests whether the checkpoints fit: bytes, inodes, and quotas, by really reserving the space."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from typing import Final

from checkpointd.doctor.finding import Finding, Level, StateSize
from checkpointd.phrases import byte_size

INODES_PER_CHECKPOINT: Final = 16
"""For a few ranks; a job of many needs five files for each rank, which no file system of that size lacks."""
SPARE: Final = 0.05
"""The share of a file system that stays free: most slow down or fragment when they are fuller."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What statvfs says: bytes free for this user and in all, inodes the same (all 0: there is no fixed number of them)."""

    free_bytes: int
    all_bytes: int
    free_inodes: int
    all_inodes: int


def room(path: str) -> FreeSpace:
    """The room at `path`."""
    found = os.statvfs(path)
    return FreeSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, found.f_favail, found.f_files)


def _finding(check: str, level: Level, seen: str, fix: str = "") -> Finding:
    return Finding(topic="space", check=check, level=level, seen=seen, fix=fix)


def free_space(found: FreeSpace, state: StateSize | None, copies: int) -> Finding:
    """Free bytes against `copies` of the state; stored raw, as it is where the disk is fast."""
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
        return _finding("free-space", "note", seen, "it fits, and leaves less than 5 %, where many file systems become slow")
    return _finding("free-space", "ok", seen)


def inodes(found: FreeSpace, copies: int) -> Finding:
    """Free inodes: every object is a file."""
    if found.all_inodes == 0:
        return _finding("inodes", "ok", "this file system has no fixed number of files")
    seen = f"{found.free_inodes} more files can be made"
    if found.free_inodes < INODES_PER_CHECKPOINT * copies:
        return _finding("inodes", "fail", seen, "remove files: no inodes are left for checkpoints, however much space is")
    return _finding("inodes", "ok", seen)


def reservation(place: str, found: FreeSpace, state: StateSize | None, *, volatile: bool = False) -> Finding:
    """One state's size really reserved in a file below `place`, and given back at once: quotas speak only when asked.

    Not on a file system in memory (`volatile`), where reserving takes the memory itself.
    """
    if volatile:
        return _finding("reservation", "ok", "not tried: this file system lives in memory")
    if state is None:
        return _finding("reservation", "note", "not tried: the size of the state is not known")
    if found.free_bytes < 2 * state.total_bytes:
        return _finding("reservation", "note", "not tried: it would leave too little to whatever else writes here")
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
            "a full disk shows only while a save is being written; the save then fails, and nothing else",
        )
    reason = os.strerror(failed)
    if failed == errno.EDQUOT:
        return _finding("reservation", "fail", f"the quota refuses {byte_size(state.total_bytes)}: {reason}", "raise the quota")
    if failed == errno.EFBIG:
        advice = "raise `ulimit -f`, or use a file system that takes larger files"
        return _finding("reservation", "fail", f"a file of {byte_size(state.total_bytes)} is refused: {reason}", advice)
    return _finding(
        "reservation",
        "fail",
        f"{byte_size(state.total_bytes)} cannot be reserved, although as much is said to be free: {reason}",
        "look for a quota of this user, group or project",
    )
