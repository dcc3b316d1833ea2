"""Decides which checkpoints are kept: those that the user's rules name, and those that no rule may remove.

Invariants
  RETENTION-1  A committed attempt is removed only if a newer, undamaged commit of its tag exists, or if the rules allow it.
  RETENTION-2  Rules never remove the newest checkpoint, the newest checkpoint whose save moves `latest`, or the newest verified
      checkpoint. They keep each checkpoint that at least one rule names. Without rules, a checkpoint is removed only if its tag
      was saved again.
  RETENTION-3  A checkpoint that is recorded as damaged never counts as the newest or as verified, and no rule counts it. If
      all checkpoints are damaged, none is removed.
  RETENTION-4  A checkpoint that a load has passed over stays until it is recorded as damaged. Meanwhile it never counts as the
      newest or as verified, no rule counts it, and no other checkpoint is removed in its favour. An older `verified` record
      does not matter, since the load found damage later.
  RETENTION-5  Rules with a metric never remove a checkpoint without that metric. If no checkpoint has the metric, the rules
      remove nothing.
  RETENTION-6  A job that does not know what earlier starts committed removes none of their checkpoints, neither by rules nor
      for a newer commit of the same tag. Nor does a job that saves steps again which the checkpoint that it loaded already had:
      of all that was there before, nothing goes.
  RETENTION-8  A checkpoint of a branch that was left is not counted in place of one of the current branch: the rules keep what
      they name among all checkpoints, and what they name among those of the current branch alone. It never counts as the
      newest or as verified. If both branches saved one tag, neither commit replaces the other, unless they are shown in the
      same directory.
  RETENTION-7  A checkpoint that an export still needs stays, even if its tag was saved again.
  RETENTION-9  A checkpoint of which something is missing counts for no rule, and no other checkpoint is removed in its favour.
      No rule removes it either, since its owner may bring back what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

from checkpointd import arguments
from checkpointd.commit.facts import Dead, Order
from checkpointd.errors import UsageError

Mode = Literal["min", "max"]
KEEPS_NONE: Order = (0, 0)
"""No checkpoint comes before this order."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules that choose which checkpoints stay. A checkpoint stays if at least one rule names it. Without rules all stay.
    `Retention(3)` keeps the last three.

    RETENTION-2 to RETENTION-9 name checkpoints that stay whatever the rules are. Raises UsageError for invalid numbers, and for
    `best` without a `metric`.
    """

    keep_last: int | None = None
    """Keep this many of the newest checkpoints."""
    _: KW_ONLY
    every_steps: int | None = None
    """Keep checkpoints whose step is a multiple of this number."""
    younger_than_s: float | None = None
    """Keep checkpoints committed less than this many seconds ago, by the clocks of the committing and the removing machine."""
    best: int | None = None
    """Keep this many of the best checkpoints by `metric`, a name in save(metrics=...). Checkpoints without it stay as well."""
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

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return (self.keep_last, self.every_steps, self.younger_than_s, self.best) == (None, None, None, None)


def rules_of(given: object) -> Retention:
    """The rules that `retention=` of a Checkpointer stands for: rules, or how many of the newest to keep, or None."""
    if given is None or isinstance(given, Retention):
        return given or Retention()
    if type(given) is not int or given < 1:
        raise UsageError(
            f"retention is {given!r:.80}; it must be a number of checkpoints, as in retention=3 for the last 3, or rules, "
            "as in retention=Retention(keep_last=3, every_steps=1000), or None to keep all"
        )
    return Retention(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The facts about a committed attempt. `age_s`: seconds since its commit, None if unknown."""

    attempt: str
    """`<tag>/<attempt>`."""
    order: Order
    step: int
    save_latest: bool = True
    verified: bool = False
    """Whether a record says that it was read back whole."""
    damaged: bool = False
    """Whether a record says that it is damaged."""
    passed_over: bool = False
    """Whether a load passed over it."""
    left_behind: bool = False
    """Whether it is of a branch that was left."""
    is_shown: bool = False
    """Whether a directory shows it, which belongs to the newest commit of its tag alone."""
    exporting: bool = False
    """Whether an export still needs it."""
    incomplete: bool = False
    """Whether something that it needs is missing, such as a tag that was removed by hand."""
    age_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        return self.attempt.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalChoice:
    """The checkpoints to remove, oldest first, and why not more."""

    going: tuple[Dead, ...] = ()
    surplus: tuple[str, ...] = ()
    """Would be removed if a newer checkpoint had been verified (RETENTION-2)."""
    exporting: tuple[str, ...] = ()
    """Would be removed if no export needed them (RETENTION-7)."""
    unknown_metric: str | None = None
    """Why the rules were not applied (RETENTION-5)."""
    abandoned: tuple[Dead, ...] = ()
    """Somebody has removed the directories that showed their files, so what is left of them goes, too."""


def choose(commits: Iterable[CheckpointFacts], rules: Retention, *, keeps_before: Order = KEEPS_NONE) -> RemovalChoice:
    """Choose which of `commits` to remove. Checkpoints before `keeps_before` stay (RETENTION-6)."""
    newest_first = sorted(commits, key=lambda c: (not c.left_behind, c.order), reverse=True)
    sound = [c for c in newest_first if not c.damaged and not c.passed_over and not c.incomplete]
    if all(c.left_behind for c in sound):
        return RemovalChoice()
    reasons = _replaced(newest_first, sound)
    unknown_metric = _unknown_metric(newest_first, rules)
    current = [c for c in sound if c.order not in reasons]
    if unknown_metric is None:
        reasons = _let_go(newest_first, current, rules) | reasons
    verified = next((c.order for c in sound if c.verified and not c.left_behind), None)
    unneeded = [c for c in reversed(newest_first) if c.order in reasons and _may_go(c, keeps_before)]
    may_go = [c for c in unneeded if not c.exporting]
    return RemovalChoice(
        going=tuple((c.attempt, reasons[c.order]) for c in may_go if c.order != verified),
        surplus=tuple(c.attempt for c in may_go if c.order == verified),
        exporting=tuple(c.attempt for c in unneeded if c.exporting),
        unknown_metric=unknown_metric,
    )


def _may_go(checkpoint: CheckpointFacts, keeps_before: Order) -> bool:
    """Whether RETENTION-4 and RETENTION-6 allow its removal."""
    return checkpoint.order >= keeps_before and (checkpoint.damaged or not checkpoint.passed_over)


def _let_go(newest_first: Sequence[CheckpointFacts], current: Sequence[CheckpointFacts], rules: Retention) -> dict[Order, str]:
    """The orders of the checkpoints that the rules do not keep, with the reason. The rules count only those in `current`."""
    if rules.keeps_all:
        return {}
    kept = _indispensable(current)
    for some in _branches(current):
        kept |= _named(some, rules)
    words = f"retention keeps {_in_words(rules)}"
    going = (c for c in newest_first if c.order not in kept and (c.damaged or not c.incomplete))
    return {c.order: f"it is damaged, and {words}" if c.damaged else words for c in going}


def _branches(current: Sequence[CheckpointFacts]) -> tuple[list[CheckpointFacts], list[CheckpointFacts]]:
    """What the rules look at, newest first: all checkpoints, and those of the current branch alone (RETENTION-8)."""
    by_order = sorted(current, key=lambda c: c.order, reverse=True)
    return by_order, [c for c in by_order if not c.left_behind]


def _replaced(newest_first: Sequence[CheckpointFacts], sound: Sequence[CheckpointFacts]) -> dict[Order, str]:
    """The orders of the checkpoints whose tag has a newer commit, with the reason for their removal (RETENTION-1). That which a
    load takes stays, also if the newer commit did not ask for `latest`.
    """
    newest: dict[str, Order] = {}
    for c in sound:
        newest.setdefault(c.tag, c.order)
    may_go = (c for c in newest_first if c.is_shown or not c.left_behind)
    asked = next((c.order for c in sound if c.save_latest and not c.left_behind and not c.is_shown), None)
    older = (c.order for c in may_go if c.order < newest.get(c.tag, c.order) and c.order != asked)
    return dict.fromkeys(older, "the tag was saved again since")


def _unknown_metric(commits: Sequence[CheckpointFacts], rules: Retention) -> str | None:
    """The complaint about a metric of `rules` that no checkpoint has; None if there is no complaint."""
    if rules.metric is None or any(_measure(c, rules.metric) is not None for c in commits):
        return None
    known = sorted({name for c in commits for name in c.metrics})
    others = f"they have {', '.join(known)}" if known else "they have no metrics"
    return f"no checkpoint has the metric {rules.metric!r}, by which the rules choose the best; {others}"


def _measure(checkpoint: CheckpointFacts, metric: str) -> float | None:
    """The value of the metric; None if it is missing or not finite, since such a checkpoint cannot be the best."""
    value = checkpoint.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def _indispensable(current: Sequence[CheckpointFacts]) -> set[Order]:
    """The orders of the checkpoints that no rule removes (RETENTION-2), without the newest verified checkpoint."""
    firsts = (current[:1], [c for c in current if c.save_latest][:1])
    return {c.order for some in firsts for c in some}


def _named(newest_first: Sequence[CheckpointFacts], rules: Retention) -> set[Order]:
    """The orders of the checkpoints that a rule names."""
    named = _counted(newest_first, rules)
    if rules.every_steps is not None:
        named |= {c.order for c in newest_first if c.step % rules.every_steps == 0}
    if rules.younger_than_s is not None:
        named |= {c.order for c in newest_first if c.age_s is None or c.age_s < rules.younger_than_s}
    if rules.metric is not None:
        named |= {c.order for c in newest_first if _measure(c, rules.metric) is None}
    return named


def _counted(newest_first: Sequence[CheckpointFacts], rules: Retention) -> set[Order]:
    """The orders of the checkpoints that the rules with a number name: the last, and the best. Others go in their favour."""
    named = {c.order for c in newest_first[: rules.keep_last or 0]}
    if rules.best is not None and rules.metric is not None:
        sign = 1 if rules.mode == "min" else -1
        measured = [(value, c.order) for c in newest_first if (value := _measure(c, rules.metric)) is not None]
        # The sort is stable, so the newer of two equal checkpoints counts as better.
        named |= {order for _, order in sorted(measured, key=lambda pair: sign * pair[0])[: rules.best]}
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
