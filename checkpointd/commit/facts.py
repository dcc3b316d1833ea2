"""Describes attempts and checkpoints for the decisions in this room: their state, and their order among commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checkpointd.layout.keys import AttemptId, attempt_prefix

State = Literal["committed", "aborted", "in-doubt", "deleted", "damaged", "unreadable"]
"""`damaged`: the bytes of the outcome are wrong. `unreadable`: the outcome cannot be read now, and may be a commit."""
Order = tuple[int, int]
"""The start, and the number of the save in that start. A later commit has a larger order."""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """The facts that a listing gives about one attempt.

    `order` is set if the attempt has an outcome that can be read. `bulk`: the attempt has chunks or indexes.
    `contested`: the ranks for which several writers left objects; only the objects of one writer are used. `kept`: of a removed
    attempt that nobody has looked at, the keys of the objects that were still needed. `holders`: the older attempts
    (`<tag>/<attempt>`) that it refers to.
    """

    tag: str
    attempt: AttemptId
    state: State
    order: Order | None
    bulk: bool
    contested: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)


Dead = tuple[AttemptFacts, str]
"""An attempt that loses its bulk, and the reason in words."""
