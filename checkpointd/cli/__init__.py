"""The command line: one file per command, imported when called. Answers go to standard output, the rest to standard error."""

from __future__ import annotations

from checkpointd.cli.program import COMMANDS, main, run

__all__ = ["COMMANDS", "main", "run"]
