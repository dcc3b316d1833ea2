"""The kernel, and the limits of a process."""

from __future__ import annotations

import os
import re
import resource
from functools import partial
from pathlib import Path
from typing import Final

from checkpointd.daemon.sandbox import LANDLOCK_LEAST, LANDLOCK_TOO_OLD, landlock_version
from checkpointd.doctor.finding import Finding

KERNEL_LEAST: Final = (5, 4)
KERNEL_WANTED: Final = (5, 14)
FILES_BASE: Final = 64
FILES_PER_RANK: Final = 8
"""Its connection, up to four slots, and the objects that are being written."""
RANKS_USUAL: Final = 8
RANKS_MAX: Final = 256
BACKLOG_WANTED: Final = 512

_finding = partial(Finding, "machine")


def kernel(release: str) -> Finding:
    """The kernel's version; `release` is the output of `uname -r`."""
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None:
        return _finding("kernel", "note", f"the kernel calls itself {release!r}")
    version = (int(found[1]), int(found[2]))
    seen = f"Linux {version[0]}.{version[1]}"
    if version < KERNEL_LEAST:
        return _finding("kernel", "fail", seen, f"use Linux {KERNEL_LEAST[0]}.{KERNEL_LEAST[1]} or newer")
    if version < KERNEL_WANTED:
        return _finding(
            "kernel", "note", seen, "Linux 5.14 and newer make memory ready ahead of the first save (MADV_POPULATE_WRITE)"
        )
    return _finding("kernel", "ok", seen)


def open_files(soft: int, hard: int) -> Finding:
    """Whether RLIMIT_NOFILE is enough for a sidecar with many ranks."""
    unlimited = resource.RLIM_INFINITY
    ranks = RANKS_MAX if soft == unlimited else (soft - FILES_BASE) // FILES_PER_RANK
    seen = "no limit on open files" if soft == unlimited else f"{soft} files may be open"
    advice = "raise it: `ulimit -n 4096`, LimitNOFILE=4096 (systemd), --ulimit nofile=4096 (containers)"
    if hard not in (unlimited, soft) and hard > soft:
        advice = f"{advice}; up to {hard} without privileges"
    if ranks < 1:
        return _finding("open-files", "fail", f"{seen}: not enough for one rank", advice)
    if ranks < RANKS_USUAL:
        return _finding("open-files", "warn", f"{seen}: enough for about {ranks} ranks on this node", advice)
    if ranks < RANKS_MAX:
        return _finding("open-files", "ok", f"{seen}: enough for about {ranks} ranks on this node")
    return _finding("open-files", "ok", seen)


def backlog(somaxconn: str | None) -> Finding:
    """net.core.somaxconn: how many connections may wait while a sidecar starts."""
    if somaxconn is None or not somaxconn.isdecimal():
        return _finding("backlog", "ok", "the kernel does not say how many connections may wait")
    if int(somaxconn) < BACKLOG_WANTED:
        advice = "if more ranks start at once, some connect only at the second try: raise net.core.somaxconn"
        return _finding("backlog", "note", f"{somaxconn} connections may wait", advice)
    return _finding("backlog", "ok", f"{somaxconn} connections may wait")


def sandbox(landlock: int, *, seccomp: bool) -> Finding:
    """Which restrictions a sidecar can put on itself here (`checkpointd serve --sandbox`)."""
    missing = [name for name, there in (("Landlock", landlock), ("seccomp", seccomp)) if not there]
    if missing:
        advice = "a sidecar runs without them: add landlock to the kernel's `lsm=` list, or use a kernel built with both"
        return _finding("sandbox", "note", f"this kernel has no {' and no '.join(missing)}", advice)
    if landlock < LANDLOCK_LEAST:
        return _finding("sandbox", "note", LANDLOCK_TOO_OLD, "a sidecar runs without Landlock: use Linux 5.19 or newer")
    return _finding("sandbox", "ok", f"this kernel has seccomp, and Landlock {landlock}")


def here() -> list[Finding]:
    """All checks of this machine."""
    return [
        kernel(os.uname().release),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        backlog(_somaxconn()),
        sandbox(landlock_version(), seccomp="Seccomp:" in Path("/proc/self/status").read_text()),
    ]


def _somaxconn() -> str | None:
    try:
        return Path("/proc/sys/net/core/somaxconn").read_text().strip()
    except OSError:
        return None
