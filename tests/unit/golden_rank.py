"""One of the two ranks that load a golden root: `python golden_rank.py ROOT RANK OUT` writes what it found as JSON, by tag."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from checkpointd.errors import NotFoundError
from checkpointd_client import Checkpointer
from tests.golden.describe import Described, describe
from tests.unit.client import composite_tensors


def load(ckpt: Checkpointer, tag: str | None) -> dict[str, Described]:
    state: dict[str, object] = {}
    loaded = ckpt.load(state, tag)
    assert loaded is not None
    return {"tag": loaded.tag, "state": describe(state), "client_state": describe(loaded.client_state)}


def main(root: Path, rank: int, out: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}.meeting", rank=rank, world_size=2)
    with Checkpointer(root, tensor_classes=composite_tensors.OWN) as ckpt:
        found = own_part(ckpt, rank) if root.name == "own-parts" else all_tags(ckpt)
    torch.distributed.destroy_process_group()
    out.write_text(json.dumps(found))


def all_tags(ckpt: Checkpointer) -> dict[str, object]:
    found: dict[str, object] = {str(tag): load(ckpt, tag) for tag in (None, "best")}
    try:
        ckpt.load({}, "global_step2")
    except NotFoundError as error:
        found["global_step2"] = str(error)
    return found


def own_part(ckpt: Checkpointer, rank: int) -> dict[str, object]:
    state: dict[str, object] = {"weight": composite_tensors.per_row(rank, at=1.0)}
    ckpt.load(state)
    return {"state": describe(state)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
