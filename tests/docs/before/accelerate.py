"""What ACCELERATE takes for granted: DeepSpeed for a CPU, as `install` wraps it, and a job to train."""

from tests.e2e.deepspeed_engines import deepspeed  # isort: skip  # first: it prepares DeepSpeed for a CPU

from tests.docs.before.training import model, optimizer, step

__all__ = ["deepspeed", "model", "optimizer", "step"]
