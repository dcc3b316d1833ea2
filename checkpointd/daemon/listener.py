"""The daemon's Unix socket: made safe before it is bound, held against a second daemon, removed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterator

from checkpointd.errors import SidecarError, UsageError

BACKLOG = 512


@contextlib.contextmanager
def listening(path: str, group: str | None) -> Iterator[socket.socket]:
    """A listening socket at `path`, mode 0600 (0660 where a group is given), in a directory of mode 0700 if it is made here.

    Raises UsageError where another daemon listens there, or something else has that name.
    """
    directory = os.path.dirname(path) or "."
    _make_directory(directory, group)
    with _claimed(f"{path}.lock", path):
        _clear(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                listener.bind(path)
            except OSError as error:
                raise SidecarError(f"cannot listen at {path}: {error.strerror or error}") from error
            finally:
                os.umask(before)
            if group is not None:
                os.chown(path, -1, _group_id(group))
                os.chmod(path, 0o660)
            listener.setblocking(False)
            listener.listen(BACKLOG)
            yield listener
        finally:
            listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _make_directory(directory: str, group: str | None) -> None:
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        _check_directory(directory)
        return
    except OSError as error:
        raise UsageError(
            f"the socket's directory {directory} cannot be made: {error.strerror}; make it, or choose another"
        ) from error
    if group is not None:
        os.chown(directory, -1, _group_id(group))
        os.chmod(directory, 0o750)


def _check_directory(directory: str) -> None:
    """Refuse a directory in which anybody could put a socket of his own in this one's place."""
    mode = os.stat(directory).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(f"anybody may rename what lies in {directory}: choose a directory of your own for the socket")


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise UsageError(f"there is no group {group!r} on this machine") from error


@contextlib.contextmanager
def _claimed(lock: str, path: str) -> Iterator[None]:
    """Hold the lock beside the socket: of two daemons that start at once, one listens."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"cannot open {lock}: {error.strerror}; choose a socket in a directory of your own") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another daemon listens at {path}: stop it first, or give this one its own socket") from error
        yield
    finally:
        os.close(descriptor)


def _clear(path: str) -> None:
    """Remove what a daemon that died has left; nothing else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is no socket: remove it, or choose another name")
    os.unlink(path)
