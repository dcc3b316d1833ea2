"""Names the process that writes a temporary file, and tells whether that process still runs.

A name is `<host>.<boot>.<pid namespace>.<pid>.<start time>.<random>`. The start time tells a process from a later one with the
same pid, so no clock is compared. Only processes of the same boot and pid namespace can be seen; `is_alive` takes all others
for dead.
"""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

Life: TypeAlias = Literal["running", "ended", "unknown"]
"""`unknown`: the process started on another machine, before this machine's last boot, or in another container."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_writer() -> str:
    """A name for this process; each call makes a new one."""
    return f"{_own(os.getpid())}.{secrets.token_hex(4)}"


@cache
def _own(pid: int) -> str:
    """The part of this process's names that stays the same."""
    return f"{_place()}.{pid}.{_stat(pid)[1]}"


def is_alive(writer: str) -> bool:
    """Whether `writer` is a process that runs on this machine now."""
    place, pid, start = _split(writer)
    if place != _place() or not _exists(pid):
        return False
    state, now = _stat(pid)
    return state not in _DEAD and (now == start or not now)


def is_within_sight(writer: str) -> bool:
    """Whether `is_alive` knows for sure: `writer` was named in this boot of this machine and in this pid namespace."""
    return _split(writer)[0] == _place()


def has_ended(writer: str) -> bool:
    """Whether `writer` has ended for sure."""
    return life_of(writer) == "ended"


def life_of(writer: str) -> Life:
    """Whether `writer` runs, as far as this process can tell."""
    if not is_within_sight(writer):
        return "unknown"
    return "running" if is_alive(writer) else "ended"


def is_this_process(writer: str) -> bool:
    """Whether `writer` is a name of this process."""
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
"""States of a process that has ended but was not waited for; in a container it may stay so for ever."""


def _stat(pid: int) -> tuple[str, str]:
    """State of `pid`, and its start time in clock ticks since boot; both empty if they cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The command may contain spaces and parentheses. After its closing parenthesis come fields 3, 4, ...; the start time is 22.
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]
