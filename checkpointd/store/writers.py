"""The writer of a temporary file, and whether that process still lives.

A writer is `<host>.<boot>.<pid namespace>.<pid>.<start time>.<random>`: exact where this process can look (same boot, same pid
namespace), and never a matter of clocks: a pid that was given again has another start time. Everything else counts as dead.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal, TypeAlias

Life: TypeAlias = Literal["running", "ended", "unknown"]
"""`unknown`: the process was started on another machine, before this one's last boot, or in another container."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_writer() -> str:
    """A name for this process, different at every call."""
    return f"{_place()}.{os.getpid()}.{_stat(os.getpid())[1]}.{secrets.token_hex(4)}"


def is_alive(writer: str) -> bool:
    """Whether `writer` is a process that runs on this machine now."""
    place, pid, start = _split(writer)
    if place != _place() or not _exists(pid):
        return False
    state, now = _stat(pid)
    return state not in _DEAD and (now == start or not now)


def is_within_sight(writer: str) -> bool:
    """Whether `is_alive` can tell for sure: `writer` was named in this boot of this machine and this pid namespace."""
    return _split(writer)[0] == _place()


def has_ended(writer: str) -> bool:
    """Whether `writer` is known to run no more."""
    return is_within_sight(writer) and not is_alive(writer)


def life_of(writer: str) -> Life:
    """Whether `writer` runs, as far as it can be told from here."""
    if not is_within_sight(writer):
        return "unknown"
    return "running" if is_alive(writer) else "ended"


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


_DEAD = ("Z", "X")
"""States of a process that has ended and that its parent has not asked about: in a container, perhaps for ever."""


def _stat(pid: int) -> tuple[str, str]:
    """State of `pid`, and its start time in clock ticks since boot; empty where they cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The command may hold spaces and parentheses; field 3 is the first after its closing one, field 22 the twentieth.
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]
