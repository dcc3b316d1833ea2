"""What saves say once about themselves, and which checkpoints this job may remove because of it.

Invariants
  ADVICE-1  Each piece of advice is logged once; that about old steps once after each load.
  ADVICE-2  A job removes no checkpoint of earlier ones until it has loaded or began afresh, and none that was there before it
      saved a step again that the loaded checkpoint already had (RETENTION-6 in `commit/retention.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from checkpointd.commit.facts import Order
from checkpointd.commit.retention import KEEPS_NONE
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.pipeline.writer_state import WriterState
from checkpointd_client.ranks.startup import Begun, say_unknown

log = logging.getLogger("checkpointd")


class SaveAdvice:
    """The advice of one rank's saves. Rank 0 gives that about retention, each rank that about its own waits."""

    def __init__(self, state: WriterState, rank: int, start: Begun, *, afresh: bool) -> None:
        self._state, self._rank, self._start = state, rank, start
        self._said: set[str] = set()
        self._loaded_step: int | None = None
        self._repeats = False
        """Whether this job saves steps that the loaded checkpoint already had."""
        state.tidier.keeps_before = KEEPS_NONE if afresh else (start.number, 0)

    def loaded(self, step: int | None) -> None:
        """A load has ended, with a checkpoint of `step`; None if there was none."""
        self._loaded_step, self._repeats = step, False

    def take_up(self) -> None:
        """The job knows the checkpoints of earlier ones, and may remove them, unless it saves old steps again."""
        if not self._repeats:
            self._state.tidier.keeps_before = KEEPS_NONE

    def before(self, tag: str, step: int, metrics: Mapping[str, float], order: Order) -> None:
        """A save begins. On rank 0, say why retention removes less than it should: no load yet, an old step, or no metric."""
        if self._rank != COORDINATOR:
            return
        if self._loaded_step is not None and step <= self._loaded_step and not self._repeats:
            self._repeats, self._state.tidier.keeps_before = True, order
            log.warning(
                "%s is step %d, but load() returned step %d: does the loop begin again, and not go on at loaded.step + 1? "
                "From now on, retention removes no checkpoint that was there before this save",
                tag,
                step,
                self._loaded_step,
            )
        elif self._state.tidier.keeps_before != KEEPS_NONE and not self._repeats and self._is_first("unknown"):
            say_unknown(self._start, self._state.store.url, "load()", "Checkpointer(..., afresh=True)")
        metric = self._state.commit.retention.metric
        if metric is not None and metric not in metrics and self._is_first("metric"):
            log.warning(
                "%s is saved without the metric %r, by which retention chooses the best: checkpoints without it stay until "
                "somebody deletes them. Pass metrics={%r: ...} with every save",
                tag,
                metric,
                metric,
            )

    def busy(self, tag: str, overhead_max: float | None) -> None:
        """Training waits for earlier saves: say what helps."""
        if self._is_first("busy"):
            more = (
                "" if overhead_max is None else f", or let saves take more of the machine (max_overhead above {overhead_max:g})"
            )
            log.warning(
                "rank %d: save() of %s waits until one of the two saves before it is written, and training waits with it. To "
                'avoid that, save less often, or let save() skip what comes too fast (when_busy="skip" or "space")%s. '
                "status().waited_s counts all such waits",
                self._rank,
                tag,
                more,
            )

    def _is_first(self, word: str) -> bool:
        is_first = word not in self._said
        self._said.add(word)
        return is_first
