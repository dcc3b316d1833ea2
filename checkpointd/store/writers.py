"""Who wrote a temporary file, and whether that process still lives.

A writer is `<host>.<boot>.<pid namespace>.<pid>.<start time>.<random>`: exact where this process can look (same boot, same pid
namespace), and never a matter of clocks: a pid that was given again has another start time. Everything else counts as dead.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_writer() -> str:
    """A name for this process, different at every call."""
    return f"{_place()}.{os.getpid()}.{_start_time(os.getpid())}.{secrets.token_hex(4)}"


def is_alive(writer: str) -> bool:
    """Whether `writer` is a process that runs on this machine now."""
    place, pid, start = _split(writer)
    if place != _place() or not _exists(pid):
        return False
    now = _start_time(pid)
    return now == start or not now


def is_within_sight(writer: str) -> bool:
    """Whether `is_alive` can tell for sure: `writer` was named in this boot of this machine and this pid namespace."""
    return _split(writer)[0] == _place()


def has_ended(writer: str) -> bool:
    """Whether `writer` is known to run no more."""
    return is_within_sight(writer) and not is_alive(writer)


def is_this_process(writer: str) -> bool:
    """Whether this process was named so."""
    return _split(writer) == _split(new_writer())


def _split(writer: str) -> tuple[str, int, str]:
    parts = writer.rsplit(".", 3)
    if len(parts) != 4 or not parts[1].isdecimal():
        return "", 0, ""
    return parts[0], int(parts[1]), parts[2]


def _place() -> str:
    """This host, since its last boot, as seen from this pid namespace."""
    try:
        boot = _BOOT_ID.read_text().strip().replace("-", "")[:12]
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        boot, namespace = "unknown", "0"
    return f"{os.uname().nodename.replace('/', '_')}.{boot}.{namespace}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return pid < 1 << 31
    return True


def _start_time(pid: int) -> str:
    """Start time of `pid` in clock ticks since boot; empty where it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The command may hold spaces and parentheses; field 22 is the twentieth after its closing one.
    return stat.rpartition(")")[2].split()[19]
