"""Limits for each HTTP client: connections and time. aiohttp would wait for ever for a request that does not end.

Invariants
  HTTPBOUND-1  At most `connections_max` connections are open: one more takes the place of the one whose last whole request, or
      whose beginning where it brought none, is longest ago. Whoever asks at once is not kept out by others who are slow.
  HTTPBOUND-2  A connection is closed that does not bring a whole request within `head_s` of its first byte, or none within
      `idle_s`, or does not read its answer for `idle_s`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import cast


class Bounded:
    """The connections of one server, within the bounds above."""

    def __init__(self, *, connections_max: int, idle_s: float, head_s: float) -> None:
        self.connections_max, self.idle_s, self.head_s = connections_max, idle_s, head_s
        self._open: OrderedDict[asyncio.BaseTransport, _Guarded] = OrderedDict()
        """The one whose last whole request is longest ago comes first."""

    def around(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Makes a protocol for each connection, as `inner` does, and keeps it within the bounds."""
        return lambda: _Guarded(self, inner)

    def admit(self, transport: asyncio.BaseTransport, guarded: _Guarded) -> None:
        if len(self._open) >= self.connections_max:
            _, slowest = self._open.popitem(last=False)
            slowest.end()
        self._open[transport] = guarded

    def gone(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)

    def request_came(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request came over `transport`: its time begins anew."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None and transport is not None:
            self._open.move_to_end(transport)
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
        self._is_coming = False
        """A request has begun and is not whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._bounds.admit(transport, self)
        self._inner = self._make()
        self._inner.connection_made(transport)
        self.wait_anew()

    def wait_anew(self) -> None:
        """A whole request came, or none is due yet."""
        self._is_coming = False
        self._wait(self._bounds.idle_s)

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        """Close the connection, whatever is still on its way."""
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._bounds.gone(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_coming:
            self._is_coming = True
            self._wait(self._bounds.head_s)
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
