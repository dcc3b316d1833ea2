"""Memory and CPU of a process and all its descendants, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """`pid` and its living descendants."""
    found = [pid]
    for parent in found:
        found.extend(_children(parent))
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            children.extend(int(child) for child in (task / "children").read_text().split())
    except OSError:
        pass  # it ended while we looked
    return children


def memory(pids: list[int]) -> int:
    """Bytes that the processes of one rank hold: their private pages, and once what they share.

    Shared memory counts as much as the process with the most of it: a trainer and its writer map the same
    snapshot. Pages of files (libraries, page cache, a mapped checkpoint) do not count.
    """
    private, shared = 0, 0
    for pid in pids:
        anonymous, shmem = _resident(pid)
        private += anonymous
        shared = max(shared, shmem)
    return private + shared


def private(pids: list[int]) -> int:
    """Bytes of these processes that no other process shares."""
    return sum(_resident(pid)[0] for pid in pids)


def _resident(pid: int) -> tuple[int, int]:
    fields = {"RssAnon": 0, "RssShmem": 0}
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        name, _, value = line.partition(":")
        if name in fields:
            fields[name] = int(value.split()[0]) * 1024
    return fields["RssAnon"], fields["RssShmem"]


def cpu_seconds(pids: list[int]) -> float:
    """User and system CPU seconds of these processes together, to 10 ms each."""
    return sum(_cpu(pid) for pid in pids)


def _cpu(pid: int) -> float:
    try:
        after_name = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S


def busy_seconds() -> float:
    """CPU seconds that the whole machine has spent since it started, kernel threads included."""
    user, nice, system, _idle, _iowait, irq, softirq = (
        int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def own_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
