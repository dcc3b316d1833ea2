"""SAVE-1 and SAVE-2 of saver.py: Ctrl-C at any line of a save loses no slot, and the save ends."""

from __future__ import annotations

import itertools
from types import CodeType

import pytest
import torch

from checkpointd_client import Checkpointer, saver
from checkpointd_client.checkpointer import core_of
from checkpointd_client.staging import arena, stager
from checkpointd_client.staging.arena import SlotHold
from checkpointd_client.staging.stager import StagingMode
from tests.interruptions import Interruption

FILES = {module.__file__ for module in (arena, saver, stager)}
BEFORE = {"Saver.save", "Saver._save", "Saver._new_job", "Saver._say_once", "Saver._refuse", "asked"}
"""What runs before the save has begun, or after it was refused."""


def of_a_save(code: CodeType) -> bool:
    return code.co_filename in FILES and code.co_qualname not in BEFORE and not code.co_qualname.startswith("check_metrics")


def has_ended(ckpt: Checkpointer) -> bool:
    """Whether every save ends soon."""
    return all(handle.ended_within(30) for handle in core_of(ckpt)._history.in_flight())


def free_slots(ckpt: Checkpointer) -> int:
    """How many snapshots could be taken now."""
    holds = [SlotHold(core_of(ckpt)._arena) for _ in range(3)]
    count = sum(core_of(ckpt)._arena.acquire(hold, 1, 0) for hold in holds)
    for hold in holds:
        hold.release()
    return count


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_ctrl_c_at_any_line_of_a_save_loses_no_slot(mode: StagingMode) -> None:
    net = torch.nn.Linear(8, 8)
    state: dict[str, object] = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    options = {"staging": mode, "when_busy": "skip", "on_no_progress": "ignore"}
    with Checkpointer(f"memory://interrupted-{mode}", **options) as ckpt:
        for number in itertools.count(1):
            with Interruption(number, of_a_save) as interruption:
                ckpt.save(number, state | {"more": torch.zeros(number << 10)})  # no slot fits: it is replaced
            assert has_ended(ckpt), interruption.place
            assert free_slots(ckpt) == 2, interruption.place
            if not interruption.happened:
                break
    assert number > 60
