"""Errors as the command line reports them: on standard error, in words or as JSON, with the exit code of their class."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import msgspec

from checkpointd.cli.formatting import printable
from checkpointd.commands import command
from checkpointd.errors import CheckpointdError, DamagedError, UsageError

INTERRUPTED = 130
BROKEN_PIPE = 141
DEFECT = 1
"""Exit codes: 128 plus the signal's number, as a shell reports it, for the first two; DEFECT for an unexpected error."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`code` is the class of the error; `key`, `fqn` and `rank` are set if they are known."""

    code: str
    message: str
    exit_code: int
    retryable: bool = False
    key: str = ""
    fqn: str = ""
    rank: int | None = None
    ranks: tuple[int, ...] = ()


class FailureDocument(msgspec.Struct, frozen=True, kw_only=True):
    error: Failure


def of_error(error: CheckpointdError) -> Failure:
    damage = error if isinstance(error, DamagedError) else DamagedError("")
    return Failure(
        code=error.code,
        message=str(error),
        exit_code=error.exit_code,
        retryable=error.retryable,
        key=damage.key,
        fqn=damage.fqn,
        rank=damage.rank,
        ranks=error.ranks,
    )


def of_usage(error: click.ClickException) -> Failure:
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = error.format_message().removesuffix(".")
    if context is not None:
        after = " " if message.endswith("?") else "; "  # click may ask "did you mean ...?"
        message += f"{after}{command(*context.command_path.split()[1:], '--help')} shows the arguments"
    return Failure(code=UsageError.__name__, message=message, exit_code=UsageError.exit_code)


def of_defect(error: Exception, arguments: Sequence[str]) -> Failure:
    """An unexpected error of the call with `arguments`."""
    message = (
        f"{type(error).__name__}: {error}: this is a defect of checkpointd; please report it; "
        f"{command('--debug', *arguments)} shows where it happened"
    )
    return Failure(code=type(error).__name__, message=message, exit_code=DEFECT)


def report(failure: Failure, *, as_json: bool) -> int:
    """Print `failure` and return its exit code."""
    if as_json:
        click.echo(msgspec.json.encode(FailureDocument(error=failure)), file=sys.stderr)
    else:
        lines = [printable(line) for line in failure.message.splitlines()]
        click.echo("\n".join([f"error: {lines[0] if lines else failure.code}", *lines[1:]]), file=sys.stderr)
    return failure.exit_code
