"""Tests whether the snapshots fit into memory, and whether the arena can allocate as it needs to.

A rank keeps its snapshots in two slots. Each slot is a memfd as large as the state that the rank saves. Slots take memory of
the node and count in the trainer's cgroup; the size of /dev/shm does not matter.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.memory_limit import memory_bytes
from checkpointd.phrases import byte_size
from checkpointd.system_errors import explained

SLOTS: Final = 2
WRITER_BYTES: Final = 256 << 20
"""The most memory that one rank's writer takes beside its snapshots (PersistConfig.budget_bytes)."""
_MADV_POPULATE_WRITE: Final = 23
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x0010
"""The seals that a sidecar requires of a slot; the number is F_SEAL_FUTURE_WRITE."""

_finding = partial(Finding, "memory")


# --- how to allocate it -------------------------------------------------------------------------------------------


def memfd() -> Finding:
    """memfd_create and its seals: memory that a trainer hands to the sidecar and cannot shrink afterwards."""
    size = 4 * mmap.PAGESIZE
    try:
        descriptor = os.memfd_create("checkpointd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _no_memfd("memfd_create is refused", error)
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
        return _no_memfd("a memfd cannot be sealed and mapped", error)
    finally:
        os.close(descriptor)


def _no_memfd(seen: str, error: OSError) -> Finding:
    reason, advice = explained(error, "snapshot")
    if _text("/proc/sys/vm/memfd_noexec") == "2":
        advice = "set vm.memfd_noexec to 1 or 0"
    return _finding("memfd", "fail", f"{seen}: {reason}", advice)


def populate() -> Finding:
    """MADV_POPULATE_WRITE: the kernel allocates pages before the first save needs them."""
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
        "the first two saves are slower, as the kernel allocates their pages during the copy; Linux 5.14 and newer have it",
    )


def locked(state: StateSize | None, *, limit: int | None = None, gpu: bool | None = None) -> Finding:
    """Whether RLIMIT_MEMLOCK (`limit` bytes) lets CUDA pin the slots. Without a GPU nothing is pinned."""
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
    """Bytes: all memory of this machine, the part that is available now, and the part that this process may use."""

    total: int
    available: int
    allowed: int


def measured() -> MachineMemory:
    """The kernel's figures for this machine, and the limits of this process's control groups."""
    fields = dict(line.split(":", 1) for line in (_text("/proc/meminfo") or "").splitlines())
    total, available = (int(fields.get(name, "0").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return MachineMemory(total, available, min(total, memory_bytes()))


def fits(found: MachineMemory, state: StateSize | None) -> Finding:
    """Whether two snapshots of this node's part of the state, and the writer, fit into the memory."""
    what = f"{byte_size(found.allowed)} of memory" + (" (limit of this cgroup)" if found.allowed < found.total else "")
    seen = f"{what}, {byte_size(found.available)} available now"
    if state is None:
        return _finding("memory", "note", seen, "how much is needed is not known yet: give --state-bytes, or save once")
    needed = SLOTS * state.node_bytes + WRITER_BYTES
    seen = f"{seen}; two snapshots and the writer take {byte_size(needed)}"
    if needed > found.allowed:
        if not state.share_known:
            return _finding("memory", "warn", f"{seen} if one node holds all of the state", "if it spans several: give --nodes")
        return _finding("memory", "fail", seen, "use more nodes or more memory, or raise the cgroup's limit")
    if needed > min(found.allowed, found.available):
        return _finding("memory", "note", seen, "other programs here, and the trainer itself, must leave that much memory free")
    return _finding("memory", "ok", seen)


def overcommit(mode: str | None) -> Finding:
    """vm.overcommit_memory."""
    if mode == "2":
        return _finding(
            "overcommit",
            "note",
            "vm.overcommit_memory is 2: the kernel grants only memory that it has",
            "slots count in full from the start: raise vm.overcommit_ratio if a slot is refused",
        )
    return _finding("overcommit", "ok", "memory is taken as it is used")


def overcommit_mode() -> str | None:
    return _text("/proc/sys/vm/overcommit_memory")


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
