"""Tests the root's file system by using it: the checks write in `place`, a directory of the doctor's own.

A check returns its Finding. It raises OSErrors that it does not expect, and the caller turns them into findings.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from checkpointd.doctor.finding import Finding
from checkpointd.store.posix.failures import is_without_links
from checkpointd.system_errors import NO_HARD_LINKS, explained

DIRECT_BYTES: Final = 1 << 20
REPLACEMENTS: Final = 64
SLOW_SYNC_S: Final = 0.25
SKEW_S: Final = 2.0
"""A difference that is harmless: time stamps of file systems may be as coarse as this."""


_finding = partial(Finding, "root")


def direct_io(place: str) -> Finding:
    """O_DIRECT: chunks go from the snapshot to the disk without a copy and without crowding the page cache."""
    slower = (
        "saves go through the page cache, which is slower and displaces the data loader's files; a local NVMe disk has O_DIRECT"
    )
    with mmap.mmap(-1, DIRECT_BYTES) as block:
        block.write(bytes(range(256)) * (DIRECT_BYTES // 256))
        try:
            descriptor = os.open(f"{place}/direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return _finding("direct-io", "note", "O_DIRECT is refused here", slower)
        try:
            written = os.pwrite(descriptor, block, 0)
            while written < DIRECT_BYTES:  # short, for example because the disk is full: the next write raises the reason
                written += os.pwrite(descriptor, memoryview(block)[written:], written)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return _finding("direct-io", "note", "O_DIRECT in blocks of 4096 bytes is refused here", slower)
        finally:
            os.close(descriptor)
        with open(f"{place}/direct", "rb") as back:
            same = back.read() == block[:written]
    if not same:
        return _finding("direct-io", "fail", "bytes written by O_DIRECT read back differently", "use another file system")
    return _finding("direct-io", "ok", f"{written} bytes written by O_DIRECT read back the same")


def hard_links(place: str) -> Finding:
    """link(2): votes and outcomes get their names atomically, and only once."""
    first, second, name = (f"{place}/{end}" for end in ("link.1", "link.2", "link.name"))
    _write(first, b"first")
    _write(second, b"second")
    try:
        os.link(first, name)
    except OSError as error:
        if not is_without_links(error):
            raise
        return _finding("hard-links", "fail", f"hard links are refused: {explained(error, 'link')[0]}", NO_HARD_LINKS)
    try:
        os.link(second, name)
    except FileExistsError:
        if _read(name) == b"first" and os.path.samefile(first, name):
            return _finding("hard-links", "ok", "a second link to the same name was refused")
    return _finding("hard-links", "fail", "a second link replaced the first, or the link is a copy", NO_HARD_LINKS)


def rename(place: str) -> Finding:
    """rename(2): while a file is replaced again and again, a reader sees the whole old file or the whole new one."""
    name, bodies = f"{place}/renamed", [bytes([n]) * 8192 for n in (1, 2)]
    _write(name, bodies[0])
    torn: list[str] = []
    replaced = threading.Event()

    def watch() -> None:
        while not replaced.is_set():
            try:
                if _read(name) not in bodies:
                    torn.append("torn")
            except OSError as error:
                if error.errno != errno.ESTALE:
                    torn.append(explained(error, "read")[0])

    reader = threading.Thread(target=watch, name="checkpointd-doctor")
    reader.start()
    try:
        for turn in range(REPLACEMENTS):
            _write(f"{name}.new", bodies[turn % 2])
            os.rename(f"{name}.new", name)
    finally:
        replaced.set()
        reader.join()
    if torn:
        return _finding(
            "rename", "fail", f"while a file was replaced, a reader saw: {torn[0]}", "use a file system whose rename is atomic"
        )
    return _finding("rename", "ok", f"{REPLACEMENTS} replacements while a reader read the file, none torn")


def sync_file(place: str) -> Finding:
    """fsync(2) of a file."""
    descriptor = os.open(f"{place}/synced", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, bytes(4096))
        return _timed("fsync-file", "a file", lambda: os.fsync(descriptor))
    except OSError as error:
        return _cannot_sync("fsync-file", "a file", *explained(error, "root"))
    finally:
        os.close(descriptor)


def sync_directory(place: str) -> Finding:
    """fsync(2) of a directory: without it, a power cut can lose the name of a new file."""
    _write(f"{place}/named", b"")
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _timed("fsync-directory", "a directory", lambda: os.fsync(descriptor))
    except OSError as error:
        return _cannot_sync("fsync-directory", "a directory", *explained(error, "directory"))
    finally:
        os.close(descriptor)


def _timed(check: str, what: str, sync: Callable[[], None]) -> Finding:
    began = time.perf_counter()
    sync()
    seconds = time.perf_counter() - began
    seen = f"fsync of {what} took {seconds * 1e3:.1f} ms"
    if seconds > SLOW_SYNC_S:
        return _finding(
            check,
            "note",
            seen,
            "a commit takes about ten of them: if it is always this slow, find out what else uses the disk",
        )
    return _finding(check, "ok", seen)


def _cannot_sync(check: str, what: str, reason: str, advice: str) -> Finding:
    advice = f"nothing can be made durable here: {advice or 'see the kernel log, or use another file system'}"
    return _finding(check, "fail", f"fsync of {what} failed: {reason}", advice)


def locks(place: str) -> Finding:
    """flock(2): `latest` moves only under a lock."""
    path = f"{place}/lock"
    holder, other = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for _ in range(2))
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _finding("locks", "ok", "flock kept a second holder out")
        return _finding("locks", "fail", "two holders got the same lock", "mount with locking (Lustre: -o flock)")
    except OSError as error:
        return _finding(
            "locks",
            "fail",
            f"flock is refused: {explained(error, 'root')[0]}",
            "mount with locking: NFS without `nolock`, Lustre with `-o flock`",
        )
    finally:
        os.close(holder)
        os.close(other)


def names(place: str) -> Finding:
    """Whether names that differ only in case stay apart, and names with letters outside ASCII stay intact."""
    _write(f"{place}/name", b"lower")
    _write(f"{place}/NAME", b"upper")
    if _read(f"{place}/name") != b"lower":
        advice = "choose tags that differ in more than case, or another root"
        return _finding("names", "warn", "upper and lower case are the same here", advice)
    _write(f"{place}/\N{GREEK SMALL LETTER OMEGA} {'n' * 200}", b"")
    if f"\N{GREEK SMALL LETTER OMEGA} {'n' * 200}" not in os.listdir(place):
        return _finding("names", "warn", "names come back changed", "use tags of plain ASCII")
    return _finding("names", "ok", "names come back as they were given")


def clock(place: str, now: Callable[[], float] = time.time) -> Finding:
    """Whether this machine's clock agrees with the file system's. Only people read these times: no decision uses a clock."""
    before = now()
    path = f"{place}/clock"
    _write(path, b"")
    off = _outside(os.stat(path).st_mtime, before, now())
    if off < SKEW_S:
        return _finding("clock", "ok", "this machine's clock agrees with the file system's")
    return _finding(
        "clock",
        "warn" if off > 60 else "note",
        f"this machine's clock and the file system's are {off:.0f} s apart",
        "checkpointd decides nothing by clocks, but the times that it shows will mislead: let chrony or NTP set both",
    )


def _outside(value: float, low: float, high: float) -> float:
    return max(low - value, value - high, 0.0)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
