"""User code that takes a checkpoint elsewhere, as it should type-check: run mypy over it, never Python. `make type` does."""

from __future__ import annotations

import torch

from checkpointd_client import StateDict, consolidate, state_dict_from_checkpoint


def publish(model: torch.nn.Module) -> int:
    root = "/mnt/ckpts/run1"
    done = consolidate(root, "/mnt/models/run1", "global_step100", only="model", dtype="bf16", max_shard_size="2GB")
    tensors: StateDict = state_dict_from_checkpoint(root, only="model")
    weight: torch.Tensor = tensors["layers.0.weight"]
    assert weight.shape == tensors.shape("layers.0.weight")
    model.load_state_dict(dict(tensors))
    return sum(file.size for file in done.files)
