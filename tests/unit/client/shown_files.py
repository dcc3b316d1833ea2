"""A small checkpoint of files: saves it, removes it, and names the directory that shows it."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import torch

from checkpointd.cli import run
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of

Files = dict[str, Any]


ABSENCE_S = 0.1
"""Here a name that is not listed is not there: no file server lags behind."""


def example() -> Files:
    flat = torch.arange(5000.0, dtype=torch.bfloat16)
    return {
        "mp_rank_00_model_states.pt": {
            "module": collections.OrderedDict(weight=flat[:513].view(27, 19), bias=flat[600:700]),
            "empty": torch.empty(0),
            "shapes": [torch.Size([27, 19]), torch.Size([])],
            "lr": 0.1,
        },
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {
            "optimizer_state_dict": {"fp32": torch.randn(3_000_000), "step": torch.tensor(7.0), "flags": torch.tensor([True])},
            "ds_version": "0.19.8",
        },
    }


def save(ckpt: Checkpointer, files: Files, tag: str = "global_step7", **options: Any) -> Path:
    (beside(ckpt) / options.get("at", tag)).parent.mkdir(exist_ok=True)
    core_of(ckpt).save_files(7, files, tag=tag, **options).wait(60)
    return Path(ckpt.status().root).parent / tag


def beside(ckpt: Checkpointer) -> Path:
    return Path(ckpt.status().root).parent


def delete(ckpt: Checkpointer, tag: str) -> None:
    assert run(["delete", ckpt.status().root, tag, "--force", "--yes"]) == 0
