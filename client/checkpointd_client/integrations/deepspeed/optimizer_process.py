"""DeepSpeed's optimizers that step in a process of their own: SuperOffload and ZenFlow.

Torch does not report their steps. What changes when, and what DeepSpeed's own checkpoint has of it:

    SuperOffload  Each backward pass queues a step per sub-group. The process writes the fp32 masters, and `step()` waits.
                  The moments and step counts of Adam exist only in the process; no checkpoint has them.
    ZenFlow       The training process steps the selected columns, from the backward pass on. With `overlap_step`, another
                  process steps everything else: `step()` gives it a step, and a later `step()` waits for the end of that one.
                  No checkpoint has the selected columns, their moments, the gradients that wait for the next update, or, with
                  `overlap_step`, any moments.

Invariants
  OFFLOAD-1  A snapshot is of one moment: the process has no step to do while it is taken, and gets the next one only when every
      source is copied.
  OFFLOAD-2  A load is not changed by a step that was given before it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from checkpointd.errors import UsageError

log = logging.getLogger("checkpointd")

_POLL_S = 1.0
_KEPT = (
    "keeps the moments of the steps before this load, since DeepSpeed cannot reset them: load in a new process, before the "
    "first step, to begin with new ones"
)


class OptimizerProcess:
    """The process of an engine's optimizer. This class is for optimizers that have none, and whose steps torch reports."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._is_first = engine.global_rank == 0
        self._undo: list[Callable[[], None]] = []

    @staticmethod
    def of(engine: Any) -> OptimizerProcess:
        """That of an engine."""
        optimizer = engine.optimizer
        if hasattr(optimizer, "superoffload_cpu_optimizer"):
            return _SuperOffload(engine)
        return _ZenFlow(engine) if is_zenflow(optimizer) else OptimizerProcess(engine)

    def connect(self, fence: Callable[[], None], step_begins: Callable[[object], None]) -> None:
        """Call `fence` before anything changes, and `step_begins` at each step that torch does not report."""

    def disconnect(self) -> None:
        """Give the optimizer its own methods back."""
        while self._undo:
            self._undo.pop()()

    def fault(self, timeout_s: float) -> str | None:
        """Wait until the process has nothing to do; why there can be no snapshot or load now, or None (OFFLOAD-1)."""
        return None

    def loaded(self) -> None:
        """DeepSpeed's tensors have just been loaded."""

    def _warn(self, text: str) -> None:
        if self._is_first:  # it is the same on every rank
            log.warning("%s", text)

    def _before(self, owner: Any, name: str, call: Callable[[], None]) -> None:
        """Call `call` before each call of a method."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            call()
            return original(*args, **kwargs)

        setattr(owner, name, method)
        self._undo.append(lambda: setattr(owner, name, original))


def is_zenflow(optimizer: Any) -> bool:
    """Whether ZenFlow steps the optimizer."""
    return bool(getattr(optimizer, "zenflow", False))


def keeps_moments(optimizer: Any) -> bool:
    """Whether the moments lie only in the optimizer's process: nothing can be read of them, or put into their place."""
    overlaps = is_zenflow(optimizer) and hasattr(optimizer, "process_optimizer_established")
    return overlaps or hasattr(optimizer, "superoffload_cpu_optimizer")


class _SuperOffload(OptimizerProcess):
    """Its queue is empty except from the backward pass until the end of `step()`."""

    _has_stepped = False

    def connect(self, fence: Callable[[], None], step_begins: Callable[[object], None]) -> None:
        self._warn(
            "SuperOffload: DeepSpeed saves the weights and their fp32 masters, but not the moments and step counts of Adam, "
            "which only the optimizer's process has. A resumed training begins with new ones, as it does without checkpointd"
        )
        offloaded = self._optimizer.superoffload_cpu_optimizer
        self._before(offloaded, "async_step", self._steps)
        self._before(offloaded, "async_step", fence)
        self._before(self._optimizer, "step", lambda: step_begins(self._optimizer))

    def _steps(self) -> None:
        self._has_stepped = True

    def fault(self, timeout_s: float) -> str | None:
        if self._optimizer.async_cpuadam_num or getattr(self._optimizer, "_submitted_cpu_sub_groups", ()):
            return (
                "SuperOffload's process has begun the step of this backward pass, so the masters are of no single step: "
                "call it after engine.step()"
            )
        return None

    def loaded(self) -> None:
        if self._has_stepped:
            self._warn(f"SuperOffload's process {_KEPT}")


class _ZenFlow(OptimizerProcess):
    """With `overlap_step`, the process steps between two calls of `step()`."""

    def connect(self, fence: Callable[[], None], step_begins: Callable[[object], None]) -> None:
        optimizer = self._optimizer
        if getattr(optimizer, "process_optimizer_established", False) and not isinstance(optimizer.zf_op, _CountedSteps):
            raise UsageError(
                "ZenFlow's process has been given steps already, and checkpointd cannot know how many of them are done: call "
                "attach(engine) before the first engine.step()"
            )
        moments = ", and the moments of the optimizer's process" if keeps_moments(optimizer) else ""
        self._warn(
            "ZenFlow: DeepSpeed saves the weights and their fp32 masters, but not the selected columns with their moments, the "
            f"gradients that wait for the next update{moments}. A resumed training begins with new ones, as it does without "
            "checkpointd"
        )
        self._before(optimizer, "backward_prologue", fence)
        self._count()

    def _count(self) -> None:
        """Count the steps of the process, from its start on."""
        optimizer, original = self._optimizer, getattr(self._optimizer, "start_optimizer_process", None)
        if original is None or isinstance(getattr(optimizer, "zf_op", None), _CountedSteps):
            return

        def start() -> None:
            original()
            optimizer.zf_op = _CountedSteps(optimizer.zf_op)

        optimizer.start_optimizer_process = start  # for good: a count that has begun must go on

    def fault(self, timeout_s: float) -> str | None:
        optimizer = self._optimizer
        if not getattr(optimizer, "process_optimizer_established", False):
            return None
        deadline = time.monotonic() + timeout_s
        while not optimizer.zf_op.are_done(optimizer.zf_ctrl.data_ptr(), _POLL_S):
            if not optimizer.process.is_alive():
                return "ZenFlow's optimizer process has died within a step, so the masters are of no single step"
            if time.monotonic() >= deadline:
                return f"ZenFlow's optimizer process has not finished its step within {timeout_s:g} s"
        return None

    def loaded(self) -> None:
        """The next `step()` copies the stale weights of the last one over the loaded weights: make them the loaded ones."""
        optimizer, has_stepped = self._optimizer, False
        for master in getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups:
            stale = getattr(master, "stale_param", None)
            if stale is not None:
                stale.data.copy_(master.data)
                has_stepped = True
        if has_stepped:
            self._warn(f"ZenFlow's process {_KEPT}")


class _CountedSteps:
    """DeepSpeed's operator for ZenFlow's process. It also knows whether the process has done all steps that it was given."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._given = 0
        """The steps whose end nobody has seen."""
        self._seen = 0
        """The steps whose end `are_done` has seen, and DeepSpeed has not asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def zenflow_adam_submit(self, *arguments: Any) -> None:
        """DeepSpeed gives the process a step."""
        self._operator.zenflow_adam_submit(*arguments)
        self._given += 1

    def zenflow_adam_wait(self, control: int, timeout_s: float) -> bool:
        """DeepSpeed waits for the end of a step."""
        if self._seen:
            self._seen -= 1
            return True
        ended = bool(self._operator.zenflow_adam_wait(control, timeout_s))
        self._given -= ended
        return ended

    def are_done(self, control: int, timeout_s: float) -> bool:
        """Whether all steps are done, within a time for each of them."""
        while self._given and self._operator.zenflow_adam_wait(control, timeout_s):
            self._given -= 1
            self._seen += 1
        return not self._given
