"""System errors in words: what happened, to what, and what to do next (invariant STORE-6)."""

from __future__ import annotations

import errno
import os

from checkpointd.errors import LinkError, StoreError, StoreFullError, UnreadableError
from checkpointd.store.posix.anchor import LinkMet

_FULL = {
    errno.ENOSPC: "free some space (or delete old checkpoints), then save again",
    errno.EDQUOT: "the disk quota is used up: free some space or raise the quota, then save again",
}
_READS_ONLY = "A script that only reads checkpoints calls open_checkpoint(root)"
_ADVICE = {
    errno.EROFS: "the file system is mounted read-only: remount it read-write, after a repair if the kernel log names a fault. "
    + _READS_ONLY,
    errno.EACCES: "permission is missing: let the user of this process read and write there. " + _READS_ONLY,
    errno.EPERM: "the operation is not permitted: let the user of this process read and write there",
    errno.EIO: "the device or the file server failed: nothing just written can be trusted; see the kernel log, then save again",
    errno.ESTALE: "the file server no longer knows this file: remount the file system",
    errno.ENODEV: "the device is gone: mount the file system again",
    errno.ENXIO: "the device is gone: mount the file system again",
    errno.EMFILE: "this process has too many files open: raise `ulimit -n`",
    errno.ENFILE: "this machine has too many files open: raise fs.file-max",
    errno.ENOLCK: "the file system grants no locks: mount it with locking (NFS without `nolock`, Lustre with `-o flock`)",
    errno.ENAMETOOLONG: "the name is too long for this file system: use a shorter tag or root",
    errno.EFBIG: "the file would be too large for this file system or for `ulimit -f`",
    errno.ENOTDIR: "a part of the path is a file: an object's name cannot also be a directory",
    errno.EISDIR: "that name is a directory: an object's name cannot also be a directory",
    errno.EEXIST: "that name is taken: a large object is written once, under a new name",
    errno.ESHUTDOWN: "the store was closed, or the process is ending: close the checkpointer before the end of the program",
    errno.ENOENT: "it was removed while it was in use: is another process collecting this root?",
}
_READ_ADVICE = _ADVICE | {
    errno.EIO: "the device or the file server failed: see the kernel log, and read again when it answers",
    errno.EACCES: "permission is missing: let the user of this process read there",
    errno.EPERM: "the operation is not permitted: let the user of this process read there",
    errno.EINVAL: "this is not a regular file: look at what has this name",
    errno.ENOENT: "it was there a moment ago: is another process collecting this root, or does the file server lag behind?",
}
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})


def store_error(error: OSError, *, doing: str, key: str, url: str, reads: bool = False) -> StoreError:
    """The StoreError for a system error while `doing` something to `key` of the store at `url`. If the call only `reads`, it is
    an UnreadableError, which does not count as damage.
    """
    number = error.errno or 0
    if isinstance(error, LinkMet):
        return LinkError(
            f"{doing} {key!r} in {url} failed: {error.filename} is a symbolic link, and checkpointd follows no links in a "
            "root. Nothing was read or changed where it leads. Remove the link, or move its target there, and try again"
        )
    reason = f"[{errno.errorcode.get(number, number)}] {error.strerror or error}"
    what = f"{doing} {key!r} in {url} failed: {reason}"
    if reads:
        return UnreadableError(f"{what}: {_READ_ADVICE[number]}" if number in _READ_ADVICE else what)
    if number in _FULL:
        return StoreFullError(f"{what}{_free(url) if number == errno.ENOSPC else ''}: {_FULL[number]}")
    return StoreError(f"{what}: {_ADVICE[number]}" if number in _ADVICE else what)


def _free(path: str) -> str:
    """The free space of the full file system of `path`, in words; empty if it cannot be read."""
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    if found.f_files and not found.f_favail:
        return " (no inode is free)"
    return f" ({found.f_bavail * found.f_frsize} bytes are free)"


def is_forbidden(error: BaseException | None) -> bool:
    """Whether a missing permission caused `error`, so that another try cannot help."""
    while error is not None and not isinstance(error, PermissionError):
        error = error.__cause__
    return error is not None


def is_without_links(error: OSError) -> bool:
    """Whether a refused hard link means that the file system has none."""
    return error.errno in _NO_LINKS


def links_error(error: OSError, *, key: str, url: str) -> StoreError:
    """The StoreError for a file system without hard links, which `put_if_absent` needs to be atomic."""
    return StoreError(
        f"creating {key!r} in {url} failed: [{errno.errorcode[error.errno or 0]}] {error.strerror}: this file system refuses "
        "hard links, which make a commit atomic; use a root on a file system that has them (ext4, XFS, NFS, Lustre, GPFS)"
    )


def swept_error(*, key: str, url: str) -> StoreError:
    """The StoreError for a writer whose temporary file another process removed."""
    return StoreError(
        f"writing {key!r} in {url} failed: its temporary file was removed, probably by a newer start of this job; nothing was "
        "written. Stop this process, or start the job again"
    )
