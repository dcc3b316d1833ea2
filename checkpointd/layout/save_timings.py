"""The times and sizes of a save, in votes and commits, for people. No decision uses them."""

from __future__ import annotations

import msgspec


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long each part of one rank's save took; None for a part that has not happened or was not measured.

    `staging`: from save() until the snapshot was whole. `persisting`: from then until the vote, or until it was in the spool.
    `hash`, `codec` and `disk` are parts of `persisting` that may overlap: the time in which at least one chunk was hashed,
    encoded, or written. `uploading`: from the spool to the vote, with the wait for its turn. `waiting`: from the vote until the
    outcome. A vote has neither of these two.
    """

    staging: float | None = None
    persisting: float | None = None
    hash: float | None = None
    codec: float | None = None
    disk: float | None = None
    waiting: float | None = None
    uploading: float | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The cost of a checkpoint, for people. 0 means unknown, since every save costs something."""

    took_s: float = 0.0
    """From save() on rank 0 to the commit."""
    held_s: float = 0.0
    """How long the save held training, on the rank with the longest time."""
    raw_bytes: int = 0
    stored_bytes: int = 0
    """The sums of the votes' `raw_bytes` and `stored_bytes`."""
    written_bytes: int = 0
    """The stored bytes without those that older attempts hold."""
