"""Finds the file system of a path in /proc/self/mountinfo (proc(5)), and its consequences."""

from __future__ import annotations

import re
from dataclasses import dataclass

from checkpointd.doctor.finding import Finding, Level

VOLATILE = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LAYERED = frozenset({"overlay", "aufs"})
NETWORKED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "cifs", "smb3", "9p", "virtiofs", "afs"})
LINKLESS = frozenset({"vfat", "msdos", "exfat", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.mount-s3", "fuse.rclone"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: `options` are the mount's and the file system's own, together."""

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def networked(self) -> bool:
        return self.kind in NETWORKED or self.kind.startswith("fuse.")


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """The mount that the absolute `path` without links lies on; the last one, where one hides another."""
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, system = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(system) < 3:
            continue
        point = _unescaped(fields[4])
        if not (path == point or path.startswith(point.rstrip("/") + "/")):
            continue
        if found is None or len(point) >= len(found.point):
            options = frozenset([*fields[5].split(","), *system[2].split(",")])
            found = Mount(point, _unescaped(system[0]), _unescaped(system[1]), options)
    return found


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)


def file_system(mount: Mount | None) -> Finding:
    """What kind of file system the root lies on."""
    if mount is None:
        return _finding("note", "the kernel does not say which file system the root lies on")
    seen = f"{mount.kind}, mounted at {mount.point}"
    if mount.kind in VOLATILE:
        return _finding("warn", f"{seen}: it lives in memory", "a restart of the machine loses every checkpoint: use a disk")
    if mount.kind in LAYERED:
        return _finding(
            "warn",
            f"{seen}: the writable layer of a container",
            "checkpoints may go with the container: mount a volume and put the root there",
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
            "whether fsync and hard links keep their promise is up to its program: read its documentation",
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
        return Finding(topic="root", check="mount-options", level="ok", seen="no option that weakens fsync or locks")
    level = _RISKY[risky[0]][0]
    advice = "; ".join(dict.fromkeys(_RISKY[option][1] for option in risky))
    return Finding(topic="root", check="mount-options", level=level, seen=f"mounted with {', '.join(risky)}", fix=advice)


def _finding(level: Level, seen: str, fix: str = "") -> Finding:
    return Finding(topic="root", check="file-system", level=level, seen=seen, fix=fix)
