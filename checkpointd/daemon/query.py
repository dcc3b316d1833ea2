"""Asks a daemon for its status over its socket: for scripts, synchronous and asynchronous, and for the command line.

Invariants
  QUERY-1  Every failure is a SidecarError that says what to do; none takes longer than `timeout_s`.
  QUERY-2  A client that failed has no connection: its next question opens a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from checkpointd import __version__
from checkpointd.commands import MAY_NOT_OPEN, start_sidecar
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
from checkpointd.daemon.protocol.peers import Peer, connected, peer_of
from checkpointd.daemon.status.model import DaemonStatus
from checkpointd.errors import SidecarError, WireError

TIMEOUT_S = 5.0
_PIECE = 256 << 10


class _Conversation:
    """The status side of the protocol, without I/O: bytes to send, and what the daemon's bytes mean."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._decoder = Decoder()
        self.welcome: wire.Welcome | None = None
        self._parts: list[str] = []

    def hello(self) -> bytes:
        return wire.encode(wire.Hello(protocols=wire.PROTOCOLS, release=__version__, role="status"))

    def question(self) -> bytes:
        return wire.encode(wire.Query())

    def feed(self, data: bytes) -> DaemonStatus | None:
        """The answer, once `data` completes it. SidecarError where the daemon refuses, or speaks something else."""
        try:
            if not data:
                raise SidecarError(
                    f"the daemon at {self._path} closed the connection without an answer",
                    "it is leaving, or has too many clients",
                )
            for message, _ in self._decoder.feed(data):
                if (answer := self._take(message)) is not None:
                    return answer
        except WireError as error:
            seen = f"the program that listens at {self._path} does not speak as a checkpointd daemon does: {error}"
            raise SidecarError(seen, "give the socket of a checkpointd daemon, or upgrade the older one") from error
        return None

    def _take(self, message: wire.Message) -> DaemonStatus | None:
        match message:
            case wire.Welcome():
                self._welcomed(message)
            case wire.Report() if self.welcome is not None:
                self._parts.append(message.status)
                if not message.more:
                    text, self._parts = "".join(self._parts), []
                    return self._status(text, self.welcome.release)
            case wire.Refused():
                raise SidecarError(f"the daemon at {self._path} refuses: {message.error.message}")
            case _:
                raise WireError(f"a {type(message).__name__} message is no answer to a status client")
        return None

    def _welcomed(self, welcome: wire.Welcome) -> None:
        if wire.common_protocol((welcome.protocol, welcome.protocol)) is None:
            raise SidecarError(
                f"the daemon at {self._path} is checkpointd {welcome.release} and wants protocol {welcome.protocol}; this is "
                f"{__version__}, which speaks {wire.PROTOCOLS[0]} to {wire.PROTOCOLS[1]}",
                "upgrade the older one",
            )
        self._decoder.frame_bytes_max = min(welcome.frame_bytes_max, wire.FRAME_BYTES_MAX)
        self.welcome = welcome

    def _status(self, text: str, release: str) -> DaemonStatus:
        try:
            return msgspec.json.decode(text, type=DaemonStatus)
        except msgspec.DecodeError as error:
            raise SidecarError(
                f"the status of the daemon at {self._path} (checkpointd {release}) cannot be read by this release "
                f"({__version__}): {error}",
                "upgrade the older one",
            ) from error


class StatusClient:
    """Asks the daemon that listens at `socket_path`; for one thread at a time.

    Connects at the first question. After a SidecarError it can be asked again: the daemon may be back.
    `sidecar_uid`: the user that the daemon runs as, unless it is your own or the superuser.
    """

    def __init__(
        self, socket_path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S, sidecar_uid: int | None = None
    ) -> None:
        self.socket_path = os.path.abspath(socket_path)
        self._timeout_s, self._sidecar_uid = timeout_s, sidecar_uid
        self._socket: socket.socket | None = None
        self._conversation = _Conversation(self.socket_path)

    def status(self) -> DaemonStatus:
        """How things stand, from the daemon's memory alone: asking costs no storage anything.

        SidecarError where nobody listens, or a stranger, the permission is missing, the versions do not match, or no
        answer comes in time.
        """
        ends = time.monotonic() + self._timeout_s
        try:
            return self._ask(ends)
        except BaseException as error:
            self.close()  # QUERY-2
            if isinstance(error, OSError):
                raise _unreachable(error, self.socket_path, self._timeout_s) from error
            raise

    @property
    def peer(self) -> Peer:
        """The process that answered the last question, by the kernel's word. SidecarError if no question was answered."""
        return peer_of(self._connected())

    @property
    def protocol(self) -> int:
        """The version of the protocol that both sides speak. SidecarError if no question was answered."""
        self._connected()
        assert self._conversation.welcome is not None
        return self._conversation.welcome.protocol

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise SidecarError(f"there is no connection to the daemon at {self.socket_path}", "ask for its status first")
        return self._socket

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
        with contextlib.suppress(ConnectionError):
            self._until(ends).sendall(data)

    def _connect(self) -> None:
        self._conversation = _Conversation(self.socket_path)
        self._socket = connected(self.socket_path, self._sidecar_uid)

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

    def __init__(
        self, socket_path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S, sidecar_uid: int | None = None
    ) -> None:
        self.socket_path = os.path.abspath(socket_path)
        self._timeout_s, self._sidecar_uid = timeout_s, sidecar_uid
        self._socket: socket.socket | None = None
        self._conversation = _Conversation(self.socket_path)
        self._asking = asyncio.Lock()

    async def status(self) -> DaemonStatus:
        """As StatusClient.status."""
        async with self._asking:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask()
            except BaseException as error:
                self._drop()  # QUERY-2
                if isinstance(error, OSError):
                    raise _unreachable(error, self.socket_path, self._timeout_s) from error
                raise

    async def _ask(self) -> DaemonStatus:
        to_say = b""
        if self._socket is None:
            self._conversation = _Conversation(self.socket_path)
            self._socket = connected(self.socket_path, self._sidecar_uid)
            to_say = self._conversation.hello()
        # Not a StreamReader: after a write that failed it gives the failure, and not the reason that is there to be read.
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # as in StatusClient._exchange
            await loop.sock_sendall(self._socket, to_say + self._conversation.question())
        while True:
            if (answer := self._conversation.feed(await loop.sock_recv(self._socket, _PIECE))) is not None:
                return answer

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """End the connection; a later question opens a new one."""
        self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _unreachable(error: OSError, path: str, timeout_s: float) -> SidecarError:
    """Why the daemon at `path` gave no answer, and what to do."""
    if isinstance(error, TimeoutError):
        return SidecarError(
            f"the daemon at {path} did not answer within {timeout_s:g} s",
            "it is stuck or stopped; read its log, then restart it: its trainers persist meanwhile",
        )
    match error.errno:
        case errno.ENOENT:
            return SidecarError(f"there is no socket {path}", f"give the one that the daemon has, or {start_sidecar(path)}")
        case errno.ECONNREFUSED if not Path(path).is_socket():
            return SidecarError(f"{path} is no socket", "give the daemon's, or remove it before a daemon is started there")
        case errno.ECONNREFUSED:
            return SidecarError(f"nobody listens at {path} any more", f"the daemon has died; {start_sidecar(path)}")
        case errno.EACCES | errno.EPERM:
            return SidecarError(f"you may not open {path}", MAY_NOT_OPEN)
        case errno.EAGAIN:
            return SidecarError(f"the daemon at {path} takes no more connections for now", "it is busy or stuck; read its log")
        case errno.ENOTSOCK | errno.ENOTDIR | errno.EPROTOTYPE:
            return SidecarError(f"{path} is not the socket of a daemon: {error.strerror}")
        case errno.ECONNRESET | errno.EPIPE:
            return SidecarError(f"the daemon at {path} went away in the middle of its answer", "ask again when it is back")
        case _:
            return SidecarError(f"the daemon at {path} cannot be asked: {error.strerror or error}")
