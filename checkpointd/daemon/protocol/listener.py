"""The daemon's Unix sockets, its own and that of HTTP. Checks their directories, keeps a second daemon out, and binds a removed
socket again.

Invariants
  LISTENER-1  The socket lies in a directory of this user, or of the superuser, in which nobody else may write.
  LISTENER-2  If two daemons get the same path, only the daemon that holds the lock beside the socket listens.
  LISTENER-3  The daemon removes only sockets, and at its end only its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import logging
import os
import shlex
import socket
import stat
from collections.abc import AsyncGenerator, Iterator

from checkpointd.daemon.protocol.peers import directory_fault, trusted
from checkpointd.errors import CheckpointdError, SidecarError, UsageError
from checkpointd.system_errors import in_words

log = logging.getLogger("checkpointd")

BACKLOG = 512
LOOK_S = 2.0
"""How often the daemon checks that the socket is still there."""
SAY_AGAIN_S = 60.0
"""How often the log says that a socket cannot be bound again."""

_Identity = tuple[int, int]


class Door:
    """A listening socket at `path`. Made and closed by `door_at`."""

    def __init__(self, path: str, group: str | None) -> None:
        self._path, self._group = path, group
        self._lock = -1
        self._socket: socket.socket | None = None
        self._bound: _Identity | None = None

    @property
    def listener(self) -> socket.socket:
        assert self._socket is not None, "not open"
        return self._socket

    async def sockets(self) -> AsyncGenerator[socket.socket]:
        """The listening socket, then a new one each time that it was removed and bound again.

        The old socket is closed when the caller asks for the next one, because nobody accepts from it any more.
        """
        yield self.listener
        while True:
            await self._lost()
            before = self.listener
            await self._bound_anew()
            try:
                yield self.listener
            finally:
                before.close()

    async def _lost(self) -> None:
        while self._bound is not None and _identity(self._path) == self._bound:
            await asyncio.sleep(LOOK_S)
        what = "was removed" if _identity(self._path) is None else "was replaced by something else"
        log.error("the socket %s %s: nobody can connect until it is bound again", self._path, what)

    async def _bound_anew(self) -> None:
        loop, said = asyncio.get_running_loop(), -SAY_AGAIN_S
        while True:
            try:
                if _identity(self._path) is not None:
                    raise UsageError(f"something else lies at {self._path}: remove it, and this daemon takes the name again")
                self.open()
            except (CheckpointdError, OSError) as error:
                if loop.time() - said >= SAY_AGAIN_S:
                    said = loop.time()
                    log.error("the socket %s cannot be bound again: %s", self._path, error)
                await asyncio.sleep(LOOK_S)
            else:
                log.warning("listening at %s again", self._path)
                return

    def open(self) -> None:
        """Bind the socket, also after it was removed. UsageError or SidecarError if that is not possible."""
        directory = os.path.dirname(self._path) or "."
        make_directory(directory, self._group)
        if self._group is not None:
            _say_if_closed(directory, self._group)
        self._claim()
        _clear(self._path)
        self._socket = _listening(self._path, self._group)
        self._bound = _identity(self._path)

    def _claim(self) -> None:
        """Hold the lock beside the socket (LISTENER-2). If somebody replaced the lock file, lock the new one."""
        path = f"{self._path}.lock"
        if self._lock >= 0:
            held = os.fstat(self._lock)
            if _identity(path) == (held.st_dev, held.st_ino):
                return
        lock = _locked(path, self._path)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    def close(self) -> None:
        """Stop listening, remove the socket if it is still this one (LISTENER-3), and let the lock go."""
        if self._socket is not None:
            self._socket.close()
            if _identity(self._path) == self._bound:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
        if self._lock >= 0:
            os.close(self._lock)


@contextlib.contextmanager
def door_at(path: str, group: str | None) -> Iterator[Door]:
    """A socket at `path` with mode 0600 (0660 with a group). Makes its directory with mode 0700 if it is missing.

    Raises UsageError if another daemon listens there, the path is not a socket, or others may write in the directory.
    """
    door = Door(path, group)
    try:
        door.open()
        yield door
    finally:
        door.close()


def _listening(path: str, group: str | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        except OSError as error:
            raise SidecarError(f"cannot listen at {path}: {in_words(error, 'listener')}") from error
        finally:
            os.umask(before)
        try:
            if group is not None:
                _give(path, group, 0o660)
        except BaseException:
            os.unlink(path)
            raise
        listener.setblocking(False)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def make_directory(directory: str, group: str | None) -> None:
    """Make a socket's directory, or check that the existing one is safe (LISTENER-1). UsageError if it is not."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if fault := directory_fault(directory, trusted(), "run the daemon as that user"):
            raise UsageError(fault) from None
        return
    except OSError as error:
        raise UsageError(
            f"the socket's directory {directory} cannot be made: {in_words(error, 'listener')}; make it, or choose another"
        ) from error
    if group is not None:
        try:
            _give(directory, group, 0o750)
        except BaseException:
            os.rmdir(directory)
            raise


def _give(path: str, group: str, mode: int) -> None:
    try:
        os.chown(path, -1, _group_id(group))
    except PermissionError as error:
        raise UsageError(f"user {os.geteuid()} is not in group {group}: choose one of this user's groups") from error
    os.chmod(path, mode)


def _say_if_closed(directory: str, group: str) -> None:
    """Warn if `group` may open the socket but not enter its directory."""
    found = os.stat(directory)
    entered = stat.S_IXGRP if found.st_gid == _group_id(group) else stat.S_IXOTH
    if not found.st_mode & entered:
        log.warning(
            "group %s may open the socket but not enter its directory %s: run `%s`, or let the daemon make the directory",
            group,
            directory,
            shlex.join(["chgrp", group, directory]) + " && " + shlex.join(["chmod", "g+x", directory]),
        )


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        if group.isdecimal():  # in a container the group need not have a name
            return int(group)
        raise UsageError(f"there is no group {group!r} on this machine; give its number") from error


def _locked(lock: str, path: str) -> int:
    """A descriptor of the locked file `lock`, so that only one of two daemons listens."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(
            f"cannot open {lock}: {in_words(error, 'listener')}; choose a socket in a directory of your own"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(f"another daemon listens at {path}: stop it first, or give this one its own socket") from error
    return descriptor


def _identity(path: str) -> _Identity | None:
    """Device and inode of `path`; None if there is nothing, or it cannot be seen."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _clear(path: str) -> None:
    """Remove the socket of a daemon that died, and nothing else (LISTENER-3)."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket: remove it, or choose another name")
    os.unlink(path)
