"""What ERRORS takes for granted: a Checkpointer and a state."""

from checkpointd_client import Checkpointer
from tests.docs.before.training import state

__all__ = ["ckpt", "state"]

ckpt = Checkpointer("/mnt/ckpts/run1")
