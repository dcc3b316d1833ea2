"""Which attempts are dead weight: what collection may remove, decided from what a listing shows.

Invariants
  R1  A committed attempt is removed only when a newer commit of the same tag exists.
  R2  An undecided attempt is never touched: recovery decides it first.
  R3  Outcome and votes of an aborted attempt stay, as the record that `explain` reads and so that no late vote can revive it.
  R4  Only an attempt that was committed ever loses its votes, and only when it was removed and many newer ones were, too: of
      its tag, or at the root.
  R5  Of a committed attempt that stays, only objects of ranks that several hands wrote for are looked at, and only what no
      vote's index names goes.
  R6  Retention never removes the newest checkpoint, the newest of those that asked for `latest`, the one that `latest` names,
      nor the newest that was verified; nor one that any of its rules names. Without rules it removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from checkpointd.errors import UsageError
from checkpointd.layout.keys import AttemptId

State = Literal["committed", "aborted", "in-doubt", "deleted", "damaged"]
Order = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What a listing says of an attempt; `order` is set for what is or was committed, `bulk` where there are chunks or indexes.

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
ROOT_RECORDS_KEPT = 256
"""The same for all tags together: whoever looks at the root reads them all."""


def spent_records(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The removed attempts whose records can go as well: all but the newest RECORDS_KEPT of each tag, oldest first, and all
    but the newest ROOT_RECORDS_KEPT of what is left then.
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


def moves_latest(current: Order | None, candidate: Order) -> bool:
    """Whether `latest` may go from a checkpoint of order `current` to one of order `candidate`: only forward."""
    return current is None or candidate > current


# --- which checkpoints are kept ---------------------------------------------------------------------------------

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints stay: those that at least one rule names, and those of R6. Without any rule all of them stay.

    Raises UsageError for numbers that cannot be, and for `best` without a `metric`.
    """

    keep_last: int | None = None
    """The newest so many."""
    every_steps: int | None = None
    """Those whose step is a multiple of this."""
    younger_than_s: float | None = None
    """Those committed less than so many seconds ago, by the clocks of who committed and who removes."""
    best: int | None = None
    """The best so many by `metric`, which save(metrics=...) was given; those without it are never among them."""
    metric: str | None = None
    mode: Mode = "min"
    """Whether a smaller metric is better, or a larger one."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "every_steps", "best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        if self.younger_than_s is not None and not self.younger_than_s > 0:
            raise UsageError(f"younger_than_s is {self.younger_than_s!r}; it must be greater than 0")
        if self.mode not in get_args(Mode):
            raise UsageError(f"mode is {self.mode!r}; choose 'min' or 'max'")
        if (self.best is None) != (self.metric is None):
            raise UsageError("best and metric go together: how many to keep, and the name of the metric to choose them by")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return (self.keep_last, self.every_steps, self.younger_than_s, self.best) == (None, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What retention knows of a checkpoint. `age_s`: seconds since its commit, None where that cannot be told."""

    attempt: AttemptFacts
    order: Order
    step: int
    save_latest: bool = True
    is_latest: bool = False
    """Whether the pointer names it."""
    verified: bool = False
    """Whether all of it was read and found whole at some time."""
    age_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def retired(checkpoints: Iterable[CheckpointFacts], rules: Retention) -> list[tuple[AttemptFacts, str]]:
    """The checkpoints that may go by `rules`, oldest first, with the reason in words (R6)."""
    newest_first = sorted(checkpoints, key=lambda c: c.order, reverse=True)
    if rules.keeps_all:
        return []
    kept = _indispensable(newest_first) | _named(newest_first, rules)
    reason = f"retention keeps {_in_words(rules)}"
    return [(c.attempt, reason) for c in reversed(newest_first) if c.order not in kept]


def _indispensable(newest_first: Sequence[CheckpointFacts]) -> set[Order]:
    firsts = (
        newest_first[:1],
        [c for c in newest_first if c.save_latest][:1],
        [c for c in newest_first if c.verified][:1],
        [c for c in newest_first if c.is_latest],
    )
    return {c.order for some in firsts for c in some}


def _named(newest_first: Sequence[CheckpointFacts], rules: Retention) -> set[Order]:
    """The orders of those that a rule names."""
    named = {c.order for c in newest_first[: rules.keep_last or 0]}
    if rules.every_steps is not None:
        named |= {c.order for c in newest_first if c.step % rules.every_steps == 0}
    if rules.younger_than_s is not None:
        named |= {c.order for c in newest_first if c.age_s is None or c.age_s < rules.younger_than_s}
    if rules.best is not None and rules.metric is not None:
        sign, metric = (1 if rules.mode == "min" else -1), rules.metric
        measured = [c for c in newest_first if metric in c.metrics]
        # Of equal ones the newer: the sort is stable.
        named |= {c.order for c in sorted(measured, key=lambda c: sign * c.metrics[metric])[: rules.best]}
    return named


def _in_words(rules: Retention) -> str:
    words = []
    if rules.keep_last is not None:
        words.append(f"the last {rules.keep_last}")
    if rules.every_steps is not None:
        words.append(f"every {rules.every_steps} steps")
    if rules.younger_than_s is not None:
        words.append(f"those younger than {rules.younger_than_s:g} s")
    if rules.best is not None:
        words.append(f"the best {rules.best} by {rules.metric} ({rules.mode})")
    return ", ".join(words)
