"""Asks a daemon for its status over its socket: for scripts, synchronous and asynchronous, and for the command line.

Invariants
  QUERY-1  Every failure to get an answer is a SidecarError that says what to do, and comes within `timeout_s`.
  QUERY-2  After a failure the client has no connection; its next question opens a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from checkpointd import __version__, arguments
from checkpointd.commands import start_sidecar
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
from checkpointd.daemon.protocol.peers import Peer, connected, peer_of
from checkpointd.daemon.status.model import DaemonStatus
from checkpointd.errors import SidecarError, WireError
from checkpointd.system_errors import explained

TIMEOUT_S = 5.0
_PIECE = 256 << 10


class _Conversation:
    """The status client's side of the protocol, without I/O: makes the bytes to send, and decodes the daemon's answers."""

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
        """The answer, once `data` completes it. SidecarError if the daemon refuses, or does not speak this protocol."""
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
            seen = f"the program that listens at {self._path} does not speak the protocol of a checkpointd daemon: {error}"
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
                raise WireError(f"a {type(message).__name__} message does not answer a status client")
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


class _Client:
    """The connection of a status client to the daemon at `socket_path`."""

    def __init__(
        self, socket_path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S, sidecar_uid: int | None = None
    ) -> None:
        arguments.path("socket_path", socket_path)
        arguments.seconds("timeout_s", timeout_s, most=arguments.TIMEOUT_S_MAX)
        if sidecar_uid is not None:
            arguments.whole("sidecar_uid", sidecar_uid, least=0)
        self.socket_path = os.path.abspath(socket_path)
        self._timeout_s, self._sidecar_uid = timeout_s, sidecar_uid
        self._socket: socket.socket | None = None
        self._conversation = _Conversation(self.socket_path)

    def _opened(self) -> tuple[socket.socket, bytes]:
        """The connection, made if there is none, and the bytes that ask for the status."""
        if self._socket is not None:
            return self._socket, self._conversation.question()
        self._conversation = _Conversation(self.socket_path)
        self._socket = connected(self.socket_path, self._sidecar_uid)
        return self._socket, self._conversation.hello() + self._conversation.question()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """End the connection after a failure (QUERY-2); a system error becomes a SidecarError (QUERY-1)."""
        try:
            yield
        except BaseException as error:
            self._drop()
            if isinstance(error, OSError):
                raise _unreachable(error, self.socket_path, self._timeout_s) from error
            raise

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class StatusClient(_Client):
    """Asks the daemon that listens at `socket_path`; for one thread at a time.

    Connects at the first question. You can ask again after a SidecarError: the daemon may be back. `sidecar_uid`: the user that
    the daemon runs as, unless that is you or the superuser. Raises UsageError for an argument that cannot be.
    """

    def status(self) -> DaemonStatus:
        """The daemon's status, from its memory, so asking does not use the storage.

        SidecarError if nobody listens, another user's process listens, a permission is missing, the versions do not match, or
        no answer comes in time.
        """
        with self._failures():
            return self._ask(time.monotonic() + self._timeout_s)

    @property
    def peer(self) -> Peer:
        """The process that answered the last question, as the kernel names it. SidecarError if no question was answered."""
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
        connection, question = self._opened()
        _wait_until(connection, ends)
        # A daemon that refuses this client may have closed the connection already. Its reason can still be read.
        with contextlib.suppress(ConnectionError):
            connection.sendall(question)
        while True:
            _wait_until(connection, ends)
            if (answer := self._conversation.feed(connection.recv(_PIECE))) is not None:
                return answer

    def close(self) -> None:
        """End the connection; a later question opens a new one."""
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncStatusClient(_Client):
    """As StatusClient, on an asyncio loop; several questions at once wait for each other."""

    def __init__(
        self, socket_path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S, sidecar_uid: int | None = None
    ) -> None:
        super().__init__(socket_path, timeout_s=timeout_s, sidecar_uid=sidecar_uid)
        self._asking = asyncio.Lock()

    async def status(self) -> DaemonStatus:
        """As StatusClient.status."""
        async with self._asking:
            with self._failures():
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask()

    async def _ask(self) -> DaemonStatus:
        connection, question = self._opened()
        # Not a StreamReader: after a failed write it raises that failure, although the daemon's reason can still be read.
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # as in StatusClient._ask
            await loop.sock_sendall(connection, question)
        while True:
            if (answer := self._conversation.feed(await loop.sock_recv(connection, _PIECE))) is not None:
                return answer

    async def close(self) -> None:
        """End the connection; a later question opens a new one."""
        self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _wait_until(connection: socket.socket, ends: float) -> None:
    """Let the next call on `connection` raise TimeoutError at `ends`."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _unreachable(error: OSError, path: str, timeout_s: float) -> SidecarError:
    """Why the daemon at `path` did not answer, and what to do."""
    if isinstance(error, TimeoutError):
        return SidecarError(
            f"the daemon at {path} did not answer within {timeout_s:g} s",
            "it is stuck or stopped; read its log, then restart it: its trainers persist meanwhile",
        )
    reason, advice = explained(error, "socket")
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        advice = f"{advice}, or {start_sidecar(path)}"
    return SidecarError(f"the daemon at {path} cannot be asked: {reason}", advice)
