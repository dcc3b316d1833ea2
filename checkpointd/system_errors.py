"""The errors of system calls in words: what stands in the way at a place, and whether waiting can help.

One table has the words for each error and place. All other modules ask it, so a message reads the same wherever it appears.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final, Literal

from checkpointd.commands import MAY_NOT_OPEN, command
from checkpointd.errors import StoreFullError
from checkpointd.phrases import byte_size

Place = Literal["root", "read", "directory", "link", "snapshot", "export", "spool", "socket", "listener", "file"]
"""Where a call failed. "root": it changes a root. "read": it only reads one. "directory": fsync of a directory of a root.
"link": a hard link in a root. "snapshot": memory for a snapshot. "export": files of an export. "spool": a spool.
"socket": a daemon's socket, for its clients. "listener": the addresses of a daemon, for itself. "file": any other file.
"""

INODES_FEW: Final = 64
"""If a full file system has fewer inodes than this, and BYTES_FEW bytes, the inodes are what it lacks."""
BYTES_FEW: Final = 1 << 20

_READS_ONLY: Final = "A script that only reads checkpoints calls open_checkpoint(root)"
_READ_ONLY: Final = (
    "the file system is mounted read-only: remount it read-write, after a repair if the kernel log names a fault"
)
_NO_MEMFD: Final = (
    "this process may not make a memfd, the memory in which a snapshot lies: allow memfd_create in the seccomp profile of the "
    f"container; {command('doctor')} tries it"
)
_NO_DIRECTORY_SYNC: Final = (
    "this file system cannot make the names in a directory durable (fsync of a directory), so a power cut could take a "
    "committed checkpoint: use a root on one that can (ext4, XFS, NFS, Lustre, GPFS)"
)
_AWAY: Final = "the file server or the program behind this file system is not there: start it, or mount the file system again"
NO_HARD_LINKS: Final = (
    "hard links make a commit atomic: use a root on a file system that has hard links (ext4, XFS, NFS, Lustre, GPFS)"
)
_NO_INODES: Final = (
    "the file system has room for bytes, but no inodes for more files: remove files, such as old checkpoints, or ask for more "
    "inodes"
)
_GONE: Final = "the device is gone: mount the file system again"
_NO_SOCKET: Final = "it is not the socket of a daemon"

NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})
"""The errors of a link by which a file system says that it has none."""

_WORDS: Final[dict[tuple[int, Place | None], str]] = {
    (errno.ENOSPC, None): "free some space",
    (errno.ENOSPC, "root"): "free some space (or delete old checkpoints), then save again",
    (errno.ENOSPC, "export"): "free some space or give a place on another file system",
    (errno.EDQUOT, None): "the disk quota is used up, for bytes or for files: free some, or raise it (`quota -s` shows it)",
    (errno.EDQUOT, "root"): "the disk quota is used up, for bytes or for files: free some space or raise the quota (`quota -s` "
    "shows it), then save again",
    (errno.EFBIG, None): "the file would be too large for this file system",
    (errno.EROFS, None): _READ_ONLY,
    (errno.EROFS, "root"): f"{_READ_ONLY}. {_READS_ONLY}",
    (errno.EACCES, None): "permission is missing: let the user of this process read and write there",
    (errno.EACCES, "root"): f"permission is missing: let the user of this process read and write there. {_READS_ONLY}",
    (errno.EACCES, "read"): "permission is missing: let the user of this process read there",
    (errno.EACCES, "snapshot"): _NO_MEMFD,
    (errno.EACCES, "socket"): f"permission is missing: {MAY_NOT_OPEN}",
    (errno.EPERM, None): "the operation is not permitted: let the user of this process read and write there",
    (errno.EPERM, "read"): "the operation is not permitted: let the user of this process read there",
    (errno.EPERM, "snapshot"): _NO_MEMFD,
    (errno.EPERM, "socket"): f"permission is missing: {MAY_NOT_OPEN}",
    (errno.ENOSYS, None): "the kernel, a sandbox or the file system does not know this call: use another file system, or allow "
    "the call",
    (errno.ENOSYS, "snapshot"): _NO_MEMFD,
    (errno.EOPNOTSUPP, None): "the file system does not know this call: use another one (ext4, XFS, NFS, Lustre, GPFS)",
    **dict.fromkeys([(errno.EINVAL, "read"), (errno.EINVAL, "file")], "this is not a regular file: look at what has this name"),
    (errno.EINVAL, "snapshot"): "the kernel does not know sealed memory (memfd_create with MFD_ALLOW_SEALING): use a newer one",
    **dict.fromkeys([(number, "directory") for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)], _NO_DIRECTORY_SYNC),
    **dict.fromkeys([(number, "link") for number in NO_LINKS], NO_HARD_LINKS),
    (errno.EIO, None): "the device or the file server failed: see the kernel log, and try again when it answers",
    (errno.EIO, "root"): "the device or the file server failed: nothing just written can be trusted; see the kernel log, then "
    "save again",
    (errno.ESTALE, None): "the file server no longer knows this file: remount the file system",
    (errno.ENODEV, None): _GONE,
    (errno.ENXIO, None): _GONE,
    (errno.ENOTCONN, None): _AWAY,
    (errno.EHOSTDOWN, None): _AWAY,
    (errno.EHOSTUNREACH, None): _AWAY,
    (errno.ENETUNREACH, None): _AWAY,
    (errno.EREMOTEIO, None): _AWAY,
    (errno.ETIMEDOUT, None): "the file server does not answer: check it and the network, and try again",
    (errno.EUCLEAN, None): "the file system is damaged: repair it (fsck); see the kernel log",
    (errno.EBUSY, None): "another program uses it, or something is mounted there",
    (errno.EMFILE, None): "this process has too many files open: raise `ulimit -n`",
    (errno.ENFILE, None): "this machine has too many files open: raise fs.file-max",
    (
        errno.ENOMEM,
        None,
    ): "the kernel has no memory for this: give the job more, or use less (see `ulimit -v` and the limit of the container)",
    (errno.EAGAIN, "snapshot"): "the limit on locked memory (`ulimit -l`) does not leave room for a snapshot: raise it",
    (errno.ENOENT, "snapshot"): "/proc, through which a snapshot's memory is opened, is not mounted: mount it",
    (errno.ENOLCK, None): "the file system grants no locks: mount it with locking (NFS without `nolock`, Lustre with "
    "`-o flock`)",
    (errno.ENAMETOOLONG, None): "the name is too long for this file system: use a shorter one",
    (errno.ENAMETOOLONG, "root"): "the name is too long for this file system: use a shorter tag or root",
    (errno.ELOOP, None): "symbolic links in the path lead in a circle: correct them",
    (errno.ENOTDIR, None): "a part of the path is a file: give a path whose parts are directories",
    (errno.ENOTDIR, "root"): "a part of the path is a file: an object's name cannot also be a directory",
    (errno.ENOTDIR, "socket"): _NO_SOCKET,
    (errno.EISDIR, None): "that name is a directory",
    (errno.EISDIR, "root"): "that name is a directory: an object's name cannot also be a directory",
    (errno.EEXIST, "root"): "that name is taken: a large object is written once, under a new name",
    (errno.EXDEV, None): "the two names lie on different file systems: put them on one",
    (errno.ESHUTDOWN, "root"): "the store was closed, or the process is ending: close the checkpointer before the end of the "
    "program",
    (errno.ENOENT, None): "it is not there: correct the path",
    (errno.ENOENT, "root"): "its directory cannot be made there, or was removed while it was in use: is this the right place, "
    "and is another process collecting this root?",
    (errno.ENOENT, "read"): "it was there a moment ago: is another process collecting this root, or does the file server lag "
    "behind?",
    (errno.ENOENT, "socket"): "there is no such socket: give the one that the daemon has",
    (errno.ENOENT, "listener"): "its directory is not there: make it, or choose another one",
    (errno.ECONNREFUSED, "socket"): "nobody listens there: the daemon has died, or this is no socket",
    (errno.EAGAIN, "socket"): "the daemon takes no more connections for now: it is busy or stuck; read its log",
    (errno.ENOTSOCK, "socket"): _NO_SOCKET,
    (errno.EPROTOTYPE, "socket"): _NO_SOCKET,
    (errno.ECONNRESET, "socket"): "the daemon went away in the middle of its answer: ask again when it is back",
    (errno.EPIPE, "socket"): "the daemon went away in the middle of its answer: ask again when it is back",
    (errno.EADDRINUSE, "listener"): "another process listens there: stop it, or choose another address",
    (errno.EADDRNOTAVAIL, "listener"): "this machine does not have that address: choose one that it has",
}

_LASTING: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ENOSYS),
        *(errno.EOPNOTSUPP, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EXDEV, errno.EMLINK),
    }
)
"""The errors that last until somebody changes something, such as a permission. All others may pass by themselves."""


class NeverReached(OSError):
    """A server has not answered this process even once, so its address is probably wrong."""


def in_words(error: OSError, place: Place, path: str = "") -> str:
    """`error` in words: the system's own reason, then what to do: `[EACCES] Permission denied: permission is missing: …`.

    `path`: a path on the file system where it happened. If that is full, the words say what is left of it.
    """
    return ": ".join(filter(None, explained(error, place, path)))


def explained(error: OSError, place: Place, path: str = "") -> tuple[str, str]:
    """The two parts of `in_words`: the reason, and the advice, which is empty if the table has none."""
    number = error.errno or 0
    reason = f"[{errno.errorcode.get(number, number)}] {error.strerror or error}" if number else str(error)
    facts, advice = _known(number, place, path)
    return reason + facts, advice


def _known(number: int, place: Place, path: str) -> tuple[str, str]:
    """Facts that a look adds to the reason, and the advice."""
    advice = _WORDS.get((number, place)) or _WORDS.get((number, None), "")
    if number == errno.EFBIG and (limit := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        also = ", which also counts for the memory of a snapshot" if place == "snapshot" else ""
        return f" (`ulimit -f` is {byte_size(limit)})", f"raise `ulimit -f`, the limit on this process's files{also}"
    if number != errno.ENOSPC or (found := _room(path)) is None:
        return "", advice
    free = byte_size(found.f_bavail * found.f_frsize)
    if found.f_files and found.f_favail < INODES_FEW and found.f_bavail * found.f_frsize >= BYTES_FEW:
        return f" ({found.f_favail} of {found.f_files} inodes and {free} are free)", _NO_INODES
    return f" ({free} are free)", advice


def _room(path: str) -> os.statvfs_result | None:
    try:
        return os.statvfs(path) if path else None
    except OSError:
        return None


def lasts(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, lasts until somebody changes something: then waiting cannot help."""
    while error is not None:
        if isinstance(error, StoreFullError | PermissionError | NeverReached):
            return True
        if isinstance(error, OSError) and error.errno in _LASTING:
            return True
        error = error.__cause__
    return False
