"""`checkpointd serve`: the sidecar."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click
import msgspec

from checkpointd.errors import UsageError

MIB = 1 << 20


@click.command("serve", short_help="Run the sidecar of this node.")
@click.option("--socket", help="Unix socket to listen at.  [default: /run/checkpointd/checkpointd.sock]")
@click.option("--root", "roots", multiple=True, help="Directory that jobs may use as their root, or below which; repeatable.")
@click.option(
    "--config", "file", type=click.Path(dir_okay=False), help="TOML file with a table [serve]; options here go first."
)
@click.option(
    "--uid", "uids", multiple=True, type=click.IntRange(min=0), help="User that may connect; repeatable.  [default: own]"
)
@click.option("--group", help="Group that may open the socket.")
@click.option("--http", help="Serve status over HTTP at HOST:PORT, or at the path of a Unix socket.")
@click.option("--http-public", is_flag=True, default=None, help="Allow a HOST that other machines reach.")
@click.option("--nice", "niceness", type=click.IntRange(-20, 19), help="CPU niceness of the daemon.")
@click.option("--io-class", type=click.Choice(["none", "best-effort", "idle"]), help="I/O scheduling class of the daemon.")
@click.option("--encoders", type=click.IntRange(min=1), help="Threads that compress.")
@click.option("--bandwidth-mib", type=click.FloatRange(min=1), help="MiB per second that persisting may write.")
@click.option("--memory-mib", type=click.IntRange(min=0), help="Slots of all clients, in MiB.  [default: half of the memory]")
@click.option("--held-mib", type=click.IntRange(min=0), help="Snapshots held for restarts, in MiB; 0: none.")
@click.option("--hold", "hold_s", type=click.FloatRange(min=0), help="Seconds to hold a snapshot whose trainer has gone.")
@click.option("--clients", "clients_max", type=click.IntRange(min=1), help="Connections at once.")
@click.option("--grace", "grace_s", type=click.FloatRange(min=0), help="Seconds that saves in flight have after SIGTERM.")
def command(file: str | None, **given: Any) -> None:
    """Persist the snapshots of this node's trainers, and finish them when the trainers are gone.

    One daemon per node. A trainer uses it with Checkpointer(root, sidecar=SOCKET). SIGTERM lets it finish what is in flight.
    """
    from checkpointd.config import ServeConfig, read_serve_file  # with what it brings in, only where a daemon is started
    from checkpointd.daemon.running import serve

    settings: dict[str, object] = {"socket": "/run/checkpointd/checkpointd.sock", "roots": ()}
    if file is not None:
        settings |= read_serve_file(file)
    settings |= _settings(given)
    try:
        config = msgspec.convert(settings, ServeConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"the settings of the sidecar do not fit: {error}") from error
    _log_to_stderr()
    serve(config, on_ready=lambda url: _say_ready(config.socket, url))


def _settings(given: dict[str, Any]) -> dict[str, object]:
    """The options that were given, as fields of ServeConfig."""
    named = {name: value for name, value in given.items() if value is not None and value != ()}
    for option, field in (("memory_mib", "memory_bytes_max"), ("held_mib", "held_bytes_max")):
        if option in named:
            named[field] = named.pop(option) * MIB
    if "bandwidth_mib" in named:
        named["bandwidth_bps"] = named.pop("bandwidth_mib") * MIB
    if "roots" in named:
        named["roots"] = tuple(os.path.abspath(root) for root in named["roots"])
    if "socket" in named:
        named["socket"] = os.path.abspath(named["socket"])
    return named


def _log_to_stderr() -> None:
    """A daemon's log is its voice: to standard error, which systemd and containers collect."""
    log = logging.getLogger("checkpointd")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    if log.level in (logging.NOTSET, logging.WARNING):
        log.setLevel(logging.INFO)


def _say_ready(socket: str, url: str | None) -> None:
    click.echo(f"ready at {socket}" + (f", status at {url}" if url else ""))
    sys.stdout.flush()
