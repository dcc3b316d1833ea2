"""Which attempts are dead weight: what collection may remove, decided from what a listing shows.

Invariants
  R1  A committed attempt is removed only when a newer commit of the same tag exists.
  R2  An undecided attempt is never touched: recovery decides it first.
  R3  Outcome and votes of an aborted attempt stay, as the record that `explain` reads and so that no late vote can revive it.
  R4  Only an attempt that was committed ever loses its votes, and only when many newer commits of its tag exist.
  R5  Of a committed attempt that stays, only objects of ranks that several hands wrote for are looked at, and only what no
      vote's index names goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from checkpointd.layout.keys import AttemptId

State = Literal["committed", "aborted", "in-doubt", "deleted", "damaged"]
Order = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What a listing says of an attempt; `order` is set for a committed one, `bulk` where chunks or indexes are there.

    `contested`: the ranks for which more than one hand left objects; one of them was written in vain.
    """

    tag: str
    attempt: AttemptId
    state: State
    order: Order | None
    bulk: bool
    contested: tuple[int, ...] = ()


def dead_weight(attempts: Iterable[AttemptFacts]) -> list[tuple[AttemptFacts, str]]:
    """The attempts whose bulk can go, with the reason in words."""
    known = list(attempts)
    newest: dict[str, Order] = {}
    for facts in known:
        if facts.state == "committed" and facts.order is not None:
            newest[facts.tag] = max(newest.get(facts.tag, facts.order), facts.order)
    dead = []
    for facts in known:
        if facts.state == "aborted" and facts.bulk:
            dead.append((facts, "the attempt was aborted"))
        elif facts.state == "deleted" and facts.bulk:
            dead.append((facts, "its removal was interrupted"))
        elif facts.state == "committed" and facts.order is not None and facts.order < newest[facts.tag]:
            dead.append((facts, "the tag was saved again since"))
    return dead


def with_spare_objects(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The committed attempts in which some hand wrote in vain (R5); those that are dead weight go whole and are left out."""
    known = list(attempts)
    dead = {(facts.tag, facts.attempt) for facts, _ in dead_weight(known)}
    return [f for f in known if f.state == "committed" and f.contested and (f.tag, f.attempt) not in dead]


RECORDS_KEPT = 16
"""How many removed attempts of a tag leave their outcome and votes behind, for people and for ranks that have not read them."""


def spent_records(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The removed attempts whose records can go as well: all but the newest RECORDS_KEPT of each tag, oldest first."""
    removed: dict[str, list[AttemptFacts]] = {}
    for facts in attempts:
        if facts.state == "deleted" and not facts.bulk:
            removed.setdefault(facts.tag, []).append(facts)
    return [facts for known in removed.values() for facts in sorted(known, key=lambda f: f.attempt)[:-RECORDS_KEPT]]


def moves_latest(current: Order | None, candidate: Order) -> bool:
    """Whether `latest` may go from a checkpoint of order `current` to one of order `candidate`: only forward."""
    return current is None or candidate > current
