"""Decodes messages from a stream of bytes, without I/O.

Invariants
  WIRE-1  A `Decoder` never holds more than one frame of `frame_bytes_max` and the bytes of one `put`, whatever comes in.
  WIRE-2  Malformed bytes raise WireError and nothing else. After that, the decoder takes no more bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import Buffer

from checkpointd.daemon.protocol.wire import DESCRIPTORS_MAX, HEAD, HELLO_BYTES_MAX, MAGIC, Message, decode
from checkpointd.errors import WireError


class Decoder:
    """Cuts a stream of bytes into pairs: a message, and the number of descriptors that come with it."""

    def __init__(self, frame_bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._bytes = bytearray()
        self._failed = False

    @property
    def buffered(self) -> int:
        """Bytes that are not part of a decoded message yet."""
        return len(self._bytes)

    @property
    def announced(self) -> int:
        """How many descriptors may come with the buffered frames: as many as they announce, if that is known already."""
        found = at = 0
        while at + HEAD.size <= len(self._bytes):
            _, descriptors, _, length = HEAD.unpack_from(self._bytes, at)
            found += descriptors
            at += HEAD.size + length
        return found + DESCRIPTORS_MAX if at < len(self._bytes) else found

    @property
    def next_bytes(self) -> int:
        """The length of the next message, or 0 if it is unknown. Decoding takes time in proportion."""
        return int(HEAD.unpack_from(self._bytes)[3]) if len(self._bytes) >= HEAD.size else 0

    def put(self, data: Buffer) -> None:
        """Buffer `data`. WireError if the stream was malformed before."""
        if self._failed:
            raise WireError("this stream was malformed before")
        self._bytes += data

    def whole(self) -> bool:
        """Whether a whole message is buffered. WireError if the bytes are not this protocol."""
        try:
            return self._length() is not None
        except WireError:
            self._fail()
            raise

    def take(self) -> tuple[Message, int] | None:
        """The next message; None if it is not whole yet. WireError if the bytes are not this protocol."""
        try:
            length = self._length()
            if length is None:
                return None
            end = HEAD.size + length
            descriptors, body = int(self._bytes[2]), bytes(memoryview(self._bytes)[HEAD.size : end])
            del self._bytes[:end]
            return decode(body), descriptors
        except WireError:
            self._fail()
            raise

    def feed(self, data: Buffer) -> Iterator[tuple[Message, int]]:
        """The messages that `data` completes. WireError if the bytes are not this protocol."""
        self.put(data)
        while (frame := self.take()) is not None:
            yield frame

    def _fail(self) -> None:
        self._failed = True
        self._bytes = bytearray()

    def _length(self) -> int | None:
        """The length of the next frame's body, if all of it is buffered."""
        if len(self._bytes) < HEAD.size:
            return None
        magic, descriptors, zero, length = HEAD.unpack_from(self._bytes)
        if magic != MAGIC or zero:
            raise WireError(f"this is not checkpointd's protocol: a frame begins with {bytes(self._bytes[: HEAD.size])!r}")
        if descriptors > DESCRIPTORS_MAX:
            raise WireError(f"a frame announces {descriptors} descriptors; at most {DESCRIPTORS_MAX} may come with one")
        if length > self.frame_bytes_max:
            raise WireError(f"a frame announces {length} bytes; at most {self.frame_bytes_max} are allowed here")
        return int(length) if len(self._bytes) >= HEAD.size + length else None
