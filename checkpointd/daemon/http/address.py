"""Addresses for the status over HTTP: only this machine, unless other machines are allowed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator

from checkpointd.config import ServeConfig
from checkpointd.daemon.protocol.listener import Door, door_at
from checkpointd.errors import SidecarError, UsageError
from checkpointd.system_errors import in_words

BACKLOG = 64
_Place = tuple[socket.AddressFamily, tuple[str, int]]


async def listener_at(address: str, config: ServeConfig) -> contextlib.AbstractContextManager[socket.socket | Door]:
    """A socket that listens at HOST:PORT, or the door at the path of a Unix socket (mode 0600, 0660 for `config.group`).

    UsageError if it is neither, or lets other machines in without permission; SidecarError if it is not possible to listen.
    """
    if "/" in address:
        if address == config.socket:
            raise UsageError(f"http is {address}, which is the daemon's own socket: give it another path")
        return door_at(address, config.group)
    host, port = parse_address(address)
    return _bound(await _resolved(host, port, public=config.http_public), address)


def parse_address(address: str) -> tuple[str, int]:
    """HOST and PORT of `HOST:PORT`, with an IPv6 address in brackets. UsageError for another form."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]\s]*)):(\d{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise UsageError(
            f"http is {address!r}: give HOST:PORT, as in 127.0.0.1:9733 or [::1]:9733, or a Unix socket's path, with a / in it"
        )
    return match[1] or match[2] or "", int(match[3])


async def _resolved(host: str, port: int, *, public: bool) -> _Place:
    """The address to bind. All addresses of `host` must be loopback addresses, unless `public`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise UsageError(f"http is {host}:{port}, and {host!r} is not a host that this machine knows: {error}") from error
    outside = [str(place[0]) for *_, place in found if not _is_loopback(str(place[0]))]
    if outside and not public:
        raise UsageError(
            f"http is {host}:{port}, which other machines may reach at {outside[0]}: paths, tags and errors of every job here "
            "would be anyone's, since no password is asked for. Take 127.0.0.1, or a Unix socket, and a tunnel or proxy that "
            "knows who asks; or allow it with http_public (--http-public)"
        )
    family, _, _, _, place = found[0]
    return family, (str(place[0]), int(place[1]))


@contextlib.contextmanager
def _bound(place: _Place, address: str) -> Iterator[socket.socket]:
    family, where = place
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(BACKLOG)
        except OSError as error:
            raise SidecarError(
                f"cannot serve HTTP at {address}: {in_words(error, 'listener')}, or another port with --http"
            ) from error
        listener.setblocking(False)
        yield listener


def url_of(address: str, listener: socket.socket) -> str:
    host, _ = parse_address(address)
    number, port = listener.getsockname()[:2]
    shown = host or number
    return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"


def _is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, means this machine to every browser."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")


def is_loopback_host(header: str | None) -> bool:
    """Whether a Host header, with or without a port, names this machine."""
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::\d{1,5})?", header or "")
    return bool(match and match[1] and _is_loopback(match[1]))
