"""The status over HTTP, read-only: the page, its JSON, the metrics, and the health check.

Invariants
  HTTP-1  No request changes anything: only GET and HEAD are allowed, and no request's body is read.
  HTTP-2  Without `http_public`, only this machine reaches the server, and no foreign web page can read it through a browser on
      this machine: a request must name a loopback host (against DNS rebinding), and no answer allows another origin.
  HTTP-3  Many clients that ask at once share one answer (`FRESH_S`), and their connections are bounded (`bounds.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from importlib.resources import files
from typing import TypeAlias

from aiohttp import hdrs, web

from checkpointd.daemon.http import metrics
from checkpointd.daemon.http.address import BACKLOG, is_loopback_host, listener_at, url_of
from checkpointd.daemon.http.bounds import Bounded
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.protocol.listener import Door
from checkpointd.daemon.status.model import DaemonStatus

log = logging.getLogger("checkpointd")

CONNECTIONS_MAX = 64
IDLE_S = 20.0
"""How long a client may take to read the answer, or to send the next request."""
HEAD_S = 5.0
"""How long a request may take to arrive, from its first byte."""
ANYBODY = -1
"""The uid for requests over HTTP, whose user is unknown."""
FRESH_S = 0.25
"""How long an answer is reused."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Protocols: TypeAlias = Callable[[], asyncio.Protocol]
Look: TypeAlias = Callable[[Hub], DaemonStatus]

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Server": "checkpointd",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@contextlib.asynccontextmanager
async def serving(
    hub: Hub,
    address: str,
    *,
    look: Look = standing,
    connections_max: int = CONNECTIONS_MAX,
    idle_s: float = IDLE_S,
    head_s: float = HEAD_S,
) -> AsyncIterator[str]:
    """Serve the hub's status at `address`, HOST:PORT or the path of a Unix socket, while the block runs; gives the URL.

    Port 0 takes a free one. UsageError if the address is invalid or lets other machines in without permission; SidecarError if
    the server cannot listen there.
    """
    with await listener_at(address, hub.config) as place:
        checked = not (isinstance(place, Door) or hub.config.http_public)
        bounds = Bounded(connections_max=connections_max, idle_s=idle_s, head_s=head_s)
        runner = web.AppRunner(
            _application(hub, look, bounds, check_host=checked),
            access_log=None,
            logger=_Malformed(hub),
            keepalive_timeout=idle_s * 0.75,
            lingering_time=0.0,
            max_line_size=4096,
            max_field_size=4096,
            read_bufsize=8192,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            assert runner.server is not None
            protocols = bounds.around(runner.server)
            if isinstance(place, Door):
                async with _through(place, protocols):
                    yield f"unix:{address}"
            else:
                server = await asyncio.get_running_loop().create_server(protocols, sock=place, backlog=BACKLOG)
                try:
                    yield url_of(address, place)
                finally:
                    server.close()
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def _through(door: Door, protocols: Protocols) -> AsyncIterator[None]:
    """Serve at the socket of `door`, and at the new one if it is bound again, while the block runs."""
    async with contextlib.aclosing(door.sockets()) as listeners:
        server = await _unix_server(await anext(listeners), protocols)
        following = asyncio.create_task(_follow(listeners, server, protocols))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _follow(listeners: AsyncIterator[socket.socket], server: asyncio.Server, protocols: Protocols) -> None:
    try:
        async for listener in listeners:
            server.close()  # existing connections stay
            server = await _unix_server(listener, protocols)
    finally:
        server.close()


async def _unix_server(listener: socket.socket, protocols: Protocols) -> asyncio.Server:
    return await asyncio.get_running_loop().create_unix_server(protocols, sock=listener, backlog=BACKLOG)


class _Malformed(logging.LoggerAdapter[logging.Logger]):
    """Shortens aiohttp's tracebacks about malformed requests to one line, and limits how many are logged."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(log, {})
        self._hub = hub

    def log(self, level: int, msg: object, *args: object, exc_info: object = None, **_: object) -> None:
        if level < logging.WARNING:
            return
        why = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1] if exc_info else None
        self._hub.said.warning("a request over HTTP", ANYBODY, "%s: %s", str(msg) % args if args else msg, why)


# --- what is served ------------------------------------------------------------------------------------------


def _application(hub: Hub, look: Look, bounds: Bounded, *, check_host: bool) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        bounds.request_came(request.transport)
        answer = _refusal(request, check_host) or await _handled(request, handler)
        answer.headers.update({name: value for name, value in _HEADERS.items() if name not in answer.headers})
        return answer

    app = web.Application(middlewares=[guard], client_max_size=1)
    app.router.add_get("/healthz", _health(hub))
    app.router.add_get("/api/status", _status(hub, look))
    app.router.add_get("/metrics", _metrics(hub))
    for path, asset in _PAGE:
        app.router.add_get(path, asset)
    return app


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _plain(error.status, error.reason)
    except Exception:
        log.exception("GET %s failed in an unforeseen way; please report it", request.path)
        return _plain(500, "this failed; the daemon's log says why")


def _refusal(request: web.Request, check_host: bool) -> web.Response | None:
    """The answer to a request that is refused (HTTP-1, HTTP-2); None if it is not."""
    refused: web.Response | None = None
    if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
        refused = _plain(405, "this is read-only: GET and HEAD alone")
        refused.headers["Allow"] = "GET, HEAD"
    elif request.body_exists:
        refused = _plain(413, "a question has no body here")
    elif check_host and not is_loopback_host(request.headers.get(hdrs.HOST)):
        refused = _plain(421, "this daemon answers to localhost and loopback addresses alone; tunnel to it under such a name")
    if refused is not None:
        refused.force_close()
    return refused


def _plain(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")


def _health(hub: Hub) -> Handler:
    async def health(_: web.Request) -> web.Response:
        return _plain(503, "leaving: finishing the saves in flight") if hub.leaving else _plain(200, "serving")

    return health


def _status(hub: Hub, look: Look) -> Handler:
    fresh = _Remade(lambda: look(hub).to_json())

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=fresh.get(), content_type="application/json")

    return status


def _metrics(hub: Hub) -> Handler:
    registry = metrics.registry(hub)
    forms = {form: _Remade(partial(metrics.exposition, registry, form)) for form in metrics.FORMS}

    async def scrape(request: web.Request) -> web.Response:
        form = metrics.form(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=forms[form].get(), headers={"Content-Type": metrics.FORMS[form]})

    return scrape


class _Remade:
    """The result of `make`, which is called again when the result is older than FRESH_S."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: tuple[float, bytes] | None = None

    def get(self) -> bytes:
        now = time.monotonic()
        if self._made is None or now - self._made[0] > FRESH_S:
            self._made = (now, self._make())
        return self._made[1]


def _page() -> Iterator[tuple[str, Handler]]:
    """Each file of the page with its path. No other files are served."""
    for entry in sorted((files("checkpointd.daemon.http") / "page").iterdir(), key=lambda entry: entry.name):
        kind = _TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            yield path, _asset(entry.read_bytes(), kind)


def _asset(body: bytes, kind: str) -> Handler:
    async def asset(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return asset


_PAGE = tuple(_page())
"""Read at import, because the sandbox may forbid the files later."""
