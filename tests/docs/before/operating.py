"""What OPERATING takes for granted: a job that saves at run1, and a root that no job uses for the commands."""

from checkpointd_client import Checkpointer
from tests.docs.before.training import batches, loss, optimizer, state, step, steps, train_one_step

__all__ = ["batches", "ckpt", "evaluate", "leave", "loss", "optimizer", "state", "step", "steps", "train_one_step"]

WORDS = {"ROOT": "/mnt/ckpts/done", "TAG": "global_step1", "OLDER": "global_step2", "OUT": "model", "DIR": "dcp"}

with Checkpointer(WORDS["ROOT"]) as done:
    for number in (1, 2, 3):
        done.save(number, state).wait()
ckpt = Checkpointer("/mnt/ckpts/run1")


def leave(step: int) -> None:
    """Save and leave: no page is preempted."""
    raise AssertionError(step)


def evaluate(batch: object) -> None:
    """What a job does with a batch of its evaluation."""
