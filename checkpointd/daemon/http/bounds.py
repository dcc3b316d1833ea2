"""Limits of connections and time for HTTP clients. aiohttp would wait for ever for a request that does not end.

Invariants
  HTTPBOUND-1  At most `connections_max` connections are open. A new one beyond that closes the connection whose last whole
      request (or start, if it sent none) is longest ago. So slow clients never keep out a client that asks at once.
  HTTPBOUND-2  A connection is closed if a request is not whole `head_s` after its first byte, if no request begins within
      `idle_s`, or if the client does not read its answer for `idle_s`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import cast


class Bounded:
    """The connections of one server, within the limits above."""

    def __init__(self, *, connections_max: int, idle_s: float, head_s: float) -> None:
        self.connections_max, self.idle_s, self.head_s = connections_max, idle_s, head_s
        self._open: OrderedDict[asyncio.BaseTransport, _Guarded] = OrderedDict()
        """First comes the connection whose last whole request is longest ago."""

    def around(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A factory like `inner` whose protocols keep to the limits."""
        return lambda: _Guarded(self, inner())

    def admit(self, transport: asyncio.BaseTransport, guarded: _Guarded) -> None:
        if len(self._open) >= self.connections_max:
            _, slowest = self._open.popitem(last=False)
            slowest.end()
        self._open[transport] = guarded

    def gone(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)

    def request_came(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request came over `transport`, so its time limits begin again."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None and transport is not None:
            self._open.move_to_end(transport)
            guarded.wait_anew()

    @property
    def connections(self) -> int:
        return len(self._open)


class _Guarded(asyncio.Protocol):
    """One connection: passes everything on to the protocol `inner`."""

    def __init__(self, bounds: Bounded, inner: asyncio.Protocol) -> None:
        self._bounds, self._inner = bounds, inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_coming = False
        """A request has begun and is not whole yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._bounds.admit(transport, self)
        self._inner.connection_made(transport)
        self.wait_anew()

    def wait_anew(self) -> None:
        """Wait for the next request."""
        self._is_coming = False
        self._wait(self._bounds.idle_s)

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        """Close the connection at once."""
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._bounds.gone(self._transport)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_coming:
            self._is_coming = True
            self._wait(self._bounds.head_s)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
