"""A sidecar whose messages the test chooses, so that it can act like a daemon at the worst moment."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
from tests.unit.other_user import listen_as

M = TypeVar("M")
LIMIT_S = 60.0
"""Only a test that fails waits so long."""
Reply = Callable[[wire.Message], wire.Message | None]

WELCOME = wire.Welcome(protocol=1, release="test", pid=1, frame_bytes_max=1 << 20, slots_max=4, memory_bytes_max=1 << 30)


def well_behaved(message: wire.Message) -> wire.Message | None:
    """What a daemon with nothing to do answers at once."""
    match message:
        case wire.Hello():
            return WELCOME
        case wire.Join() | wire.Look():
            return wire.Joined(held=(), in_flight=())
        case wire.Ping():
            return wire.Pong()
        case wire.Save():
            return wire.PhaseEntered(save=message.save, phase="staging")
    return None


class ScriptedSidecar:
    """Listens at `socket`, one connection after the other; `reply` answers each message, before the test hears of it."""

    def __init__(self, folder: Path, reply: Reply = well_behaved) -> None:
        self.path = str(folder / "scripted_sidecar")
        self.reply = reply
        self.turned_away: wire.Message | None = None
        """What a new connection is told instead of being listened to."""
        self.connections = 0
        self.is_listening_to_one = True
        self._heard: queue.Queue[wire.Message] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def expect(self, kind: type[M]) -> M:
        """The next message of this kind; those before it are dropped."""
        while True:
            message = self._heard.get(timeout=LIMIT_S)
            if isinstance(message, kind):
                return message

    def heard(self) -> list[wire.Message]:
        """What came and was not yet looked at."""
        found = []
        while not self._heard.empty():
            found.append(self._heard.get())
        return found

    def say(self, message: wire.Message, descriptor: int | None = None) -> None:
        assert self._connection is not None
        frame = wire.encode(message, 0 if descriptor is None else 1)
        socket.send_fds(self._connection, [frame], [] if descriptor is None else [descriptor])

    def say_bytes(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(data)

    def hang_up(self) -> None:
        """End the connection; the next one is taken."""
        assert self._connection is not None
        self._connection.shutdown(socket.SHUT_RDWR)

    def listen_as(self, uid: int) -> None:
        """From now on the kernel says that user `uid` is at this end."""
        listen_as(uid, self._listener)

    def stop_listening(self) -> None:
        """From now on nobody is there."""
        os.unlink(self.path)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connection = connection
            self.is_listening_to_one = True
            self.connections += 1
            with connection, suppress(BrokenPipeError, ConnectionResetError):  # whoever asked may have left meanwhile
                if self.turned_away is None:
                    self._converse(connection)
                else:
                    self.say(self.turned_away)
            self.is_listening_to_one = False

    def _converse(self, connection: socket.socket) -> None:
        decoder = Decoder(1 << 20)
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 4)
            except OSError:
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                return
            for message, _ in decoder.feed(data):
                answer = self.reply(message)
                if answer is not None:
                    self.say(answer)
                self._heard.put(message)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
