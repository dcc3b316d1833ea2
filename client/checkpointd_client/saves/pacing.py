"""Decides from the times of training steps how fast a save in flight may work. Nothing here has effects.

A step is *disturbed* if a save was in flight while it ran, and *undisturbed* otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median

UNDISTURBED_MIN = 8
DISTURBED_MIN = 4
"""Fewer steps say nothing."""
OUTLIER = 5.0
"""A step that takes this many times the median, such as an evaluation, counts only that much."""
SHARE_MIN = 0.05
SLOWER_MAX = 0.5
FASTER = 1.25
"""One decision changes the share at most by these factors, since the next steps show what it gave."""
CALM = 0.5
"""Below this part of the limit, a save may work faster again."""


def overhead_of(undisturbed: Sequence[float], disturbed: Sequence[float]) -> float | None:
    """How much longer disturbed steps take, as a part of an undisturbed one; None if there are too few steps.

    A difference within the noise, which is two standard errors, counts as 0.
    """
    if len(undisturbed) < UNDISTURBED_MIN or len(disturbed) < DISTURBED_MIN:
        return None
    base = median(undisturbed)
    if base <= 0:
        return None
    alone, during = _bounded(undisturbed, base), _bounded(disturbed, base)
    difference = fmean(during) - fmean(alone)
    noise = 2 * sqrt(_error(alone) + _error(during))
    return max(0.0, difference) / base if difference > noise else 0.0


def _bounded(steps: Sequence[float], base: float) -> list[float]:
    return [min(seconds, OUTLIER * base) for seconds in steps]


def _error(steps: Sequence[float]) -> float:
    """The squared standard error of the mean."""
    mean = fmean(steps)
    return sum((seconds - mean) ** 2 for seconds in steps) / (len(steps) * max(1, len(steps) - 1))


def spacing_s(*, held_s: float, lasted_s: float, overhead: float | None, overhead_max: float) -> float:
    """The least seconds between two saves so that saves take at most `overhead_max` of the training time.

    The last one held training for `held_s`, and was durable after `lasted_s`, in which steps took `overhead` longer.
    """
    cost_s = held_s + (overhead or 0.0) * lasted_s
    return max(lasted_s, cost_s / overhead_max)


def next_share(share: float, overhead: float | None, overhead_max: float) -> float:
    """The part of the time in which a save may work from now on, after it worked for `share` of the time."""
    if overhead is None:
        return share
    if overhead > overhead_max:
        return max(SHARE_MIN, share * max(SLOWER_MAX, overhead_max / overhead))
    if overhead < CALM * overhead_max:
        return min(1.0, share * FASTER)
    return share
