"""From arguments to an exit code: finds the command, runs it, and reports its error."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from checkpointd import __version__, waits
from checkpointd.cli import failures
from checkpointd.cli.formatting import printable
from checkpointd.cli.locating import corrected
from checkpointd.errors import CheckpointdError

COMMANDS = (
    *("list", "inspect", "verify", "status", "explain", "recover", "rollback", "gc", "delete", "serve", "doctor"),
    *("consolidate", "import", "export", "mirror", "completion"),
)
MODULES = {
    "import": "importing",
    "export": "exporting",
    "mirror": "tiers.mirror",
    "recover": "admin.recover",
    "rollback": "admin.rollback",
}
"""Commands whose module has another name: `import` is a keyword of Python, `export` follows it, and some modules lie in a room
of their own.
"""

PROGRAM = "checkpointd"
COMPLETE_VARIABLE = "_CHECKPOINTD_COMPLETE"
"""A shell that asks for completions sets this variable; click reads it."""

EPILOG = (
    "ROOT is the directory or URL that the job was given; it may be left out if CHECKPOINTD_ROOT names it. "
    "Exit codes: 0 success, 1 unexpected error, 2 wrong call, 3 mismatch, 4 not found, 5 damaged, 6 storage, 7 aborted, "
    "9 fenced, 13 sidecar."
)


class _Waits(logging.Handler):
    """Shows long waits alone: a command reports everything else by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(logging.Filter(waits.log.name))

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(printable(record.getMessage()), err=True)


WAITS = _Waits()


class Commands(click.Group):
    """The commands by name; each is the `command` of its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"checkpointd.cli.commands.{MODULES.get(cmd_name, cmd_name)}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}{_meant(name)}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands by name. click's own method would import every command to get its help."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]

    def answer_shell(self) -> None:
        """If a shell asks for completions, print them and end the process."""
        self._main_shell_completion({}, PROGRAM, COMPLETE_VARIABLE)


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=3, cutoff=0.5)
    close += [known for known in COMMANDS if known.startswith(name) and known not in close]
    return f": did you mean {' or '.join(corrected(name, known) for known in close)}?" if close else ""


@click.command(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the log, and the traceback of an error.")
def commands() -> None:
    """See and check the checkpoints of a training job, and run the sidecar that persists them."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    commands.answer_shell()
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. With `--debug`, errors are raised instead of reported."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug, as_json = "--debug" in words, "--json" in words
    _prepare(debug, as_json)
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return failures.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return _unread()
        if debug:
            raise
        return failures.report(_failure(error, arguments), as_json=as_json)
    return code


def _unread() -> int:
    """The reader of standard output has gone. Discard further output, so that Python's own flush at the end does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failures.BROKEN_PIPE


def _invoke(arguments: list[str]) -> int:
    try:
        # `obj` keeps the original words for errors that suggest a corrected command line.
        with commands.make_context(PROGRAM, list(arguments), obj=list(arguments)) as context:
            return int(commands.invoke(context) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return error.exit_code


def _failure(error: Exception, arguments: Sequence[str]) -> failures.Failure:
    match error:
        case CheckpointdError():
            return failures.of_error(error)
        case click.ClickException():
            return failures.of_usage(error)
        case _:
            return failures.of_defect(error, arguments)


def _prepare(debug: bool, as_json: bool) -> None:
    """Make odd characters in names printable, and show the log only with `--debug`, and its long waits to people."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    else:
        logging.getLogger("checkpointd").addHandler(logging.NullHandler() if as_json else WAITS)
