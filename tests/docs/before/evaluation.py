"""What EVALUATION takes for granted: a checkpoint of a job, and its model."""

from checkpointd_client import Checkpointer
from tests.docs.before.training import model, state

__all__ = ["model"]

with Checkpointer("/mnt/ckpts/run1") as ckpt:
    ckpt.save(100, state)
