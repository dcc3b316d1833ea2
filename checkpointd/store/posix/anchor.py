"""Opens paths below a directory, the anchor, and follows no symbolic link, even if somebody replaces names meanwhile.

Invariants
  ANCHOR-1  For each call, the kernel resolves the path from a descriptor of the anchor; no earlier check is relied on. A link
      on the way, or at the end, raises an error that names the link, and the call does nothing.
  ANCHOR-2  No descriptor outlives its call: each call sees the tree as it is now, and the file system can be unmounted in
      between.

Links in the anchor's own path are followed, because a root may be a link to a disk. With "/" as the anchor, no link is followed
anywhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_OPENAT2: Final = 437
"""The same number on every architecture."""
_RESOLVE: Final = 0x08 | 0x04
"""RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS of openat2(2)."""
_WITHOUT_OPENAT2: Final = frozenset({errno.ENOSYS, errno.EPERM})
"""The errors of Linux before 5.6, and of seccomp filters that do not know the call."""
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_HOW: Final = _OpenHow(_DIRECTORY, 0, _RESOLVE)


class LinkMet(OSError):
    """There is a symbolic link at `filename`, and it was not followed."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "it is a symbolic link", path)


@dataclass(frozen=True, slots=True)
class AnchoredName:
    """A name in a directory, as the *at() calls take it. Below the anchor, `flags` forbids to follow a link of that name."""

    directory: int | None
    name: str
    flags: int


class Anchor:
    """The directory `path`, an absolute path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._below = path.rstrip("/") + "/"

    @contextmanager
    def at(self, path: str) -> Iterator[AnchoredName]:
        """The absolute `path` as a directory and a name, while the context lasts."""
        parts = [part for part in path[len(self._below) :].split("/") if part] if path.startswith(self._below) else []
        if not parts:
            yield AnchoredName(None, path, 0)
            return
        try:
            directory = self._open(parts[:-1])
            try:
                yield AnchoredName(directory, parts[-1], os.O_NOFOLLOW)
            finally:
                os.close(directory)
        except OSError as error:
            link = self._first_link(parts) if error.errno in {errno.ELOOP, errno.ENOTDIR} else None
            if link is not None:
                raise LinkMet(link) from error
            raise

    def check(self, path: str) -> None:
        """Raise LinkMet if there is a link in `path`. Ignores all other errors, such as a missing file."""
        try:
            with self.at(path) as place:
                os.close(os.open(place.name, _DIRECTORY | place.flags, dir_fd=place.directory))
        except LinkMet:
            raise
        except OSError:
            return

    def _open(self, parts: list[str]) -> int:
        anchor = os.open(self._path, _DIRECTORY)
        if not parts:
            return anchor
        try:
            if ".." in parts:
                raise OSError(errno.EXDEV, "it leads upwards", "/".join(parts))
            try:
                return _beneath(anchor, "/".join(parts))
            except OSError as error:
                if error.errno not in _WITHOUT_OPENAT2:
                    raise
            return _step_by_step(anchor, parts)
        finally:
            os.close(anchor)

    def _first_link(self, parts: list[str]) -> str | None:
        """The first link on the way, for the message only; None if it is gone by now."""
        for count in range(1, len(parts) + 1):
            path = self._below + "/".join(parts[:count])
            if os.path.islink(path):
                return path
        return None


def _beneath(anchor: int, path: str) -> int:
    """openat2(2)."""
    while True:
        descriptor: int = _libc.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(anchor),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(_HOW),
            ctypes.c_size_t(ctypes.sizeof(_HOW)),
        )
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in {errno.EINTR, errno.EAGAIN}:  # EAGAIN: something on the way was renamed meanwhile
            raise OSError(number, os.strerror(number), path)


def _step_by_step(anchor: int, parts: list[str]) -> int:
    """The same without openat2. A link is not a directory, so opening it fails with ENOTDIR."""
    directory = os.dup(anchor)
    for part in parts:
        try:
            below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
        finally:
            os.close(directory)
        directory = below
    return directory
