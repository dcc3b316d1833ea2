"""One rank of a small Llama or GPT-2 that FSDP2 shards: trains two steps, saves each, and rank 0 keeps the model as it was.

torchrun export_ranks.py ROOT FOLDER KIND [SIDECAR]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from checkpointd_client import Checkpointer

STEPS = 2


def config_of(kind: str) -> PretrainedConfig:
    """`llama` has a head of its own; `gpt2` ties it to the embedding."""
    if kind == "gpt2":
        return GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    return LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )


def put_beside(folder: str | Path, kind: str) -> None:
    """The configuration and a tokenizer, as a model directory has them."""
    config_of(kind).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def main(root: str, folder: Path, kind: str, sidecar: str | None = None) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(root, sidecar=sidecar) as checkpoints:
        for step in range(1, STEPS + 1):
            tokens = torch.randint(64, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, {"model": model, "optimizer": optimizer}).wait(60)
            kept = {name: whole(tensor) for name, tensor in model.state_dict().items()}
            if dist.get_rank() == 0:
                torch.save(kept, folder / f"step{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *sys.argv[4:])
