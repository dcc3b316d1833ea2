"""SAVE-1 and SAVE-2 of saver.py: Ctrl-C at any line of a save loses no slot, and the save ends."""

from __future__ import annotations

import gc
import itertools
import threading
import time
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


def collector_runs() -> bool:
    """Whether Python's garbage collector runs soon: the writer's thread may hold it up for a moment."""
    never, until = threading.Event(), time.monotonic() + 30
    while not gc.isenabled() and time.monotonic() < until:
        never.wait(0.001)
    return gc.isenabled()


@pytest.mark.nightly
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
            assert collector_runs(), interruption.place
            if not interruption.happened:
                break
    assert number > 60


def collections_of(ckpt: Checkpointer, step: int, state: dict[str, object]) -> int:
    """How often Python's garbage collector runs during a save."""
    begun: list[str] = []

    def note(phase: str, info: object) -> None:
        begun.extend([phase] if phase == "start" and threading.current_thread() is threading.main_thread() else [])

    gc.callbacks.append(note)
    try:
        ckpt.save(step, state)
    finally:
        gc.callbacks.remove(note)
    return len(begun)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_many_tensors_do_not_keep_the_garbage_collector_busy(mode: StagingMode) -> None:
    state: dict[str, object] = {"net": torch.nn.ParameterList(torch.zeros(1) for _ in range(10_000))}
    with Checkpointer(f"memory://collected-{mode}", staging=mode, on_no_progress="ignore") as ckpt:
        ckpt.save(1, state).wait()
        assert collections_of(ckpt, 2, state) < 10


def test_a_garbage_collector_that_is_off_stays_off() -> None:
    with Checkpointer("memory://uncollected") as ckpt:
        gc.disable()
        try:
            ckpt.save(1, {"w": torch.zeros(1)}).wait()
            assert not gc.isenabled()
        finally:
            gc.enable()
