"""Steps: the changes that a load makes to the user's objects once every tensor is filled, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from checkpointd_client.restore.building import Build


class StepOrder(IntEnum):
    """When a step is taken. Loading an object may draw random numbers or set learning rates: what holds those goes after it."""

    CONTAINERS = 0
    MODULES = 1
    OTHERS = 2
    OPTIMIZERS = 3
    GENERATORS = 4
    RANDOMNESS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the user's objects: `apply` gets what `build` made."""

    turn: StepOrder
    build: Build
    apply: Callable[[Any], object]
