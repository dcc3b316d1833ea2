"""Finds the file system of a path in /proc/self/mountinfo (proc(5)), and judges whether it suits a root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from checkpointd.doctor.finding import Finding, Level
from checkpointd.memory_limit import unescaped

VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LAYERED = frozenset({"overlay", "aufs"})
NETWORKED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "cifs", "smb3", "9p", "virtiofs", "afs"})
LINKLESS = frozenset({"vfat", "msdos", "exfat", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.mount-s3", "fuse.rclone"})

_finding = partial(Finding, "root", "file-system")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo; `options` has the options of the mount and those of its file system."""

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def networked(self) -> bool:
        return self.kind in NETWORKED or self.kind.startswith("fuse.")


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """The mount that holds `path`, an absolute path without links. If one mount hides another, the last one counts."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, system = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(system) < 3:
            continue
        point = unescaped(fields[4])
        if not (path == point or path.startswith(point.rstrip("/") + "/")):
            continue
        if found is None or len(point) >= len(found.point):
            options = frozenset([*fields[5].split(","), *system[2].split(",")])
            found = Mount(point, unescaped(system[0]), unescaped(system[1]), options)
    return found


def file_system(mount: Mount | None) -> Finding:
    """The kind of file system that holds the root."""
    if mount is None:
        return _finding("note", "the kernel does not say which file system the root lies on")
    seen = f"{mount.kind}, mounted at {mount.point}"
    if mount.kind in VOLATILE:
        return _finding("warn", f"{seen}: it lives in memory", "a restart of the machine loses every checkpoint: use a disk")
    if mount.kind in LAYERED:
        return _finding(
            "warn",
            f"{seen}: the writable layer of a container",
            "checkpoints may be removed with the container: mount a volume and put the root there",
        )
    if mount.kind in LINKLESS:
        return _finding(
            "fail",
            f"{seen}: it has no hard links, or none that are atomic",
            "use a root on a file system that has them (ext4, XFS, NFS, Lustre, GPFS)",
        )
    if mount.kind.startswith("fuse"):
        return _finding(
            "note",
            f"{seen}: a file system in user space",
            "its program decides whether fsync and hard links keep their promise: read its documentation",
        )
    if mount.networked:
        return _finding("ok", f"{seen}: a network file system, which nodes can share")
    return _finding("ok", f"{seen}: a local file system; ranks on other nodes do not see it")


_RISKY: dict[str, tuple[Level, str]] = {
    "nobarrier": ("warn", "a power cut can lose what fsync promised: mount without it"),
    "barrier=0": ("warn", "a power cut can lose what fsync promised: mount without it"),
    "nolock": ("warn", "locks hold on one machine only, so two nodes may move `latest` at once: mount without it"),
    "local_lock=all": ("warn", "locks hold on one machine only, so two nodes may move `latest` at once: mount without it"),
    "local_lock=flock": ("warn", "locks hold on one machine only, so two nodes may move `latest` at once: mount without it"),
    "localflock": ("warn", "locks hold on one machine only, so two nodes may move `latest` at once: mount with -o flock"),
    "soft": ("warn", "a slow server makes writes fail instead of wait: mount with `hard`"),
    "softerr": ("warn", "a slow server makes writes fail instead of wait: mount with `hard`"),
    "ro": ("fail", "the root is read-only: see the kernel log for the reason, repair it and remount it read-write"),
}


def mount_options(mount: Mount) -> Finding:
    """Options of the mount that break a promise."""
    risky = sorted(mount.options & _RISKY.keys(), key=lambda option: _RISKY[option][0] != "fail")
    if not risky:
        return Finding("root", "mount-options", "ok", "no option that weakens fsync or locks")
    level = _RISKY[risky[0]][0]
    advice = "; ".join(dict.fromkeys(_RISKY[option][1] for option in risky))
    return Finding("root", "mount-options", level, f"mounted with {', '.join(risky)}", advice)
