"""Describes attempts and checkpoints for the decisions in this room: their state, and their order among commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from checkpointd.layout.log_records import AttemptStatus

State = Literal["committed", "aborted", "in-doubt", "deleted"]
STATES: Mapping[AttemptStatus, State] = {
    "undecided": "in-doubt",
    "checkpoint": "committed",
    "aborted": "aborted",
    "removed": "deleted",
}
"""What people see for the status in the log."""
Order = tuple[int, int]
"""The start, and the number of the save in that start. A later commit has a larger order."""


Dead = tuple[str, str]
"""A checkpoint (`<tag>/<attempt>`) that is to be removed, and the reason in words."""
