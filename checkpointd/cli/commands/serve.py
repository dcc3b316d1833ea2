"""`checkpointd serve`: the sidecar."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import msgspec

from checkpointd import arguments
from checkpointd.bucket_urls import is_bucket_url, one_spelling
from checkpointd.errors import UsageError

MIB = 1 << 20


class UserId(click.IntRange):
    """The number of a user."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and not value.isdecimal():
            self.fail(f"{value!r} is not a number; `id -u {shlex.quote(value)}` prints the number of a user", param, ctx)
        return int(super().convert(value, param, ctx))


@click.command("serve", short_help="Run the sidecar of this node.")
@click.option("--socket", help="Unix socket to listen at.  [default: /run/checkpointd/checkpointd.sock]")
@click.option(
    "--root",
    "roots",
    multiple=True,
    help="Directory or URL of a bucket, at or below which jobs may have roots; repeatable.",
)
@click.option(
    "--config", "file", type=click.Path(dir_okay=False), help="TOML file with a table [serve]; options here override it."
)
@click.option(
    "--uid",
    "uids",
    multiple=True,
    type=UserId(),
    help="User that may connect, by number; repeatable.  [default: the daemon's user; root must name users]",
)
@click.option("--group", help="Group that may open the socket, by name or number.")
@click.option("--http", help="Serve status over HTTP at HOST:PORT, or at the path of a Unix socket.")
@click.option("--http-public", is_flag=True, default=None, help="Allow a HOST that other machines reach.")
@click.option("--metrics-per-rank", is_flag=True, default=None, help="Count metrics for each rank, not only for each root.")
@click.option("--name", "names", multiple=True, metavar="ROOT=NAME", help="A name for a root, shown with it; repeatable.")
@click.option("--mirror", "mirrors", multiple=True, metavar="SRC=DST", help="Mirror the root SRC to DST; repeatable.")
@click.option(
    "--export", "exports", multiple=True, metavar="SRC=DST", help="Export checkpoints of the root SRC to DST; repeatable."
)
@click.option(
    "--export-every", type=click.IntRange(min=1), metavar="STEPS", help="Export those whose step is a multiple.  [default: all]"
)
@click.option("--export-files", metavar="DIR", help="Directory with the configuration and tokenizer to put beside exports.")
@click.option("--nice", "niceness", type=click.IntRange(-20, 19), help="CPU niceness of the daemon.")
@click.option("--io-class", type=click.Choice(["none", "best-effort", "idle"]), help="I/O scheduling class of the daemon.")
@click.option(
    "--sandbox",
    type=click.Choice(["auto", "require", "off"]),
    help="Forbid the daemon to start programs and to use other files.  [default: auto]",
)
@click.option("--encoders", type=click.IntRange(min=1), help="Threads that compress.")
@click.option("--bandwidth-mib", type=click.FloatRange(min=1), help="The most MiB per second that persisting writes.")
@click.option(
    "--memory-mib",
    type=click.IntRange(min=0),
    help="MiB that clients make it hold: slots, layouts, trees, messages.  [default: half of the memory]",
)
@click.option("--held-mib", type=click.IntRange(min=0), help="MiB of snapshots retained for restarts; 0: none.")
@click.option("--hold", "hold_s", type=click.FloatRange(min=0), help="Seconds to retain a snapshot after its trainer is gone.")
@click.option(
    "--idle", "idle_s", type=click.FloatRange(min=0), help="Leave after so many seconds without trainers and work.  [never]"
)
@click.option("--spool", help="Directory on this node's own disk where snapshots become durable before they are uploaded.")
@click.option("--spool-mib", type=click.IntRange(min=1), help="The most MiB in the spool.  [default: all but a twentieth]")
@click.option(
    "--spool-keep",
    type=click.Choice(["all", "newest"]),
    help="Upload every save, or drop those that wait once a newer one has committed.  [default: all]",
)
@click.option(
    "--spool-bandwidth-mib", type=click.FloatRange(min=0, min_open=True), help="The most MiB per second of all uploads."
)
@click.option(
    "--spool-timeout",
    "spool_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds until a spooled save is given up.",
)
@click.option(
    "--spool-retain/--no-spool-retain", default=None, help="Keep the newest committed save for restarts.  [default: on]"
)
@click.option("--spool-finish", is_flag=True, default=None, help="Upload what is possible within the grace after SIGTERM.")
@click.option("--clients", "clients_max", type=click.IntRange(min=1), help="The most connections of ranks.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="The least level that is logged.  [default: info]",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Lines for people, or JSON objects.  [default: text]")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    help="Seconds that saves in flight have after SIGTERM. If the storage hangs, the daemon exits 25 seconds later.",
)
def command(file: str | None, **given: Any) -> None:
    """Persist the snapshots of this node's trainers, and finish them when the trainers are gone.

    Run one daemon per node. A trainer uses it with Checkpointer(root, sidecar=SOCKET). On SIGTERM it finishes the saves in
    flight.
    """
    # numpy would start threads, and the sandbox does not apply to threads that were started before it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from checkpointd.config import ServeConfig, read_serve_file  # with what it brings in, only where a daemon is started
    from checkpointd.daemon.process.logs import log_to_stderr
    from checkpointd.daemon.runner import serve
    from checkpointd.daemon.users import check_unnamed

    settings: dict[str, object] = {"socket": "/run/checkpointd/checkpointd.sock", "roots": ()}
    if file is not None:
        settings |= read_serve_file(file)
    settings |= _settings(given)
    for name, hint in get_type_hints(ServeConfig).items():
        if get_origin(hint) is Literal and name in settings:
            arguments.choice(name, settings[name], get_args(hint))
    try:
        config = msgspec.convert(settings, ServeConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"the settings of the sidecar do not fit: {error}") from error
    if "uids" not in settings:
        check_unnamed()
    log_to_stderr(config.log_level, config.log_format)
    serve(config, on_ready=lambda url: _say_ready(config.socket, url))


def _settings(given: dict[str, Any]) -> dict[str, object]:
    """The options that were given, as fields of ServeConfig."""
    named = {name: value for name, value in given.items() if value is not None and value != ()}
    mib = (("memory_mib", "memory_bytes_max"), ("held_mib", "held_bytes_max"), ("spool_mib", "spool_bytes_max"))
    for option, field in mib:
        if option in named:
            named[field] = named.pop(option) * MIB
    for option, field in (("bandwidth_mib", "bandwidth_bps"), ("spool_bandwidth_mib", "spool_bandwidth_bps")):
        if option in named:
            named[field] = named.pop(option) * MIB
    if "spool" in named:
        named["spool"] = _path(named["spool"])
    if "roots" in named:
        named["roots"] = tuple(one_spelling(arguments.expanded(root)) for root in named["roots"])
    if "names" in named:
        named["names"] = dict(_name(text) for text in named["names"])
    if "mirrors" in named:
        named["mirrors"] = tuple(_mirror(text) for text in named["mirrors"])
    every, files = named.pop("export_every", None), named.pop("export_files", None)
    if "exports" in named:
        files = None if files is None else _path(files)
        named["exports"] = tuple({**_export(text), "every_steps": every, "files": files} for text in named["exports"])
    elif every is not None or files is not None:
        raise UsageError("--export-every and --export-files are for --export, which is not given")
    if "socket" in named:
        named["socket"] = _path(named["socket"])
    return named


def _name(text: str) -> tuple[str, str]:
    root, equals, name = text.rpartition("=")
    if not (root and equals and name):
        raise UsageError(f"--name {text}: write ROOT=NAME, such as /scratch/run-1=llama")
    return one_spelling(root), name


def _mirror(text: str) -> dict[str, str]:
    origin, mirror = _pair("--mirror", text, "/archive/run-1")
    return {"origin": origin, "mirror": mirror}


def _export(text: str) -> dict[str, object]:
    root, to = _pair("--export", text, "/models/run-1")
    return {"root": root, "to": to}


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    # The options of a bucket's URL have equals signs, too, so the one before something that can be a place counts.
    signs = [at for at, letter in enumerate(text) if letter == "="]
    at = next((at for at in signs if text.startswith("/", at + 1) or is_bucket_url(text[at + 1 :])), text.find("="))
    source, target = text[: max(at, 0)], text[at + 1 :]
    if not (source and target):
        raise UsageError(f"{option} {text}: write SRC=DST, such as /scratch/run-1={example}")
    return _place(source), _place(target)


def _place(text: str) -> str:
    return arguments.expanded(text) if "://" in text else _path(text)


def _path(text: str) -> str:
    return os.path.abspath(arguments.expanded(text))


def _say_ready(socket: str, url: str | None) -> None:
    click.echo(f"ready at {socket}" + (f", status at {url}" if url else ""))
    sys.stdout.flush()
