"""Describes attempts and checkpoints for the decisions in this room: their state, and their order among commits."""

from __future__ import annotations

from typing import Literal

State = Literal["committed", "aborted", "in-doubt", "deleted"]
Order = tuple[int, int]
"""The start, and the number of the save in that start. A later commit has a larger order."""


Dead = tuple[str, str]
"""A checkpoint (`<tag>/<attempt>`) that is to be removed, and the reason in words."""
