"""Decides which checkpoints are kept: those that the user's rules name, and those that no rule may remove.

Invariants
  RETENTION-1  A committed attempt is removed only if a newer, undamaged commit of its tag exists, or if the rules allow it.
  RETENTION-2  Rules never remove the newest checkpoint, the newest of those whose save moves `latest`, the one that `latest`
      names, or the newest that was verified. They keep each checkpoint that any of them names. Without rules, a checkpoint is
      removed only if its tag was saved again.
  RETENTION-3  A checkpoint that is recorded as damaged is none of these, and no rule counts it. If there are only such
      checkpoints, none is removed.
  RETENTION-4  A checkpoint that a load has passed over stays until it is recorded as damaged. It is none of those of
      RETENTION-2, no rule counts it, and no other checkpoint is removed in its favour: whatever was recorded before, a load has
      found it damaged since.
  RETENTION-5  Rules with a metric never remove a checkpoint without it, and remove nothing at all if no checkpoint has it.
  RETENTION-6  A job that does not know what earlier epochs committed removes none of their checkpoints, neither by rules nor
      for a newer commit of the same tag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from checkpointd import arguments
from checkpointd.commit.facts import AttemptFacts, Dead, Order
from checkpointd.errors import UsageError

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints stay: those that at least one rule names, and those of RETENTION-2 to RETENTION-6. Without any rule
    all of them stay.

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
class RemovalChoice:
    """What goes, the oldest first, and why not more."""

    going: tuple[Dead, ...] = ()
    surplus: tuple[AttemptFacts, ...] = ()
    """What would go, had anything newer been verified (RETENTION-2)."""
    unknown_metric: str | None = None
    """Why the rules were not applied (RETENTION-5)."""


def choose(commits: Iterable[CheckpointFacts], rules: Retention, *, keeps_before: int = 0) -> RemovalChoice:
    """Which of `commits`, all committed attempts that are looked at, go. `keeps_before`: the first epoch that the one who asks
    may remove anything of (RETENTION-6).
    """
    newest_first = sorted(commits, key=lambda c: c.order, reverse=True)
    sound = [c for c in newest_first if not c.damaged and not c.passed_over]
    if not sound:
        return RemovalChoice()
    reasons = _replaced(newest_first, sound)
    unknown_metric = _unknown_metric(newest_first, rules)
    if unknown_metric is None:
        reasons = _let_go(newest_first, [c for c in sound if c.order not in reasons], rules) | reasons
    verified = next((c.order for c in sound if c.verified), None)
    may_go = [c for c in reversed(newest_first) if c.order in reasons and _is_known(c, keeps_before)]
    return RemovalChoice(
        going=tuple((c.attempt, reasons[c.order]) for c in may_go if c.order != verified),
        surplus=tuple(c.attempt for c in may_go if c.order == verified),
        unknown_metric=unknown_metric,
    )


def _is_known(checkpoint: CheckpointFacts, keeps_before: int) -> bool:
    """Whether nobody can miss it but who has seen it (RETENTION-4, RETENTION-6)."""
    return checkpoint.attempt.attempt.epoch >= keeps_before and (checkpoint.damaged or not checkpoint.passed_over)


def _let_go(newest_first: Sequence[CheckpointFacts], current: Sequence[CheckpointFacts], rules: Retention) -> dict[Order, str]:
    """By order, why the rules do not need what is neither indispensable nor named; `current`: those that count."""
    if rules.keeps_all:
        return {}
    kept = _indispensable(newest_first, current) | _named(current, rules)
    words = f"retention keeps {_in_words(rules)}"
    return {c.order: f"it is damaged, and {words}" if c.damaged else words for c in newest_first if c.order not in kept}


def _replaced(newest_first: Sequence[CheckpointFacts], sound: Sequence[CheckpointFacts]) -> dict[Order, str]:
    """By order, why what has a newer commit of its tag is not needed (RETENTION-1)."""
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
    """The orders of those that no rule removes (RETENTION-2); the newest verified one apart."""
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
