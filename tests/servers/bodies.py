"""The ways of a body through a proxy: from the client or a file, to the server, to nobody, slowly, or cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO

from tests.servers.http_messages import CONTINUE, PIECE, RequestHead

SLICE_S = 0.05
"""How long the slices of a slow body take."""


class Cut(Exception):
    """The connection to the client ends here."""


async def only(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


async def pass_on(body: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
    """To the server. What it no longer takes, since it has answered, is read all the same: the client is to get the answer."""
    wanted = True
    try:
        async for piece in body:
            if wanted:
                try:
                    writer.write(piece)
                    await writer.drain()
                except OSError:
                    wanted = False
    except BaseException:
        writer.transport.abort()
        raise


async def keep(request: RequestHead, body: AsyncIterator[bytes], writer: asyncio.StreamWriter, file: IO[bytes] | None) -> None:
    """Read a body, which the client may only send when it is told to, into a file, or drop it."""
    if request.waits_for_continue:
        writer.write(CONTINUE)
        await writer.drain()
    async for piece in body:
        if file is not None:
            file.write(piece)


async def stored(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0)
    while piece := file.read(PIECE):
        yield piece


async def silence(reader: asyncio.StreamReader) -> None:
    """Until the client leaves."""
    while await reader.read(PIECE):
        pass
    raise Cut


async def cut_after(body: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    async for piece in body:
        yield piece[:count]
        count -= len(piece)
        if count < 0:
            raise Cut


async def slowly(body: AsyncIterator[bytes], bytes_per_s: float) -> AsyncIterator[bytes]:
    size = max(1, int(bytes_per_s * SLICE_S))
    async for piece in body:
        for at in range(0, len(piece), size):
            part = piece[at : at + size]
            await asyncio.sleep(len(part) / bytes_per_s)
            yield part
