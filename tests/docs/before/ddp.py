"""What DDP and FSDP2 take for granted: a process group, of one rank here, and a job to train."""

import torch
import torch.distributed as dist

from tests.docs.before.training import model, optimizer, step

__all__ = ["model", "optimizer", "step", "torch"]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
