"""Captures the state at each save of a Checkpointer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from checkpointd_client.capture.state import Captured, Leaf, capture

_OF_LEAF = attrgetter("fqn", "dtype", "optimizer_only", "part")


class Capturer:
    """Captures one state after another, and gives captures that are arranged alike the same `Captured.arrangement`."""

    def __init__(self) -> None:
        self._last: _Arrangement | None = None

    def capture(
        self, state: Mapping[str, object], client_state: Mapping[str, object] | None, *, exclude_frozen_parameters: bool
    ) -> Captured:
        """Do what `state.capture` does."""
        return self.arranged(capture(state, client_state, exclude_frozen_parameters=exclude_frozen_parameters))

    def arranged(self, captured: Captured) -> Captured:
        """`captured` with the arrangement of the capture before it, if both are arranged alike."""
        with torch._C.DisableTorchFunction():
            arrangement = _Arrangement.of(captured.leaves)
        if self._last is None or self._last != arrangement:
            self._last = arrangement
        return replace(captured, arrangement=self._last)


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """All facts about leaves except their addresses. It refers to no tensor."""

    leaves: list[Any]
    sizes: list[Any]
    strides: list[Any]
    devices: list[Any]
    are_inference: list[Any]

    @classmethod
    def of(cls, leaves: tuple[Leaf, ...]) -> _Arrangement:
        # This runs in every save, so no Python code runs for a single leaf.
        tensors = list(map(attrgetter("tensor"), leaves))
        return cls(
            list(map(_OF_LEAF, leaves)),
            list(map(torch.Tensor.size, tensors)),
            list(map(torch.Tensor.stride, tensors)),
            list(map(attrgetter("device"), tensors)),
            list(map(torch.Tensor.is_inference, tensors)),
        )
