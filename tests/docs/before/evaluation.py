"""What EVALUATION takes for granted: a checkpoint of a job, and the job's module."""

import sys
from types import ModuleType

from checkpointd_client import Checkpointer
from tests.docs.before.training import Net, state

__all__: list[str] = []

my_model = ModuleType("my_model")
my_model.build_model = Net  # type: ignore[attr-defined]
my_model.evaluate = lambda _: 0.5  # type: ignore[attr-defined]
sys.modules["my_model"] = my_model

with Checkpointer("/mnt/ckpts/run1") as ckpt:
    ckpt.save(100, state)
