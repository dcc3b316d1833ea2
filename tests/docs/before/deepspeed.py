"""What the pages on DeepSpeed take for granted: DeepSpeed on one CPU rank, its settings, and a model with its optimizer."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

from tests.e2e.deepspeed_engines import deepspeed  # isort: skip  # first: it prepares DeepSpeed for a CPU

from tests.docs.before.training import batches, model, optimizer, scheduler, steps

__all__ = ["batches", "deepspeed", "model", "optimizer", "save_dir", "scheduler", "steps", "tokenizer"]

WORDS: dict[str, str] = {}
tokenizer = SimpleNamespace(save_pretrained=lambda _: None)
save_dir = "/mnt/ckpts/ds"
settings = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
Path("ds_config.json").write_text(json.dumps(settings))
deepspeed.init_distributed(dist_backend="gloo")
