"""What one HTTP client may take: connections and time. aiohttp waits for ever for a request that does not end.

Invariants
  B1  At most `connections_max` connections are open; one more is told so and closed.
  B2  A connection that brings no whole request within `idle_s`, or does not read its answer, is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\nContent-Length: 21\r\n"
    b"Connection: close\r\n\r\ntoo many connections\n"
)


class Bounded:
    """The connections of one server, within the bounds above."""

    def __init__(self, *, connections_max: int, idle_s: float) -> None:
        self.connections_max, self.idle_s = connections_max, idle_s
        self._open: dict[asyncio.BaseTransport, _Guarded] = {}

    def around(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Makes a protocol for each connection, as `inner` does, and keeps it within the bounds."""
        return lambda: _Guarded(self, inner)

    def admit(self, transport: asyncio.BaseTransport, guarded: _Guarded) -> bool:
        if len(self._open) >= self.connections_max:
            return False
        self._open[transport] = guarded
        return True

    def gone(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)

    def request_came(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request came over `transport`: its time begins anew."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None:
            guarded.wait_anew()

    @property
    def connections(self) -> int:
        return len(self._open)


class _Guarded(asyncio.Protocol):
    """One connection: hands everything on to a protocol of its own, once it is admitted."""

    def __init__(self, bounds: Bounded, inner: Callable[[], asyncio.Protocol]) -> None:
        self._bounds, self._make = bounds, inner
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._bounds.admit(transport, self):
            self._transport.write(FULL)
            self._transport.close()
            return
        self._inner = self._make()
        self._inner.connection_made(transport)
        self.wait_anew()

    def wait_anew(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._transport is not None
        self._timer = asyncio.get_running_loop().call_later(self._bounds.idle_s, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._bounds.gone(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
