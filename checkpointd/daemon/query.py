"""Ask a daemon how things stand, over its socket: for scripts, synchronous and asynchronous, and for the command line.

Invariants
  Q1  Every failure is a SidecarError that says what to do; none takes longer than `timeout_s`.
  Q2  A client that failed has no connection: its next question opens a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from types import TracebackType
from typing import Self

import msgspec

from checkpointd import __version__
from checkpointd.commands import start_sidecar
from checkpointd.daemon import wire
from checkpointd.daemon.status import DaemonStatus
from checkpointd.errors import SidecarError, WireError

TIMEOUT_S = 5.0
_PIECE = 256 << 10


class _Conversation:
    """The status side of the protocol, without I/O: bytes to send, and what the daemon's bytes mean."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._decoder = wire.Decoder()
        self.greeted = False

    def hello(self) -> bytes:
        return wire.encode(wire.Hello(protocols=wire.PROTOCOLS, release=__version__, role="status"))

    def question(self) -> bytes:
        return wire.encode(wire.Query())

    def feed(self, data: bytes) -> DaemonStatus | None:
        """The answer, once `data` completes it. SidecarError where the daemon refuses, or speaks something else."""
        try:
            if not data:
                raise SidecarError(f"the daemon at {self._path} closed the connection: it is leaving, or has too many clients")
            for message, _ in self._decoder.feed(data):
                if (answer := self._take(message)) is not None:
                    return answer
        except WireError as error:
            raise SidecarError(f"what listens at {self._path} does not speak as a checkpointd daemon does: {error}") from error
        return None

    def _take(self, message: wire.Message) -> DaemonStatus | None:
        match message:
            case wire.Welcome():
                self._welcomed(message)
            case wire.Report() if self.greeted:
                return self._status(message.status)
            case wire.Refused():
                raise SidecarError(f"the daemon at {self._path} refuses: {message.error.message}")
            case _:
                raise WireError(f"a {type(message).__name__} message is no answer to a status client")
        return None

    def _welcomed(self, welcome: wire.Welcome) -> None:
        if wire.common_protocol((welcome.protocol, welcome.protocol)) is None:
            raise SidecarError(
                f"the daemon at {self._path} is checkpointd {welcome.release} and wants protocol {welcome.protocol}; this is "
                f"{__version__}, which speaks {wire.PROTOCOLS[0]} to {wire.PROTOCOLS[1]}: upgrade the older one"
            )
        self._release = welcome.release
        self._decoder.frame_bytes_max = min(welcome.frame_bytes_max, wire.FRAME_BYTES_MAX)
        self.greeted = True

    def _status(self, text: str) -> DaemonStatus:
        try:
            return msgspec.json.decode(text, type=DaemonStatus)
        except msgspec.DecodeError as error:
            raise SidecarError(
                f"the status of the daemon at {self._path} (checkpointd {self._release}) cannot be read by this release "
                f"({__version__}): {error}; upgrade the older one"
            ) from error


class StatusClient:
    """Asks the daemon that listens at `socket_path`; for one thread at a time.

    Connects at the first question. After a SidecarError it can be asked again: the daemon may be back.
    """

    def __init__(self, socket_path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = os.path.abspath(socket_path)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._conversation = _Conversation(self.socket_path)

    def status(self) -> DaemonStatus:
        """How things stand, from the daemon's memory alone: asking costs no storage anything.

        SidecarError where nobody listens, the permission is missing, the versions do not match, or no answer comes in time.
        """
        ends = time.monotonic() + self._timeout_s
        try:
            return self._ask(ends)
        except BaseException as error:
            self.close()  # Q2
            if isinstance(error, OSError):
                raise _unreachable(error, self.socket_path, self._timeout_s) from error
            raise

    def _ask(self, ends: float) -> DaemonStatus:
        to_say = b""
        if self._socket is None:
            self._connect()
            to_say = self._conversation.hello()
        self._exchange(to_say + self._conversation.question(), ends)
        while True:
            if (answer := self._conversation.feed(self._until(ends).recv(_PIECE))) is not None:
                return answer

    def _exchange(self, data: bytes, ends: float) -> None:
        # A daemon that turns this client away may have closed before it was asked: its reason is there to be read.
        with contextlib.suppress(BrokenPipeError):
            self._until(ends).sendall(data)

    def _connect(self) -> None:
        self._conversation = _Conversation(self.socket_path)
        self._socket = _connected(self.socket_path)

    def _until(self, ends: float) -> socket.socket:
        """The connection, which gives up at `ends`."""
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        assert self._socket is not None
        self._socket.settimeout(left)
        return self._socket

    def close(self) -> None:
        """End the connection; a later question opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncStatusClient:
    """As StatusClient, on an asyncio loop; one question at a time, those that come meanwhile wait."""

    def __init__(self, socket_path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = os.path.abspath(socket_path)
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._conversation = _Conversation(self.socket_path)
        self._asking = asyncio.Lock()

    async def status(self) -> DaemonStatus:
        """As StatusClient.status."""
        async with self._asking:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask()
            except BaseException as error:
                self._drop()  # Q2
                if isinstance(error, OSError):
                    raise _unreachable(error, self.socket_path, self._timeout_s) from error
                raise

    async def _ask(self) -> DaemonStatus:
        to_say = b""
        if self._streams is None:
            self._conversation = _Conversation(self.socket_path)
            self._streams = await asyncio.open_unix_connection(sock=_connected(self.socket_path), limit=_PIECE)
            to_say = self._conversation.hello()
        reader, writer = self._streams
        with contextlib.suppress(ConnectionError):  # as in StatusClient._exchange
            writer.write(to_say + self._conversation.question())
            await writer.drain()
        while True:
            if (answer := self._conversation.feed(await reader.read(_PIECE))) is not None:
                return answer

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def close(self) -> None:
        """End the connection; a later question opens a new one."""
        if self._streams is not None:
            _, writer = self._streams
            self._drop()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _connected(path: str) -> socket.socket:
    """A non-blocking connection to `path`. OSError where there can be none now."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        # A Unix socket connects at once, or not at all: EAGAIN means that the daemon's queue is full.
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _unreachable(error: OSError, path: str, timeout_s: float) -> SidecarError:
    """What kept a question from being asked, in words."""
    if isinstance(error, TimeoutError):
        return SidecarError(
            f"the daemon at {path} did not answer within {timeout_s:g} s: it is stuck or stopped; see its log, or its process"
        )
    match error.errno:
        case errno.ENOENT:
            return SidecarError(f"there is no socket {path}: give the one that the daemon has, or {start_sidecar(path)}")
        case errno.ECONNREFUSED:
            return SidecarError(f"nobody listens at {path} any more: the daemon has died; start it again")
        case errno.EACCES | errno.EPERM:
            return SidecarError(f"you may not open {path}: be the user, or in the group, that the daemon serves")
        case errno.EAGAIN:
            return SidecarError(f"the daemon at {path} takes no more connections for now: it is overrun or stuck; see its log")
        case errno.ENOTSOCK | errno.ENOTDIR | errno.EPROTOTYPE:
            return SidecarError(f"{path} is no socket of a daemon: {error.strerror}")
        case errno.ECONNRESET | errno.EPIPE:
            return SidecarError(f"the daemon at {path} went away in the middle of its answer; ask again when it is back")
        case _:
            return SidecarError(f"the daemon at {path} cannot be asked: {error.strerror or error}")
