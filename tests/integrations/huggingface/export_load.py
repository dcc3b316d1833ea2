"""Loads an export as a user of transformers does, and compares it with the model that was trained.

export_load.py EXPORT TRAINED.pt [DTYPE]
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(export: str, trained: str, dtype: str = "float32") -> None:
    wanted = torch.load(trained, weights_only=True)
    model, told = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True, local_files_only=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    found = model.state_dict()
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == getattr(torch, dtype), (name, found[name].dtype)
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    assert AutoTokenizer.from_pretrained(export, local_files_only=True)("a b")["input_ids"][:2] == [1, 2]
    print(f"{len(wanted)} tensors are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
