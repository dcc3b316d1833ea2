"""From arguments to an exit code: finds the command, runs it, and turns what went wrong into words."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from checkpointd import __version__
from checkpointd.cli import failures
from checkpointd.errors import CheckpointdError

COMMANDS = (
    *("list", "inspect", "verify", "status", "explain", "recover", "gc", "delete", "serve", "doctor"),
    *("consolidate", "import", "export"),
)
MODULES = {"import": "importing", "export": "exporting"}
"""Commands whose module has another name: Python's own word for the first, and the second beside it."""

EPILOG = (
    "ROOT is the directory that the job was given; it may be left out where CHECKPOINTD_ROOT names it. "
    "Exit codes: 0 well, 1 unforeseen, 2 wrong call, 3 mismatch, 4 not found, 5 damaged, 6 storage, 7 aborted, 9 fenced, "
    "13 sidecar."
)


class Commands(click.Group):
    """The commands by name; each is the `command` of its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"checkpointd.cli.{MODULES.get(cmd_name, cmd_name)}").command
        return command


@click.command(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="checkpointd", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the log, and where an error came from.")
def commands() -> None:
    """See and check the checkpoints of a training job, and run the sidecar that persists them."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run one command line; its exit code. Raises nothing but what `--debug` asks for."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug, as_json = "--debug" in words, "--json" in words
    _prepare(debug)
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return failures.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return _unread()
        if debug:
            raise
        return failures.report(_failure(error), as_json=as_json)
    return code


def _unread() -> int:
    """The reader has gone: nobody is left to tell, and Python's own flush at the end must not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failures.BROKEN_PIPE


def _invoke(arguments: list[str]) -> int:
    try:
        with commands.make_context("checkpointd", arguments) as context:
            return int(commands.invoke(context) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return error.exit_code


def _failure(error: Exception) -> failures.Failure:
    match error:
        case CheckpointdError():
            return failures.of_error(error)
        case click.ClickException():
            return failures.of_usage(error)
        case _:
            return failures.of_defect(error)


def _prepare(debug: bool) -> None:
    """What a name holds must never end the program; the log is shown only when asked for, since commands say what they did."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    else:
        logging.getLogger("checkpointd").addHandler(logging.NullHandler())
