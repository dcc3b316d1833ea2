"""Decides which objects no checkpoint needs any more: those of aborted and deleted attempts, and old records.

Which checkpoints are kept is decided in `retention`; the objects are deleted in `pipeline/gc`.

Invariants
  GARBAGE-1  An undecided attempt is never touched: recovery decides it first.
  GARBAGE-2  The outcome and the votes of an aborted attempt stay. `explain` reads them, and they keep a late vote from reviving
      the attempt.
  GARBAGE-3  Votes are deleted only for an attempt that was committed and then deleted, and only after many newer attempts of
      its tag, or at the root, were deleted as well.
  GARBAGE-4  In a committed attempt that stays, only the objects of ranks with several writers are examined, and only objects
      that no vote's index names are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable

from checkpointd.commit.facts import AttemptFacts, Dead

RECORDS_KEPT = 16
"""The number of deleted attempts of a tag whose outcome and votes stay, for people and for ranks that have not read them."""
ROOT_RECORDS_KEPT = 256
"""The same for all tags together. It is bounded because every program that lists the root reads all records."""


def dead_weight(attempts: Iterable[AttemptFacts]) -> list[Dead]:
    """The attempts that are not checkpoints and whose bulk can be deleted."""
    reasons = {"aborted": "the attempt was aborted", "deleted": "its deletion was interrupted"}
    return [(facts, reasons[facts.state]) for facts in attempts if facts.bulk and facts.state in reasons]


def with_spare_objects(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The committed attempts in which a writer left unused objects (GARBAGE-4)."""
    return [facts for facts in attempts if facts.state == "committed" and facts.contested]


def spent_records(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The deleted attempts whose records can be deleted too.

    The newest RECORDS_KEPT of each tag stay, and of these only the newest ROOT_RECORDS_KEPT at the root.
    """
    removed: dict[str, list[AttemptFacts]] = {}
    for facts in attempts:
        if facts.state == "deleted" and not facts.bulk:
            removed.setdefault(facts.tag, []).append(facts)
    spent: list[AttemptFacts] = []
    left: list[AttemptFacts] = []
    for known in removed.values():
        known.sort(key=lambda f: f.attempt)
        spent += known[:-RECORDS_KEPT]
        left += known[-RECORDS_KEPT:]
    left.sort(key=lambda f: f.order or (f.attempt.epoch, 0))
    return spent + left[:-ROOT_RECORDS_KEPT]
