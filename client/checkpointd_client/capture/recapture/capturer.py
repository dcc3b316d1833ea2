"""Captures the state at each save of a Checkpointer. Modules and optimizers that are as they were are not walked again.

Invariants
  RECAPTURE-1  A capture equals what `state.capture` finds, whether the whole state was walked for it or not.
  RECAPTURE-2  Two captures have the same arrangement object only if their leaves differ in nothing but their addresses.
  RECAPTURE-3  Two captures have the same columns object only if their leaves agree in all that columns tell, and those that
      only optimizer steps change have the same addresses, sizes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from checkpointd_client.capture.leaves import Columns, Leaves
from checkpointd_client.capture.recapture.plan import CapturePlan, Recaptured, State
from checkpointd_client.capture.state import Captured, Walked, walked
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses

STATES_MAX = 4
"""The most states that are remembered, for a Checkpointer that saves several in turn."""


Check = Callable[[State, Walked, TensorClasses], None]


class Capturer:
    """Captures one state after another, and gives captures that are arranged alike the same `Captured.arrangement`."""

    def __init__(self, classes: TensorClasses = ONLY_BUILT_IN, check: Check = lambda _state, _whole, _classes: None) -> None:
        """`check` is given every state that was walked whole and is arranged as none of the last ones; it may raise."""
        self._classes, self._check = classes, check
        self._known: dict[object, _Remembered] = {}
        self._arrangements: list[_Arrangement] = []
        self._checked: list[object] = []
        """The arrangements that have passed the check."""

    def capture(self, state: State, client_state: State | None, *, exclude_frozen_parameters: bool) -> Captured:
        """Do what `state.capture` does."""
        known = self._known_by((_names_of(state), exclude_frozen_parameters))
        if known.plan is not None:
            try:
                again = known.plan.recaptured(state, client_state)
            except Exception:  # the walk of the whole state shows and explains what is wrong
                known.plan = None
            else:
                known.walks = 0
                return self._arranged_by(known, again)
        whole = walked(state, client_state, exclude_frozen_parameters=exclude_frozen_parameters, classes=self._classes)
        captured = self.arranged(whole.captured)
        if not any(captured.arrangement is known for known in self._checked):
            self._check(state, whole, self._classes)
            self._checked = [captured.arrangement, *self._checked][:STATES_MAX]
        known.plan_for(state, whole, self._classes)
        return captured

    def arranged(self, captured: Captured) -> Captured:
        """`captured` with the arrangement of an earlier capture, if that was arranged alike."""
        made = _Arrangement.of(captured.leaves)
        same = next((known for known in self._arrangements if known == made), made)
        self._arrangements = [same, *(known for known in self._arrangements if known is not same)][:STATES_MAX]
        return replace(captured, arrangement=same)

    def _known_by(self, key: object) -> _Remembered:
        known = self._known.pop(key, None) or _Remembered()
        self._known = dict([*self._known.items(), (key, known)][-STATES_MAX:])
        return known

    def _arranged_by(self, known: _Remembered, again: Recaptured) -> Captured:
        """Do what `arranged` does, but compare only fresh leaves: the others cannot differ from those of the last capture."""
        fresh = _Arrangement.of(again.fresh), again.ends
        if known.arrangement is None or known.fresh != fresh:
            known.fresh, known.arrangement = fresh, self.arranged(again.captured).arrangement
        return replace(again.captured, arrangement=known.arrangement)


def _names_of(state: object) -> tuple[object, ...]:
    return tuple(state) if isinstance(state, Mapping) else ()


@dataclass(slots=True)
class _Remembered:
    """A remembered state. `walks`: how often it was walked whole since its facts were last found equal."""

    plan: CapturePlan | None = None
    walks: int = 0
    arrangement: object = None
    fresh: object = None

    def plan_for(self, state: State, whole: Walked, classes: TensorClasses) -> None:
        self.plan = self.arrangement = None
        # A state that is made anew for every save is planned ever more rarely: after 0, 1, 2, 4, 8 walks.
        if self.walks & (self.walks - 1) == 0:
            try:
                with torch._C.DisableTorchFunction():
                    self.plan = CapturePlan(state, whole, classes)
            except Exception:  # an object that a walk can read may have no facts; such a state is walked at every save
                self.plan = None
        self.walks += 1


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """All facts about leaves except their addresses. It refers to no tensor."""

    columns: Columns
    sizes: list[Any]
    strides: list[Any]
    devices: list[Any]
    are_inference: list[Any]

    @classmethod
    def of(cls, leaves: Leaves) -> _Arrangement:
        # This runs in every save, so no Python code runs for a single leaf.
        with torch._C.DisableTorchFunction():
            tensors = leaves.tensors
            return cls(
                leaves.columns,
                list(map(torch.Tensor.size, tensors)),
                list(map(torch.Tensor.stride, tensors)),
                list(map(attrgetter("device"), tensors)),
                list(map(torch.Tensor.is_inference, tensors)),
            )
