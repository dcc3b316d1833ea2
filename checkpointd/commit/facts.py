"""Describes attempts and checkpoints for the decisions in this room: their state, and their order among commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checkpointd.layout.keys import AttemptId

State = Literal["committed", "aborted", "in-doubt", "deleted", "damaged", "unreadable"]
"""`damaged`: the bytes of the outcome are wrong. `unreadable`: they cannot be read now, and may be a commit's."""
Order = tuple[int, int]
"""Epoch and number of the save in it. A later commit has a larger order."""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """The facts that a listing gives about one attempt.

    `order` is set if the attempt is committed, or was before its deletion. `bulk`: it has chunks or indexes.
    `contested`: the ranks for which several writers left objects; only the objects of one of them are used.
    """

    tag: str
    attempt: AttemptId
    state: State
    order: Order | None
    bulk: bool
    contested: tuple[int, ...] = ()


Dead = tuple[AttemptFacts, str]
"""An attempt that loses its bulk, and the reason in words."""
