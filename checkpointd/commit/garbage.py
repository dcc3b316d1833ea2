"""Decides which objects no checkpoint needs any more: those of aborted and deleted attempts, and old records.

Which checkpoints are kept is decided in `retention`; the objects are deleted in `pipeline/gc`.

Invariants
  GARBAGE-1  An undecided attempt is never touched: recovery decides it first.
  GARBAGE-2  The outcome and the votes of an aborted attempt stay until ABORTED_KEPT newer attempts at the root were aborted.
      `explain` reads them, ranks that are slow learn of the abort, and they keep a late vote from reviving the attempt.
  GARBAGE-3  Votes and outcomes are deleted only of such an attempt, or of one that was committed and then deleted, after many
      newer attempts of its tag, or at the root, were deleted as well, or when a job of one rank closes.
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
ABORTED_KEPT = 64
"""The same for aborted attempts of all tags. A job's writer ends an attempt long before it has begun so many newer ones."""


def dead_weight(attempts: Iterable[AttemptFacts]) -> list[Dead]:
    """The attempts that are not checkpoints and whose bulk can be deleted."""
    reasons = {"aborted": "the attempt was aborted", "deleted": "left by a deletion that was interrupted"}
    return [(facts, reasons[facts.state]) for facts in attempts if facts.bulk and facts.state in reasons]


def with_spare_objects(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The committed attempts in which a writer left unused objects (GARBAGE-4)."""
    return [facts for facts in attempts if facts.state == "committed" and facts.contested]


def spent_records(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The deleted and aborted attempts whose records can be deleted too.

    Of the deleted ones, the newest RECORDS_KEPT of each tag stay, and of these only the newest ROOT_RECORDS_KEPT at the root.
    Of the aborted ones, the newest ABORTED_KEPT at the root stay.
    """
    removed: dict[str, list[AttemptFacts]] = {}
    aborted: list[AttemptFacts] = []
    for facts in attempts:
        if facts.state == "deleted" and not facts.bulk:
            removed.setdefault(facts.tag, []).append(facts)
        elif facts.state == "aborted" and not facts.bulk:
            aborted.append(facts)
    spent: list[AttemptFacts] = []
    left: list[AttemptFacts] = []
    for known in removed.values():
        known.sort(key=lambda f: f.attempt)
        spent += known[:-RECORDS_KEPT]
        left += known[-RECORDS_KEPT:]
    return spent + _oldest(left, ROOT_RECORDS_KEPT) + _oldest(aborted, ABORTED_KEPT)


def _oldest(known: list[AttemptFacts], kept: int) -> list[AttemptFacts]:
    """All but the `kept` newest."""
    oldest_first = sorted(known, key=lambda f: (f.order or (f.attempt.start, 0), f.tag, f.attempt))
    return oldest_first[: max(0, len(known) - kept)]
