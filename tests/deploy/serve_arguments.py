"""Parses the arguments of `checkpointd serve` in a unit or a manifest, as the command itself does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from checkpointd.cli.commands.serve import command
from checkpointd.cli.program import PROGRAM, commands


def serve_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters by name. Raises `click.UsageError` where the command does not take the arguments."""
    # Below the program's own context, as in a real call: click keeps the help option that a command is first parsed with.
    parent = click.Context(commands, info_name=PROGRAM, **commands.context_settings)
    return command.make_context("serve", list(arguments), parent=parent).params
