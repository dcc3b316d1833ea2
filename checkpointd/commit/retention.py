"""What may be removed, decided from what a listing shows: left-overs, replaced checkpoints, and those that rules let go.

Invariants
  R1  A committed attempt goes only where a newer, undamaged commit of the same tag exists, or where rules let it go.
  R2  An undecided attempt is never touched: recovery decides it first.
  R3  Outcome and votes of an aborted attempt stay, as the record that `explain` reads and so that no late vote can revive it.
  R4  Only an attempt that was committed ever loses its votes, and only when it was removed and many newer ones were, too: of
      its tag, or at the root.
  R5  Of a committed attempt that stays, only objects of ranks that several hands wrote for are looked at, and only what no
      vote's index names goes.
  R6  Rules never remove the newest checkpoint, the newest of those that asked for `latest`, the one that `latest` names,
      nor the newest that was verified; nor one that any of the rules names. Without rules only what was replaced goes.
  R7  A checkpoint that is recorded as damaged is none of these, and no rule counts it. Where nothing else is left, none goes.
  R8  A checkpoint that a load has passed over stays until it is recorded as damaged. It is none of those of R6, no rule counts
      it, and no other one goes for it: whatever was recorded of it before, a load has found it damaged since.
  R9  Rules with a metric never remove a checkpoint without it, and nothing at all where no checkpoint has it.
  R10 A job that does not know what earlier epochs committed removes nothing of it: neither by rules, nor for a newer commit of
      the same tag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from checkpointd import arguments
from checkpointd.errors import UsageError
from checkpointd.layout.keys import AttemptId

State = Literal["committed", "aborted", "in-doubt", "deleted", "damaged", "unreadable"]
"""`damaged`: the bytes of the outcome are wrong. `unreadable`: they cannot be read now, and may be a commit's."""
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


Dead = tuple[AttemptFacts, str]
"""An attempt that loses its bulk, and the reason in words."""


def dead_weight(attempts: Iterable[AttemptFacts]) -> list[Dead]:
    """The attempts that are no checkpoints, and whose bulk can go."""
    dead = []
    for facts in attempts:
        if facts.state == "aborted" and facts.bulk:
            dead.append((facts, "the attempt was aborted"))
        elif facts.state == "deleted" and facts.bulk:
            dead.append((facts, "its removal was interrupted"))
    return dead


def with_spare_objects(attempts: Iterable[AttemptFacts]) -> list[AttemptFacts]:
    """The committed attempts in which some hand wrote in vain (R5)."""
    return [facts for facts in attempts if facts.state == "committed" and facts.contested]


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
    """Which checkpoints stay: those that at least one rule names, and those of R6 to R10. Without any rule all of them stay.

    Raises UsageError for numbers that cannot be, and for `best` without a `metric`.
    """

    keep_last: int | None = None
    """The newest so many."""
    every_steps: int | None = None
    """Those whose step is a multiple of this."""
    younger_than_s: float | None = None
    """Those committed less than so many seconds ago, by the clocks of who committed and who removes."""
    best: int | None = None
    """The best so many by `metric`, which save(metrics=...) was given. Those that were saved without it stay as well."""
    metric: str | None = None
    mode: Mode = "min"
    """Whether a smaller metric is better, or a larger one."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "every_steps", "best"):
            value = getattr(self, name)
            if value is not None:
                arguments.whole(name, value)
        if self.younger_than_s is not None:
            arguments.seconds("younger_than_s", self.younger_than_s)
        arguments.choice("mode", self.mode, get_args(Mode))
        metric: object = self.metric
        if metric is not None and not (isinstance(metric, str) and metric):
            raise UsageError(f"metric is {metric!r:.80}; it must be the name of a metric that save(metrics=...) is given")
        if (self.best is None) != (self.metric is None):
            raise UsageError("best and metric go together: how many to keep, and the name of the metric to choose them by")

    @classmethod
    def of(cls, given: object) -> Retention:
        """What `retention=` of a Checkpointer means: rules, a number for the newest so many, None for no rule."""
        if given is None or isinstance(given, Retention):
            return given or cls()
        if type(given) is not int or given < 1:
            raise UsageError(
                f"retention is {given!r:.80}; it must be a number of checkpoints, as in retention=3 for the last 3, or rules, "
                "as in retention=Retention(keep_last=3, every_steps=1000), or None to keep all"
            )
        return cls(keep_last=given)

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return (self.keep_last, self.every_steps, self.younger_than_s, self.best) == (None, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What is known of a committed attempt. `age_s`: seconds since its commit, None where that cannot be told."""

    attempt: AttemptFacts
    order: Order
    step: int
    save_latest: bool = True
    is_latest: bool = False
    """Whether it is what the pointer names."""
    verified: bool = False
    """Whether all of it was read and found whole at some time."""
    damaged: bool = False
    """Whether it is recorded that it is not."""
    passed_over: bool = False
    """Whether a load went past it."""
    age_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What goes, the oldest first, and why not more."""

    going: tuple[Dead, ...] = ()
    surplus: tuple[AttemptFacts, ...] = ()
    """What would go, had anything newer been verified (R6)."""
    unknown_metric: str | None = None
    """Why the rules were not applied (R9)."""


def choose(commits: Iterable[CheckpointFacts], rules: Retention, *, keeps_before: int = 0) -> Choice:
    """Which of `commits`, all committed attempts that are looked at, go. `keeps_before`: the first epoch that the one who asks
    may remove anything of (R10).
    """
    newest_first = sorted(commits, key=lambda c: c.order, reverse=True)
    sound = [c for c in newest_first if not c.damaged and not c.passed_over]
    if not sound:
        return Choice()
    reasons = _replaced(newest_first, sound)
    unknown_metric = _unknown_metric(newest_first, rules)
    if unknown_metric is None:
        reasons = _let_go(newest_first, [c for c in sound if c.order not in reasons], rules) | reasons
    verified = next((c.order for c in sound if c.verified), None)
    may_go = [c for c in reversed(newest_first) if c.order in reasons and _is_known(c, keeps_before)]
    return Choice(
        going=tuple((c.attempt, reasons[c.order]) for c in may_go if c.order != verified),
        surplus=tuple(c.attempt for c in may_go if c.order == verified),
        unknown_metric=unknown_metric,
    )


def _is_known(checkpoint: CheckpointFacts, keeps_before: int) -> bool:
    """Whether nobody can miss it but who has seen it (R8, R10)."""
    return checkpoint.attempt.attempt.epoch >= keeps_before and (checkpoint.damaged or not checkpoint.passed_over)


def _let_go(newest_first: Sequence[CheckpointFacts], current: Sequence[CheckpointFacts], rules: Retention) -> dict[Order, str]:
    """By order, why the rules do not need what is neither indispensable nor named; `current`: those that count."""
    if rules.keeps_all:
        return {}
    kept = _indispensable(newest_first, current) | _named(current, rules)
    words = f"retention keeps {_in_words(rules)}"
    return {c.order: f"it is damaged, and {words}" if c.damaged else words for c in newest_first if c.order not in kept}


def _replaced(newest_first: Sequence[CheckpointFacts], sound: Sequence[CheckpointFacts]) -> dict[Order, str]:
    """By order, why what has a newer commit of its tag is not needed (R1)."""
    newest: dict[str, Order] = {}
    for c in sound:
        newest.setdefault(c.attempt.tag, c.order)
    older = (c.order for c in newest_first if c.order < newest.get(c.attempt.tag, c.order))
    return dict.fromkeys(older, "the tag was saved again since")


def _unknown_metric(commits: Sequence[CheckpointFacts], rules: Retention) -> str | None:
    """Why the metric of `rules` cannot be meant, where no checkpoint has it; None where one has, or there is no such rule."""
    if rules.metric is None or any(_measure(c, rules.metric) is not None for c in commits):
        return None
    known = sorted({name for c in commits for name in c.metrics})
    those = f"they have: {', '.join(known)}" if known else "they have none at all"
    return f"no checkpoint has the metric {rules.metric!r} by which the best are to be chosen; {those}"


def _measure(checkpoint: CheckpointFacts, metric: str) -> float | None:
    """The metric, where it is there and a finite number: nothing else can be the best."""
    value = checkpoint.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def _indispensable(newest_first: Sequence[CheckpointFacts], current: Sequence[CheckpointFacts]) -> set[Order]:
    """The orders of those that no rule removes (R6); the newest verified one apart."""
    firsts = (current[:1], [c for c in current if c.save_latest][:1], [c for c in newest_first if c.is_latest])
    return {c.order for some in firsts for c in some}


def _named(newest_first: Sequence[CheckpointFacts], rules: Retention) -> set[Order]:
    """The orders of those that a rule names."""
    named = {c.order for c in newest_first[: rules.keep_last or 0]}
    if rules.every_steps is not None:
        named |= {c.order for c in newest_first if c.step % rules.every_steps == 0}
    if rules.younger_than_s is not None:
        named |= {c.order for c in newest_first if c.age_s is None or c.age_s < rules.younger_than_s}
    if rules.best is not None and rules.metric is not None:
        sign = 1 if rules.mode == "min" else -1
        measured = [(value, c.order) for c in newest_first if (value := _measure(c, rules.metric)) is not None]
        # Of equal ones the newer: the sort is stable.
        named |= {order for _, order in sorted(measured, key=lambda pair: sign * pair[0])[: rules.best]}
        named |= {c.order for c in newest_first if _measure(c, rules.metric) is None}
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
