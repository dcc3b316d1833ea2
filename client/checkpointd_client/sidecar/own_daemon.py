"""Starts the sidecar of this node for a root if none answers: `Checkpointer(root, sidecar="auto")`.

Invariants
  OWNDAEMON-1  Of the ranks of a node that come at once, one starts the daemon: the one that has the kernel's lock on a file
      beside the socket. If it dies meanwhile, the next one goes on. Two daemons never listen at one socket (LISTENER-2).
  OWNDAEMON-2  The daemon has no descriptor, terminal, signal, directory or memory of the process that starts it, and of its
      environment only what `environment_of_daemon` names.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
import site
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import checkpointd
from checkpointd.bucket_urls import directory_of, is_bucket_url
from checkpointd.config import MIB, SOCKET_PATH_BYTES_MAX, SpoolConfig, environment_of_daemon, scratch_directories
from checkpointd.daemon.spool.places import name_of
from checkpointd.layout.manifest import digest
from checkpointd.store.posix.plain import can_show
from checkpointd_client.sidecar.link import Link, LinkLost, NoAnswer, SidecarRefusal

log = logging.getLogger("checkpointd")

AUTO: Final = "auto"
IDLE_S = 600.0
"""How long the daemon stays when nobody needs it."""
START_S = 30.0
"""How long the daemon may take to answer."""
_DIED_S = 3.0
"""How long a rank waits after its daemon has died: another one, whose starter was killed, may be about to answer."""
_AGAIN_S = 60.0
"""The pause before a process starts a daemon once more, in place of one that died."""
_LOOK_S = 0.05
_LOG_BYTES_MAX = 1 << 20
_TAIL_BYTES = 2000


class _StartLock:
    """The lock of the rank that starts the daemon (OWNDAEMON-1). If that fails, the file says why, and ranks that have waited
    meanwhile do not try once more.
    """

    def __init__(self, path: str) -> None:
        self._began = time.time()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._is_mine = False

    def taken(self) -> bool:
        """Whether this rank has the lock. ChildProcessError if the one before could not start the daemon."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        found = os.fstat(self._file)
        if found.st_mtime >= self._began and (why := os.pread(self._file, found.st_size, 0).decode()):
            raise ChildProcessError(why)
        self._is_mine = True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_mine and isinstance(error, OSError | subprocess.SubprocessError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(error).encode(), 0)
        os.close(self._file)


class OwnDaemon:
    """The daemon that the jobs of this user at the store `url` share on this node, and its spool."""

    def __init__(self, url: str, spool: SpoolConfig | None = None) -> None:
        directory = directory_of(url)
        self._root = url if directory is None else os.path.realpath(directory)
        self._spool = spool
        self.path, self._fault = _socket_for(self._root if spool is None else f"{self._root}\n{spool.directory}")
        self.log = f"{self.path.removesuffix('socket')}log"
        self._not_before = 0.0

    @property
    def has_root(self) -> bool:
        """Whether there is a root to serve. The first start of a job makes it."""
        return is_bucket_url(self._root) or os.path.isdir(self._root)

    async def link(self) -> Link:
        """A connection to the daemon, which is started if nobody listens. Raises as `Link.open`; LinkLost if it cannot be
        started. After that, this process starts none any more.
        """
        link = await self._opened()
        if link is not None:
            return link
        now = asyncio.get_running_loop().time()
        if self._fault or now < self._not_before:
            raise LinkLost(self._fault or f"the sidecar at {self.path} has ended; see {self.log}. It is started again soon")
        link = await self._started()
        self._not_before = now + _AGAIN_S
        return link

    async def _opened(self) -> Link | None:
        """A connection; None if nobody listens."""
        try:
            return await Link.open(self.path)
        except (NoAnswer, SidecarRefusal):
            raise
        except LinkLost:
            return None

    async def _started(self) -> Link:
        try:
            if not _has_place(self.path):  # somebody has cleaned up there
                raise NotADirectoryError(f"{os.path.dirname(self.path)} is not a directory that only this user may use")
            with _StartLock(f"{self.path}.starting") as lock:
                return await self._started_by_one(lock)
        except (OSError, subprocess.SubprocessError) as error:
            self._fault = f"the sidecar for {self._root} cannot be started: {error}; see {self.log}"
            raise LinkLost(self._fault) from error

    async def _started_by_one(self, lock: _StartLock) -> Link:
        loop = asyncio.get_running_loop()
        until, daemon = loop.time() + START_S, -1
        try:
            while loop.time() < until:
                is_first = daemon < 0 and lock.taken()
                if (link := await self._opened()) is not None:
                    return link
                if is_first:
                    daemon = await loop.run_in_executor(None, self._begun)
                elif daemon >= 0 and _has_ended(daemon):
                    until = min(until, loop.time() + _DIED_S)
                await asyncio.sleep(_LOOK_S)
        finally:
            if daemon >= 0:
                os.close(daemon)
        raise TimeoutError("it does not answer" + (f", and said: {self._said()}" if daemon >= 0 else ""))

    def _begun(self) -> int:
        """Start the daemon; a pidfd of it (OWNDAEMON-2)."""
        served = os.path.dirname(self._root) if can_show(self._root) else self._root
        options = ["--socket", self.path, "--root", served, "--uid", str(os.geteuid()), "--idle", str(IDLE_S)]
        if self._spool is not None:
            options += _spool_options(self._spool, self._root)
        module = "checkpointd.daemon.process.detached"
        with self._opened_log() as errors:
            begun = subprocess.run(
                [sys.executable, "-m", module, *options, "--log-level", "warning"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                env=environment_of_daemon(_imports()),
                start_new_session=True,
                timeout=START_S / 2,
                check=False,
            )
        if not begun.stdout:
            raise ChildProcessError(self._said())
        pid = int(begun.stdout)
        log.info("started the sidecar for %s: process %d at %s, which logs to %s", self._root, pid, self.path, self.log)
        return os.pidfd_open(pid)

    def _opened_log(self) -> IO[bytes]:
        """The daemon's log, to append to. A long one is put aside."""
        with suppress(FileNotFoundError):
            if os.stat(self.log).st_size > _LOG_BYTES_MAX:
                os.replace(self.log, f"{self.log}.before")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(self.log, flags, 0o600), "ab")

    def _said(self) -> str:
        """The last line of the daemon's log."""
        with open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def _spool_options(spool: SpoolConfig, root: str) -> Iterator[str]:
    """The options of `serve` for `spool`, in a directory of its own below that one: one daemon at a time uses a spool."""
    yield from ("--spool", f"{spool.directory}/{name_of(root, None)}", "--spool-keep", spool.keep)
    yield from ("--spool-timeout", str(spool.timeout_s), "--spool-retain" if spool.retain else "--no-spool-retain")
    if spool.bytes_max is not None:
        yield from ("--spool-mib", str(max(1, spool.bytes_max // MIB)))
    if spool.bandwidth_bps is not None:
        yield from ("--spool-bandwidth-mib", str(spool.bandwidth_bps / MIB))
    if spool.finish:
        yield "--spool-finish"


def _socket_for(served: str) -> tuple[str, str]:
    """The path of the socket for what is `served`, in a directory that only this user may use, and why there is none.

    The name holds the id of this boot, too: a directory may be on a file system that other nodes see.
    """
    name = digest(f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{served}".encode())[:16]
    path = ""
    for place in scratch_directories():
        path = f"{place}/checkpointd-{os.geteuid()}/{name}/socket"
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX and _has_place(path):
            return path, ""
    return path, f"no sidecar is started, since {os.path.dirname(path)} cannot be a directory that only this user may use"


def _has_place(socket: str) -> bool:
    """Whether the two directories in which the socket lies, which are made if they are missing, are this user's alone."""
    directory = os.path.dirname(socket)
    return _is_private(os.path.dirname(directory)) and _is_private(directory)


def _is_private(directory: str) -> bool:
    """Whether `directory`, which is made if it is missing, is one that only this user may use."""
    try:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _imports() -> str:
    """The directory of this package, if Python does not look there by itself."""
    place = str(Path(checkpointd.__file__).parents[1])
    return "" if place in (*site.getsitepackages(), site.getusersitepackages()) else place


def _has_ended(daemon: int) -> bool:
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    return bool(poll.poll(0))
