"""Checkpoints of DeepSpeed's made by hand, without DeepSpeed: small, and with everything known that is in them."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

GROUPS = ({"a.weight": (7, 3), "b.weight": (5,)}, {"a.bias": (3,), "scale": ()})
SHARED = {"tied.weight": "a.weight"}


@dataclass(frozen=True)
class Made:
    """What is in the files: weights, their states by key, what is frozen, buffers."""

    directory: Path
    weights: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def make(directory: Path, stage: int, ranks: int, dtype: torch.dtype = torch.float32, **client_state: Any) -> Made:
    """The files of a checkpoint that `ranks` ranks saved."""
    directory.mkdir(parents=True)
    random = torch.Generator().manual_seed(stage * 10 + ranks)
    shapes = {name: shape for group in GROUPS for name, shape in group.items()}
    weights = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    states = {
        name: {key: torch.rand(shape, generator=random) for key in ("exp_avg", "exp_avg_sq")} for name, shape in shapes.items()
    }
    frozen = {"frozen.weight": torch.randn(4, 3, generator=random).to(dtype)}
    buffers = {"seen": torch.tensor(3), "mean": torch.randn(2, generator=random).to(dtype)}
    made = Made(directory, weights, states, frozen, buffers)
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            model = _model(made, stage, ranks, rank, dtype) | client_state
            torch.save(model, directory / (f"{name}_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"))
        torch.save({"optimizer_state_dict": _optimizer(made, stage, ranks, rank)}, directory / f"{name}_optim_states.pt")
    (directory.parent / "latest").write_text(directory.name)
    return made


def _model(made: Made, stage: int, ranks: int, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    whole = {name: weight.to(dtype) for name, weight in made.weights.items()} | made.frozen
    module = {name: torch.empty(0, dtype=dtype) if stage == 3 else value for name, value in whole.items()}
    module |= {name: module[owner] for name, owner in SHARED.items()} | made.buffers
    frozen = {name: _part(value, ranks, rank) if stage == 3 else value for name, value in made.frozen.items()}
    return {
        "module": OrderedDict(module),
        "buffer_names": list(made.buffers),
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in GROUPS],
        "frozen_param_shapes": {name: value.shape for name, value in made.frozen.items()},
        "frozen_param_fragments": frozen,
        "shared_params": SHARED,
        "lr_scheduler": {"last_batch_iteration": 4},
        "global_steps": 5,
        "global_samples": 20,
        "skipped_steps": 1,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }


def _part(value: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """What a rank holds of a parameter at stage 3, padded."""
    size = -(-value.numel() // ranks)
    padded = torch.full((size * ranks,), 99.0, dtype=value.dtype)
    padded[: value.numel()] = value.reshape(-1)
    return padded[rank * size : (rank + 1) * size].clone()


def _optimizer(made: Made, stage: int, ranks: int, rank: int) -> dict[str, Any]:
    def flat(values: dict[str, torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
        if stage == 3:
            return torch.cat([_part(values[name], ranks, rank) for name in group])
        row = torch.cat([values[name].reshape(-1) for name in group])
        size = 2 * ranks * math.ceil(row.numel() / (2 * ranks)) // ranks
        row = torch.cat([row, torch.full((size * ranks - row.numel(),), 99.0)])
        return row[rank * size : (rank + 1) * size].clone()

    masters = [flat(made.weights, group) for group in GROUPS]
    keys = ("exp_avg", "exp_avg_sq")
    state = {
        number: {"step": torch.tensor(5.0)} | {key: flat({n: made.states[n][key] for n in group}, group) for key in keys}
        for number, group in enumerate(GROUPS)
    }
    base = {
        "state": state,
        "param_groups": [{"lr": 0.1 * (n + 1), "betas": (0.9, 0.99), "params": [n]} for n in range(len(GROUPS))],
    }
    common = {"zero_stage": stage, "dynamic_loss_scale": False, "overflow": False}
    if stage == 3:
        return common | {"partition_count": ranks, "fp32_flat_groups": masters, "optimizer_state_dict": base}
    paddings = [
        master.numel() * ranks - sum(math.prod(s) for s in group.values())
        for master, group in zip(masters, GROUPS, strict=True)
    ]
    lean = [m[: max(0, m.numel() - padding)] if rank == ranks - 1 else m for m, padding in zip(masters, paddings, strict=True)]
    return common | {
        "partition_count": [ranks] * len(GROUPS),
        "single_partition_of_fp32_groups": lean,
        "base_optimizer_state": base,
        "group_paddings": paddings,
    }
