"""What OPERATING takes for granted: a job that saves at run1, its module, and a root that no job uses for the commands."""

import sys
from types import ModuleType

from checkpointd_client import Checkpointer
from tests.docs.before.training import Net, batches, loss, optimizer, state, step, steps, train_one_step

__all__ = ["batches", "ckpt", "leave", "loss", "optimizer", "state", "step", "steps", "train_one_step"]

WORDS = {"ROOT": "/mnt/ckpts/done", "TAG": "global_step1", "OLDER": "global_step2", "OUT": "model", "DIR": "dcp"}

with Checkpointer(WORDS["ROOT"]) as done:
    for number in (1, 2, 3):
        done.save(number, state).wait()
ckpt = Checkpointer("/mnt/ckpts/run1")

my_model = ModuleType("my_model")
my_model.build_model = Net  # type: ignore[attr-defined]
my_model.evaluate = lambda _: 0.5  # type: ignore[attr-defined]
sys.modules["my_model"] = my_model


def leave(step: int) -> None:
    """Save and leave: no page is preempted."""
    raise AssertionError(step)
