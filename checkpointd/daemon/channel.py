"""One end of a connection to the sidecar's socket: whole messages and the descriptors that come with them, in order.

Invariants
  X1  A descriptor that arrives belongs to the message that announces it; one that no message announces is closed, and the
      connection with it.
  X2  No message follows half a frame: where one cannot be sent whole, none is sent any more. What the other end has sent is
      still received: a client that has died may have said something before.
  X3  Who sends without a pause does not hold the loop: others have their turn between two messages, and between two pieces.

Works on a raw non-blocking socket under any asyncio loop: asyncio's streams would drop descriptors.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from checkpointd.daemon import wire
from checkpointd.daemon.wire import Decoder, Message
from checkpointd.errors import WireError

T = TypeVar("T")
_PIECE = 256 << 10
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by the kernel's word (SO_PEERCRED); pid 0: a process that this namespace does not show."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message; `descriptor` is the receiver's to close."""

    message: Message
    descriptor: int | None = None


class Channel:
    """Sends and receives on `connection`, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = Decoder()
        self._messages: deque[tuple[Message, int]] = deque()
        self._descriptors: deque[int] = deque()
        self._sending = asyncio.Lock()
        self._waits: set[asyncio.Future[None]] = set()
        self._closed = False
        self._cut = False
        self._last = False

    @property
    def peer(self) -> Peer:
        return Peer(*_PEER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))

    @property
    def closed(self) -> bool:
        return self._closed

    def allow_frames(self, nbytes: int) -> None:
        """Take frames of up to `nbytes` from here on: the handshake is done."""
        self._decoder.frame_bytes_max = nbytes

    async def receive(self, stall_s: float | None = None) -> Received | None:
        """The next message; None where the other end has closed. WireError, after which the channel is of no use.

        `stall_s`: how long the rest of a message may take to come once it has begun.
        """
        await asyncio.sleep(0)  # X3
        while not self._messages:
            if not await self._read(stall_s if self._decoder.buffered else None):
                return None
            await asyncio.sleep(0)  # X3
        message, announced = self._messages.popleft()
        if not announced:
            return Received(message)
        if not self._descriptors:
            raise WireError(f"a {type(message).__name__} message came without the descriptor that it announced")
        return Received(message, self._descriptors.popleft())

    async def _read(self, patience_s: float | None) -> bool:
        """Take in what is there, waiting for it; False at the end of the stream."""
        try:
            async with asyncio.timeout(patience_s):
                data = await self._when_ready(self._receive_piece, reading=True)
        except TimeoutError as error:
            raise WireError(f"half a message came, and then nothing for {patience_s:g} s") from error
        except ConnectionError:
            return False
        if not data:
            return False
        self._messages.extend(self._decoder.feed(data))
        unclaimed = len(self._descriptors) - sum(announced for _, announced in self._messages)
        if unclaimed > self._decoder.announced:
            raise WireError("a descriptor came that no message announced")
        return True

    def _receive_piece(self) -> bytes:
        space = socket.CMSG_SPACE((wire.DESCRIPTORS_MAX + 1) * array.array("i").itemsize)
        data, controls, flags, _ = self._socket.recvmsg(_PIECE, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                self._descriptors.extend(found)
        if flags & socket.MSG_CTRUNC:
            raise WireError("more descriptors came at once than a message may have, or this process has no room for them")
        return data

    async def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send `message`, and a copy of `descriptor` with it. ConnectionError where the other end is gone."""
        frame = memoryview(wire.encode(message, 0 if descriptor is None else 1))
        async with self._sending:
            if self._closed or self._cut:
                raise ConnectionError("nothing can be sent any more")
            try:
                if descriptor is not None:
                    frame = frame[await self._when_ready(partial(self._send_with, frame, descriptor), reading=False) :]
                while frame:
                    frame = frame[await self._when_ready(partial(self._socket.send, frame), reading=False) :]
            except BaseException:
                self._cut = True  # X2
                raise

    def _send_with(self, frame: memoryview, descriptor: int) -> int:
        return socket.send_fds(self._socket, [frame[:_PIECE]], [descriptor])

    async def _when_ready(self, call: Callable[[], T], *, reading: bool) -> T:
        loop = asyncio.get_running_loop()
        add, remove = (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
        while True:
            if self._closed:
                raise ConnectionError("the channel is closed")
            try:
                return call()
            except (BlockingIOError, InterruptedError):
                if reading and self._last:
                    raise ConnectionError("the other end is gone") from None
            ready: asyncio.Future[None] = loop.create_future()
            self._waits.add(ready)
            add(self._socket.fileno(), _resolve, ready)
            try:
                await ready
            finally:
                self._waits.discard(ready)
                if not self._closed:
                    remove(self._socket.fileno())

    def expect_no_more(self) -> None:
        """The other end is gone: what it has sent is still received, and then the stream ends, whoever else holds it open."""
        self._last = True
        for ready in self._waits:
            _resolve(ready)

    def close(self) -> None:
        """End the connection; whoever waits on it here hears a ConnectionError."""
        if self._closed:
            return
        self._closed = True
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        loop, number = asyncio.get_running_loop(), self._socket.fileno()
        if self._waits:
            # Before the number can be given to another file.
            loop.remove_reader(number)
            loop.remove_writer(number)
        for ready in self._waits:
            _resolve(ready)
        self._socket.close()


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def connect(path: str) -> Channel:
    """A channel to the daemon that listens at `path`. OSError where nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        # A Unix socket connects at once, or not at all: EAGAIN means that the daemon's queue is full.
        connection.connect(path)
        return Channel(connection)
    except BaseException:
        connection.close()
        raise
