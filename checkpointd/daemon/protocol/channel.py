"""One end of a connection to the sidecar's socket. Sends and receives whole messages with their descriptors, in order.

Invariants
  CHANNEL-1  A descriptor belongs to the message that announces it. If no message announces it, it is closed with the
      connection.
  CHANNEL-2  If a message cannot be sent whole, no message is sent after it. The channel still receives: a client that has died
      may have sent something before.
  CHANNEL-3  A client that sends without a pause does not block the loop: other tasks run between two messages and between two
      pieces. All connections together decode one large message in each turn of the loop (`LoopTurns`).
  CHANNEL-4  Received bytes of an incomplete message, beyond FREE_BYTES, are charged to the account of `charge_to`. A message
      must be whole `stall_s` after its first byte.

Works on a raw non-blocking socket under any asyncio loop, because asyncio's streams would drop descriptors.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from checkpointd.daemon.accounts import Account, Charge
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
from checkpointd.daemon.protocol.peers import Peer, connected, peer_of
from checkpointd.daemon.protocol.wire import Message
from checkpointd.errors import WireError

T = TypeVar("T")
PIECE = 32 << 10
FREE_BYTES = 64 << 10
"""Buffered bytes that are not charged. A client that sends as ours does never needs more."""
LIGHT_BYTES = 2048
"""A message up to this size is decoded without waiting for a turn."""
_SO_PEERGROUPS = 59
_GROUPS_BYTES_MAX = 1024
"""The largest buffer that Python takes. The groups of a user with more are looked up in the user database."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message. The receiver closes `descriptor`."""

    message: Message
    descriptor: int | None = None


class LoopTurns:
    """Runs one piece of heavy work at a time, and lets all other tasks run in between."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, work: Callable[[], T]) -> T:
        """Call `work`, which may take a few milliseconds, when it is its turn."""
        async with self._lock:
            done = work()
            await asyncio.sleep(0)
            return done

    async def take_each(self, steps: Iterator[object]) -> None:
        """Run all `steps`, each in a turn of its own."""
        end = object()
        while await self.take(lambda: next(steps, end)) is not end:
            continue


class Channel:
    """Sends and receives on `connection`, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = Decoder()
        self._began: float | None = None
        """When the first byte of the incomplete message came."""
        self._turns = LoopTurns()
        self._charge: Charge | None = None
        self._descriptors: deque[int] = deque()
        self._sending = asyncio.Lock()
        self._waits: set[asyncio.Future[None]] = set()
        self._closed = False
        self._cut = False
        self._last = False

    @property
    def peer(self) -> Peer:
        return peer_of(self._socket)

    @property
    def groups(self) -> tuple[int, ...] | None:
        """The supplementary groups of the user at the other end (SO_PEERGROUPS); None if the kernel does not tell."""
        try:
            data = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
        except OSError:
            return None
        return tuple(array.array("I", data))

    @property
    def closed(self) -> bool:
        return self._closed

    def allow_frames(self, nbytes: int) -> None:
        """Accept frames of up to `nbytes` from here on, after the handshake."""
        self._decoder.frame_bytes_max = nbytes

    def charge_to(self, account: Account, turns: LoopTurns) -> None:
        """From here on, charge received bytes to `account`, and decode large messages in `turns`."""
        self._charge, self._turns = Charge(account), turns

    async def receive(self, stall_s: float | None = None) -> Received | None:
        """The next message; None if the other end has closed. The channel cannot be used after an error.

        WireError if the bytes are not this protocol or a message is not whole `stall_s` after it began. SidecarFullError if
        there is no room for it.
        """
        await asyncio.sleep(0)  # CHANNEL-3
        while not self._decoder.whole():
            if not await self._read(stall_s):
                return None
            await asyncio.sleep(0)  # CHANNEL-3
        found = await self._turns.take(self._decoder.take) if self._decoder.next_bytes > LIGHT_BYTES else self._decoder.take()
        assert found is not None, "a whole message was there"
        self._note_buffered()
        message, announced = found
        if not announced:
            return Received(message)
        if not self._descriptors:
            raise WireError(f"a {type(message).__name__} message came without the descriptor that it announced")
        return Received(message, self._descriptors.popleft())

    async def _read(self, stall_s: float | None) -> bool:
        """Wait for bytes and buffer them; False at the end of the stream."""
        loop = asyncio.get_running_loop()
        began = loop.time() if self._began is None else self._began
        until = began + stall_s if stall_s is not None and self._decoder.buffered else None
        try:
            async with asyncio.timeout_at(until):
                data = await self._when_ready(self._receive_piece, reading=True)
        except TimeoutError as error:
            raise WireError(f"half a message came, and the rest did not within {stall_s:g} s") from error
        except ConnectionError:
            return False
        if not data:
            return False
        self._decoder.put(data)
        if self._descriptors and len(self._descriptors) > self._decoder.announced:
            raise WireError("a descriptor came that no message announced")
        if self._began is None:
            self._began = loop.time()
        self._note_buffered()
        return True

    def _note_buffered(self) -> None:
        if not self._decoder.buffered:
            self._began = None
        elif self._decoder.whole():
            self._began = asyncio.get_running_loop().time()  # the next message began now at the earliest
        if self._charge is not None:
            self._charge.resize(max(0, self._decoder.buffered - FREE_BYTES))

    def _receive_piece(self) -> bytes:
        space = socket.CMSG_SPACE((wire.DESCRIPTORS_MAX + 1) * array.array("i").itemsize)
        data, controls, flags, _ = self._socket.recvmsg(PIECE, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                self._descriptors.extend(found)
        if flags & socket.MSG_CTRUNC:
            raise WireError("more descriptors came at once than a message may have, or this process has no room for them")
        return data

    async def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send `message`, with a copy of `descriptor`. ConnectionError if the other end is gone."""
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
                self._cut = True  # CHANNEL-2
                raise

    def _send_with(self, frame: memoryview, descriptor: int) -> int:
        return socket.send_fds(self._socket, [frame[:PIECE]], [descriptor])

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
        """The other end is gone. Receive the rest, then end the stream, even if another process holds the socket open."""
        self._last = True
        for ready in self._waits:
            _resolve(ready)

    def close(self) -> None:
        """End the connection. Tasks that wait on it get a ConnectionError."""
        if self._closed:
            return
        self._closed = True
        if self._charge is not None:
            self._charge.release()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        loop, number = asyncio.get_running_loop(), self._socket.fileno()
        if self._waits:
            # Before another file can get the number.
            loop.remove_reader(number)
            loop.remove_writer(number)
        for ready in self._waits:
            _resolve(ready)
        self._socket.close()


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def connect(path: str, sidecar_uid: int | None = None) -> Channel:
    """A channel to the daemon that listens at `path`; see `peers.connected`."""
    return Channel(connected(path, sidecar_uid))
