"""What the training script of deploy/README.md takes for granted: its arguments, its model and its loop."""

import signal
import sys
from types import SimpleNamespace

from checkpointd_client import Checkpointer
from tests.docs.before.training import state, steps
from tests.docs.before.training import train_one_step as train

__all__ = ["Checkpointer", "args", "signal", "start", "state", "steps", "sys", "train"]

args = SimpleNamespace(root="/mnt/ckpts/run1", sidecar=None)
start = 0
