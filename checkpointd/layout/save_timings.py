"""The times and sizes of a save, in votes and outcomes, for people. No decision uses them."""

from __future__ import annotations

import msgspec


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long each part of one rank's save took; None for what it has not done, or where that is not known.

    `staging`: from save() until the snapshot was whole. `persisting`: from then until the vote. `hash`, `codec` and `disk` are
    parts of it, and overlap: the time in which at least one chunk was hashed, encoded, or written. `waiting`: from the vote
    until there was an outcome; a vote does not know it.
    """

    staging: float | None = None
    persisting: float | None = None
    hash: float | None = None
    codec: float | None = None
    disk: float | None = None
    waiting: float | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint cost, for people. 0 where something is not known: nothing that is saved costs nothing."""

    took_s: float = 0.0
    """From save() on rank 0 to the commit."""
    held_s: float = 0.0
    """For how long it held training, on the rank where that was longest."""
    raw_bytes: int = 0
    stored_bytes: int = 0
    """The sums of those in the votes."""
    written_bytes: int = 0
    """Of what is stored, that which no older attempt holds."""
