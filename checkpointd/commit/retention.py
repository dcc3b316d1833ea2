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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter, itemgetter
from typing import Literal, get_args

from checkpointd import arguments
from checkpointd.commit.branches import commits_of
from checkpointd.commit.facts import Dead, Order
from checkpointd.commit.log import is_sound
from checkpointd.errors import UsageError
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt

Mode = Literal["min", "max"]
KEEPS_NONE: Order = (0, 0)
"""No checkpoint comes before this order."""
Ages = Callable[[CommitRecord], float]
"""The seconds since a commit; 0 if they are unknown."""


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


def choose(
    attempts: Iterable[LoggedAttempt],
    rules: Retention,
    *,
    age_s: Ages,
    keeps_before: Order = KEEPS_NONE,
    incomplete: Collection[str] = (),
    exporting: Collection[str] = (),
) -> RemovalChoice:
    """Choose which of the checkpoints among `attempts` to remove. Those before `keeps_before` stay (RETENTION-6), and so do
    those in `exporting`, which exports need. Of those in `incomplete`, something is missing.
    """
    checkpoints = [one for one in attempts if one.status == "checkpoint"]
    if rules.keeps_all and len({one.prefix.rpartition("/")[0] for one in checkpoints}) == len(checkpoints):
        return RemovalChoice()  # nothing was saved again, in a history that may be long
    newest_first = commits_of(checkpoints)
    sound = [c for c in newest_first if is_sound(c) and c.prefix not in incomplete]
    if all(c.left_behind for c in sound):
        return RemovalChoice()
    reasons = _replaced(newest_first, sound)
    unknown_metric = _unknown_metric(newest_first, rules)
    current = [c for c in sound if c.prefix not in reasons] if reasons else sound
    if unknown_metric is None and not rules.keeps_all:
        reasons = _let_go(newest_first, current, rules, incomplete, age_s) | reasons
    unneeded = [c for c in reversed(newest_first) if c.prefix in reasons and _may_go(c, keeps_before)]
    may_go = [c for c in unneeded if c.prefix not in exporting]
    verified = next((c.prefix for c in sound if c.verified and not c.left_behind), "")
    return RemovalChoice(
        going=tuple((c.prefix, reasons[c.prefix]) for c in may_go if c.prefix != verified),
        surplus=tuple(c.prefix for c in may_go if c.prefix == verified),
        exporting=tuple(c.prefix for c in unneeded if c.prefix in exporting),
        unknown_metric=unknown_metric,
    )


def _may_go(checkpoint: LoggedAttempt, keeps_before: Order) -> bool:
    """Whether RETENTION-4 and RETENTION-6 allow its removal."""
    return checkpoint.order >= keeps_before and bool(checkpoint.damaged or not checkpoint.passed_over)


def _let_go(
    newest_first: Sequence[LoggedAttempt],
    current: Sequence[LoggedAttempt],
    rules: Retention,
    incomplete: Collection[str],
    age_s: Ages,
) -> dict[str, str]:
    """The checkpoints that the rules do not keep, with the reason. The rules count only those in `current`."""
    # RETENTION-2, without the newest verified checkpoint.
    kept = {c.prefix for c in (*current[:1], *[c for c in current if c.commit.save_latest][:1])}
    of_branch = [c for c in current if not c.left_behind]
    # RETENTION-8: those of the current branch alone, and all.
    kept |= _named(of_branch, rules, age_s)
    if len(of_branch) < len(current):
        kept |= _named(sorted(current, key=attrgetter("order"), reverse=True), rules, age_s)
    words = f"retention keeps {_in_words(rules)}"
    going = (c for c in newest_first if c.prefix not in kept and (c.damaged or c.prefix not in incomplete))
    return {c.prefix: f"it is damaged, and {words}" if c.damaged else words for c in going}


def _replaced(newest_first: Sequence[LoggedAttempt], sound: Sequence[LoggedAttempt]) -> dict[str, str]:
    """The checkpoints whose tag has a newer commit, with the reason for their removal (RETENTION-1). That which a load takes
    stays, also if the newer commit did not ask for `latest`.
    """
    newest: dict[str, LoggedAttempt] = {}
    for c in sound:
        newest.setdefault(c.tag, c)
    if len(newest) == len(newest_first):
        return {}
    may_go = (c for c in newest_first if not c.left_behind or c.commit.shown_at)
    asked = next((c for c in sound if c.may_be_latest and not c.commit.shown_at), None)
    pairs = ((c, newest.get(c.tag, c)) for c in may_go if c is not asked)
    older = (c.prefix for c, last in pairs if last is not c and c.order < last.order)
    return dict.fromkeys(older, "the tag was saved again since")


def _unknown_metric(checkpoints: Sequence[LoggedAttempt], rules: Retention) -> str | None:
    """The complaint about a metric of `rules` that no checkpoint has; None if there is no complaint."""
    if rules.metric is None or any(_measure(c, rules.metric) is not None for c in checkpoints):
        return None
    known = sorted({name for c in checkpoints for name in c.commit.metrics})
    others = f"they have {', '.join(known)}" if known else "they have no metrics"
    return f"no checkpoint has the metric {rules.metric!r}, by which the rules choose the best; {others}"


def _measure(checkpoint: LoggedAttempt, metric: str) -> float | None:
    """The value of the metric; None if it is missing or not finite, since such a checkpoint cannot be the best."""
    value = checkpoint.commit.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def _named(newest_first: Sequence[LoggedAttempt], rules: Retention, age_s: Ages) -> set[str]:
    """The checkpoints that a rule names."""
    named = {c.prefix for c in newest_first[: rules.keep_last or 0]}
    if rules.every_steps is not None:
        named |= {c.prefix for c in newest_first if c.step % rules.every_steps == 0}
    if rules.younger_than_s is not None:
        named |= {c.prefix for c in newest_first if age_s(c.commit) < rules.younger_than_s}
    if rules.best is not None and rules.metric is not None:
        sign = 1 if rules.mode == "min" else -1
        measured = [(_measure(c, rules.metric), c.prefix) for c in newest_first]
        named |= {prefix for value, prefix in measured if value is None}
        ranked = [(sign * value, prefix) for value, prefix in measured if value is not None]
        # The sort is stable, so the newer of two equal checkpoints counts as better.
        named |= {prefix for _, prefix in sorted(ranked, key=itemgetter(0))[: rules.best]}
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
