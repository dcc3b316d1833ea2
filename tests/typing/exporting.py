"""User code that takes a checkpoint elsewhere, as it should type-check: run mypy over it, never Python. `make type` does."""

from __future__ import annotations

import torch

from checkpointd_client import Checkpointer, ExportConfig, Loaded, OpenCheckpoint, StateDict, consolidate, open_checkpoint


def publish(model: torch.nn.Module) -> int:
    root = "/mnt/ckpts/run1"
    done = consolidate(root, "/mnt/models/run1", "global_step100", only="model", dtype="bf16", max_shard_size="2GB")
    consolidate(root, "s3://models/run1", only="model", plain_names=True, files="/mnt/base-model")
    with open_checkpoint(root) as checkpoint:
        tensors: StateDict = checkpoint.tensors("model")
        weight: torch.Tensor = tensors["layers.0.weight"]
        assert weight.shape == tensors.shape("layers.0.weight")
        model.load_state_dict(dict(tensors))
    return sum(file.size for file in done.files)


def train() -> float | None:
    rule = ExportConfig(to="/mnt/models/run1", every_steps=1000, keep_last=5, dtype="bf16", files="/mnt/base-model")
    with Checkpointer("/mnt/ckpts/run1", export=rule) as checkpoints:
        shown = checkpoints.status().export
        return None if shown is None else shown.last_s


def evaluate(model: torch.nn.Module) -> dict[str, float]:
    with open_checkpoint("/mnt/ckpts/run1", "global_step100", timeout_s=60.0) as checkpoint:
        opened: OpenCheckpoint = checkpoint
        loaded: Loaded = opened.load({"model": model}, only="model", strict=True, cast=True)
        opened.load({"model": model, "epoch": 0}, only=["model", "epoch"])
        assert loaded.step == opened.step
        bias: torch.Tensor = opened.tensor("model.bias", rank=0)
        seconds: float = (opened.committed_at or 0.0) + bias.numel() + opened.world_size
        tokens: object = opened.client_state["tokens"]
        assert tokens
        return {**opened.metrics, opened.tag: seconds}
