"""HTTP/1.1 as a proxy needs it: heads that are kept byte for byte, and bodies in pieces, with their framing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import parse_qsl, unquote

PIECE = 1 << 17
HEAD_MAX = 1 << 17
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or a reply."""

    raw: bytes

    @cached_property
    def first_line(self) -> list[str]:
        return self.raw.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """By name, in lower case."""
        lines = self.raw.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def closes(self) -> bool:
        """Whether its sender closes the connection afterwards."""
        return self.headers.get("connection", "").lower() == "close" or "HTTP/1.0" in self.first_line


@dataclass(frozen=True)
class RequestHead(Head):
    """As `PUT /bucket/key?partNumber=1&uploadId=a HTTP/1.1`."""

    @property
    def method(self) -> str:
        return self.first_line[0]

    @property
    def target(self) -> str:
        return self.first_line[1]

    @cached_property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @cached_property
    def query(self) -> Mapping[str, str]:
        """`?uploads` is there with an empty value."""
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    @property
    def waits_for_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"

    def body(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        return chunks(reader) if self.chunked else counted(reader, int(self.headers.get("content-length", "0")))


@dataclass(frozen=True)
class ReplyHead(Head):
    """As `HTTP/1.1 200 OK`."""

    @property
    def status(self) -> int:
        return int(self.first_line[1])

    @property
    def until_close(self) -> bool:
        """Whether only the end of the connection ends its body."""
        return not self.chunked and "content-length" not in self.headers and self.status not in (204, 304)

    def body(self, reader: asyncio.StreamReader, method: str) -> AsyncIterator[bytes]:
        if method == "HEAD" or self.status in (204, 304):
            return counted(reader, 0)
        if self.chunked:
            return chunks(reader)
        return rest(reader) if self.until_close else counted(reader, int(self.headers["content-length"]))


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """The bytes of a head, with the empty line; b"" at the end of the connection. Raises EOFError in the middle of a head."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""


async def counted(reader: asyncio.StreamReader, count: int) -> AsyncIterator[bytes]:
    while count:
        piece = await reader.read(min(count, PIECE))
        if not piece:
            raise EOFError(f"{count} bytes of a body are missing")
        count -= len(piece)
        yield piece


async def rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(PIECE):
        yield piece


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A chunked body as it is, with the sizes and the trailers."""
    while True:
        line = await reader.readuntil(b"\r\n")
        yield line
        size = int(line.partition(b";")[0], 16)
        if not size:
            break
        async for piece in counted(reader, size + 2):
            yield piece
    while line != b"\r\n":
        line = await reader.readuntil(b"\r\n")
        yield line
