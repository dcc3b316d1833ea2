"""Tests whether the snapshots fit into memory, and whether the arena can allocate as it needs to.

A rank's snapshots live in two slots, each as large as what it saves, in a memfd. That is memory of the node, and counts in the
trainer's cgroup; the size of /dev/shm does not matter.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpointd.doctor.finding import Finding, Level, StateSize
from checkpointd.phrases import byte_size

SLOTS: Final = 2
WRITER_BYTES: Final = 256 << 20
"""What one rank's writer takes beside its snapshots, at most (PersistConfig.budget_bytes)."""
_MADV_POPULATE_WRITE: Final = 23
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x0010
"""With F_SEAL_FUTURE_WRITE: what a sidecar asks of a slot."""
_UNLIMITED: Final = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


def _finding(check: str, level: Level, seen: str, fix: str = "") -> Finding:
    return Finding(topic="memory", check=check, level=level, seen=seen, fix=fix)


# --- how it can be had -------------------------------------------------------------------------------------------


def memfd() -> Finding:
    """memfd_create and its seals: memory that can be handed to the sidecar, which no one can pull away under it."""
    size = 4 * mmap.PAGESIZE
    try:
        descriptor = os.memfd_create("checkpointd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _finding("memfd", "fail", f"memfd_create is refused: {error.strerror}", _why_no_memfd())
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as mapped:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapped[:1] = b"x"
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            return _finding("memfd", "ok", "memfd_create works, and its seals hold")
        return _finding("memfd", "fail", "a sealed memfd could be shrunk", "use a real Linux kernel, 5.4 or newer")
    except OSError as error:
        return _finding("memfd", "fail", f"a memfd cannot be sealed and mapped: {error.strerror}", _why_no_memfd())
    finally:
        os.close(descriptor)


def _why_no_memfd() -> str:
    if _text("/proc/sys/vm/memfd_noexec") == "2":
        return "set vm.memfd_noexec to 1 or 0"
    return "let the container's seccomp profile allow memfd_create, fcntl and ftruncate"


def populate() -> Finding:
    """MADV_POPULATE_WRITE: pages are there before the first save needs them."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as mapped:
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        failed = libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(len(mapped)), _MADV_POPULATE_WRITE) and ctypes.get_errno()
    if not failed:
        return _finding("populate", "ok", "memory can be made ready ahead of a save (MADV_POPULATE_WRITE)")
    return _finding(
        "populate",
        "note",
        f"MADV_POPULATE_WRITE is refused: {os.strerror(failed)}",
        "the first two saves are slower, as their pages are made while they are copied; Linux 5.14 and newer have it",
    )


def locked(state: StateSize | None, *, limit: int | None = None, gpu: bool | None = None) -> Finding:
    """RLIMIT_MEMLOCK (`limit` bytes) against what CUDA pins: the slots. Without a GPU nothing is pinned."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if gpu is None:
        gpu = os.path.exists("/dev/nvidiactl")
    if soft == resource.RLIM_INFINITY:
        return _finding("locked-memory", "ok", "no limit on locked memory")
    seen = f"{byte_size(soft)} may be locked"
    if not gpu:
        return _finding("locked-memory", "ok", f"{seen}; there is no NVIDIA GPU here, so nothing is pinned")
    if state is not None and soft >= SLOTS * state.node_bytes:
        return _finding("locked-memory", "ok", f"{seen}, and two slots have {byte_size(SLOTS * state.node_bytes)}")
    return _finding(
        "locked-memory",
        "warn",
        f"{seen}, less than the slots need",
        "where pinning is refused, copies from the GPU are slower and hold training: `ulimit -l unlimited`, "
        "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (containers)",
    )


# --- how much there is -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes of this machine: all, what could be had now, and what this cgroup may have (None: no limit)."""

    total: int
    available: int
    limit: int | None


def measured() -> MachineMemory:
    """What the kernel says of this machine and this cgroup."""
    fields = dict(line.split(":", 1) for line in (_text("/proc/meminfo") or "").splitlines())
    total, available = (int(fields.get(name, "0").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return MachineMemory(total, available, cgroup_limit(_text("/proc/self/cgroup") or "", _text))


def fits(found: MachineMemory, state: StateSize | None) -> Finding:
    """Two slots of what this node saves, and its writer, against the memory."""
    bound = found.total if found.limit is None else min(found.total, found.limit)
    what = f"{byte_size(bound)} of memory" + (" (limit of this cgroup)" if bound < found.total else "")
    seen = f"{what}, {byte_size(found.available)} available now"
    if state is None:
        return _finding("memory", "note", seen, "how much is needed is not known yet: give --state-bytes, or save once")
    needed = SLOTS * state.node_bytes + WRITER_BYTES
    seen = f"{seen}; two snapshots and the writer take {byte_size(needed)}"
    if needed > bound:
        if not state.share_known:
            return _finding("memory", "warn", f"{seen} if one node holds all of the state", "if it spans several: give --nodes")
        return _finding("memory", "fail", seen, "use more nodes or more memory, or raise the cgroup's limit")
    if needed > min(bound, found.available):
        return _finding("memory", "note", seen, "what else runs here must leave that much, beside the trainer's own memory")
    return _finding("memory", "ok", seen)


def cgroup_limit(cgroups: str, read: Callable[[str], str | None]) -> int | None:
    """The least memory limit of the cgroups in `cgroups` (/proc/self/cgroup) and of those above, in bytes; None: none."""
    limits: list[int] = []
    for line in cgroups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            limits += _limits_up("/sys/fs/cgroup", path, "memory.max", read)
        elif "memory" in controllers.split(","):
            limits += _limits_up("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", read)
    return min(limits, default=None)


def _limits_up(mount: str, path: str, name: str, read: Callable[[str], str | None]) -> list[int]:
    parts = [part for part in path.split("/") if part]
    found = []
    for depth in range(len(parts) + 1):
        text = read("/".join([mount, *parts[:depth], name]))
        if text is not None and text.isdecimal() and int(text) < _UNLIMITED:
            found.append(int(text))
    return found


def overcommit(mode: str | None) -> Finding:
    """vm.overcommit_memory."""
    if mode == "2":
        return _finding(
            "overcommit",
            "note",
            "vm.overcommit_memory is 2: memory must be there when it is asked for",
            "slots count at once, in full: raise vm.overcommit_ratio if a slot is refused",
        )
    return _finding("overcommit", "ok", "memory is taken as it is used")


def overcommit_mode() -> str | None:
    return _text("/proc/sys/vm/overcommit_memory")


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
