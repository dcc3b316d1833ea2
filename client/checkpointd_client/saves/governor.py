"""Measures training steps with and without a save in flight, and sets the pace of the saves and of their background copies.

Invariants
  GOVERNOR-1  The time that save() and the copy's fence take is not part of a step: pacing cannot change it.
  GOVERNOR-2  Only steps of one optimizer count, the first that steps: others step within the same training step.
  GOVERNOR-3  The background copy should end within COPY_PART of the shortest undisturbed step, counted from the last step of
      the optimizer. So no step waits for a copy that rests. If too few steps are known, the copy does not rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from weakref import ref

from checkpointd.pipeline.pace import Pace
from checkpointd_client.saves.pacing import UNDISTURBED_MIN, next_share, overhead_of, spacing_s

STEPS_KEPT = 64
DECIDE_EVERY = 4
"""So many disturbed steps lead to one decision."""
PART = 0.8
"""A save should end within this part of the time between two saves, and of its deadline."""
COPY_PART = 0.5
"""The background copy should end within this part of a step."""


class Governor:
    """Keeps the cost of saves below `overhead_max` of the training time. None: it only measures.

    `paces` gives the paces of the saves in flight. `clock` gives seconds.
    """

    def __init__(
        self,
        overhead_max: float | None,
        paces: Callable[[], Iterable[Pace]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.overhead_max = overhead_max
        self.overhead: float | None = None
        """How much longer steps take while a save is in flight, as a part of a step; None while that is unknown."""
        self.share = 1.0
        """The part of the time in which saves work."""
        self.spacing_s = 0.0
        """The least seconds between two saves, by what the last one cost; for `when_busy="space"`."""
        self._paces, self._clock = paces, clock
        self._undisturbed: deque[float] = deque(maxlen=STEPS_KEPT)
        self._disturbed: deque[float] = deque(maxlen=STEPS_KEPT)
        self._optimizer: Callable[[], object] | None = None
        self._since: float | None = None
        self._was_saving = False
        self._excluded_s = 0.0
        self._undecided = 0
        self._last_save: float | None = None

    def exclude(self, seconds: float) -> None:
        """Leave out `seconds` of the present step (GOVERNOR-1)."""
        self._excluded_s += seconds

    def stepped(self, optimizer: object) -> None:
        """A step of `optimizer` begins, which ends the training step before."""
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            self._optimizer, self._since = ref(optimizer), None
        elif known is not optimizer:
            return
        now, in_flight = self._clock(), list(self._paces())
        if self._since is not None:
            self._count(max(0.0, now - self._since - self._excluded_s), is_disturbed=self._was_saving or bool(in_flight))
        self._since, self._excluded_s, self._was_saving = now, 0.0, bool(in_flight)
        for pace in in_flight:
            pace.set(self.share)

    def _count(self, seconds: float, *, is_disturbed: bool) -> None:
        if not is_disturbed:
            self._undisturbed.append(seconds)
            return
        self._disturbed.append(seconds)
        self._undecided += 1
        if self._undecided >= DECIDE_EVERY:
            self._undecided = 0
            self._decide()

    def _decide(self) -> None:
        measured = overhead_of(self._undisturbed, self._disturbed)
        if measured is None:
            return
        self.overhead = measured
        if self.overhead_max is None:
            return
        share = next_share(self.share, measured, self.overhead_max)
        if share != self.share:
            self.share = share
            self._disturbed.clear()  # they ran at another pace

    def saved(self, *, held_s: float, lasted_s: float) -> None:
        """A save has committed; `spacing_s` of pacing.py has the arguments."""
        if self.overhead_max is not None:
            limit = self.overhead_max
            self.spacing_s = spacing_s(held_s=held_s, lasted_s=lasted_s, overhead=self.overhead, overhead_max=limit)

    def begin(self, deadline_s: float) -> Pace:
        """The pace of a save that begins now and must have ended within `deadline_s`. Earlier saves are late, so they hurry."""
        now = self._clock()
        for earlier in self._paces():
            earlier.lift("late")
        between_s = deadline_s if self._last_save is None else now - self._last_save
        self._last_save = now
        self._was_saving = True
        return Pace(share=self.share, until=now + PART * min(deadline_s, between_s), copy_until=self._copy_until())

    def _copy_until(self) -> float | None:
        """When the background copy of a save that begins now should have ended (GOVERNOR-3)."""
        if self._since is None or len(self._undisturbed) < UNDISTURBED_MIN:
            return None
        return self._since + self._excluded_s + COPY_PART * min(self._undisturbed)
