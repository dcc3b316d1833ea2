"""Trains a small GPT-2 with tied weights under torch.compile's wrapper, saves it, exports it, and loads it with transformers.

export_alone.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from checkpointd_client import Checkpointer, consolidate
from tests.integrations.huggingface import export_load
from tests.integrations.huggingface.export_ranks import config_of, put_beside


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("gpt2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = torch.compile(model)  # not called: compiling takes longer than all the rest, and the names are the same
    with Checkpointer(folder / "root") as checkpoints:
        tokens = torch.randint(64, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        # As a dict, its names are those of the wrapper.
        checkpoints.save(1, {"model": wrapped.state_dict(), "optimizer": optimizer}).wait(60)
    torch.save(model.state_dict(), folder / "trained.pt")
    (folder / "files").mkdir()
    put_beside(folder / "files", "gpt2")
    done = consolidate(
        folder / "root",
        folder / "model",
        only="model",
        max_shard_size="20KB",
        plain_names=True,
        files=folder / "files",
    )
    assert done.tied == {"lm_head.weight": "transformer.wte.weight"}, done.tied
    export_load.main(str(folder / "model"), str(folder / "trained.pt"))
    print("the model is the same")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
