"""Fine-tune a small language model with DeepSpeed ZeRO, saving in the background, and resume on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/demo/deepspeed_finetune.py --output_dir runs/ds --save_checkpoint
    torchrun --standalone --nproc-per-node 3 examples/demo/deepspeed_finetune.py --output_dir runs/ds --save_checkpoint --resume

It runs on GPUs or CPUs as it is. The lines that matter are marked with (1) to (4). With `--layout deepspeed` the checkpoints
are DeepSpeed's own files, which resume on the same number of ranks. `--offload superoffload` and `--offload zenflow` step the
optimizer on the host, in a process of its own, and need an NVIDIA GPU. `--tokenizer NAME` takes one of transformers' instead of
the small one that is made on the spot, and `--wandb` logs to Weights & Biases.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
import deepspeed.comm.comm
import torch.distributed as dist
import torch.nn.functional as F

from checkpointd_client.integrations.deepspeed import attach
from corpus import standard_library
from gpt import GPT
from words import WordTokenizer

log = logging.getLogger("finetune")

if os.environ["DS_ACCELERATOR"] == "cpu":
    # Else DeepSpeed compiles an operator for a minute, to do what gloo does as well.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def train(args: argparse.Namespace) -> None:
    check_offload(args.offload)
    deepspeed.init_distributed(dist_backend="gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else None)
    world = dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} cannot be divided among {world} ranks: choose a multiple of {world}")
    text = bytes(standard_library()[: args.text_bytes].numpy()).decode(errors="replace")
    tokenizer = make_tokenizer(args, text)
    tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64)

    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(layers=args.layers, width=args.width, length=args.length, dropout=0.0, vocabulary=len(tokenizer))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings(args, world))
    attach(engine)  # (1) from here on engine.save_checkpoint returns at once; settings: checkpoint.checkpointd in the JSON

    checkpoints = args.output_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    start = resume(engine, checkpoints) if args.resume else 0
    run = start_wandb(args) if args.wandb and dist.get_rank() == 0 else None

    for step in range(start, args.steps):
        loss = forward(engine, batch_of(tokens, step, args))
        engine.backward(loss)
        engine.step()
        report(step, loss, run)
        if args.save_checkpoint and (step + 1) % args.save_every == 0:
            save(engine, tokenizer, args.output_dir, step + 1)

    finish(engine, run)


# --- saving -----------------------------------------------------------------------------------------------------


def save(engine: Any, tokenizer: Any, output_dir: Path, steps: int) -> None:
    """Checkpoint and tokenizer, side by side. An error is logged, and training goes on."""
    try:
        # (2) On ALL ranks. Under `if rank == 0:` the barriers inside would wait for ever for ranks that never come; and if
        # they did not, the shards of the optimizer that the other ranks hold would be missing from the checkpoint.
        engine.save_checkpoint(str(output_dir / "checkpoints"), client_state={"steps": steps})
        if dist.get_rank() == 0:  # it is the same on every rank, and no other rank waits for it
            tokenizer.save_pretrained(output_dir / "tokenizer")
    except Exception:
        log.exception("the save after %d steps failed; training goes on", steps)


def resume(engine: Any, checkpoints: Path) -> int:
    """How many steps have been done. It loads on every rank, whatever their number was."""
    path, client_state = engine.load_checkpoint(str(checkpoints))  # (3)
    if path is None:
        say(f"no checkpoint in {checkpoints}: starting at step 0")
        return 0
    say(f"resumed from {path}")
    return int(client_state["steps"])


def finish(engine: Any, run: Any) -> None:
    """Wait for the last save, then say goodbye: a run that is called finished has its checkpoint."""
    handle = engine.checkpoint_handle()  # (4) that of the last save; None where there was none
    if handle is not None:
        try:
            handle.wait()
            times = handle.timings
            say(f"{handle.tag} committed after {times.committed_s:.2f} s; save_checkpoint took {times.call_s:.3f} s of them")
        except Exception:
            log.exception("the last save failed")
    if run is not None:
        run.finish()
    engine.destroy()


# --- training ---------------------------------------------------------------------------------------------------


OFFLOAD: dict[str, dict[str, Any]] = {
    "none": {},
    "superoffload": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
    "zenflow": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": True,
        "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2, "overlap_step": True}
        | {"full_warm_up_rounds": 2},
    },
}
"""What the ways to offload add to `zero_optimization`."""


def check_offload(offload: str) -> None:
    if offload != "none" and os.environ["DS_ACCELERATOR"] != "cuda":
        raise SystemExit(f"--offload {offload} needs an NVIDIA GPU: DeepSpeed takes no other device for it")


def settings(args: argparse.Namespace, world: int) -> dict[str, Any]:
    """What would be in ds_config.json."""
    on_host = args.offload != "none"
    return {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": args.batch // world,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": not on_host}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": args.lr}},
        "bf16": {"enabled": args.bf16 or on_host},
        "zero_optimization": {"stage": args.zero_stage, **OFFLOAD[args.offload]},
        "checkpoint": {"checkpointd": {"layout": args.layout}},
    }


def batch_of(tokens: torch.Tensor, step: int, args: argparse.Namespace) -> torch.Tensor:
    """This rank's part of the batch of a step: `[batch / ranks, length + 1]`. The batch does not depend on their number."""
    generator = torch.Generator().manual_seed(args.seed + step)
    starts = torch.randint(len(tokens) - args.length - 1, (args.batch,), generator=generator)
    own = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return tokens[own[:, None] + torch.arange(args.length + 1)]


def forward(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.to(engine.device)
    logits = engine(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def report(step: int, loss: torch.Tensor, run: Any) -> None:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    say(f"step {step:4d}  loss {mean.item():.4f}")
    if run is not None:
        run.log({"loss": mean.item()}, step=step)


def make_tokenizer(args: argparse.Namespace, text: str) -> Any:
    """Anything with `encode`, `len` and `save_pretrained`."""
    if args.tokenizer is None:
        return WordTokenizer.train(text.encode(), vocabulary=args.vocabulary)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(args.tokenizer)


def start_wandb(args: argparse.Namespace) -> Any:
    import wandb

    return wandb.init(project=args.wandb_project, config={key: str(value) for key, value in vars(args).items()})


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of checkpoints and tokenizer; made if missing")
    parser.add_argument("--save_checkpoint", action="store_true", help="save while training")
    parser.add_argument("--save_every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in the output folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layout", choices=["checkpointd", "deepspeed"], default="checkpointd")
    parser.add_argument("--zero_stage", type=int, choices=[0, 1, 2, 3], default=2)
    parser.add_argument("--offload", choices=list(OFFLOAD), default="none", help="sets the stage, and trains in bf16")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--batch", type=int, default=12, help="windows per step, of all ranks together")
    parser.add_argument("--length", type=int, default=32, help="tokens of one window")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens of the tokenizer that is made")
    parser.add_argument("--text_bytes", type=int, default=1_000_000, help="so much of the standard library is trained on")
    parser.add_argument("--tokenizer", help="one of transformers', by name or path")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases")
    parser.add_argument("--wandb_project", default="checkpointd-finetune")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    train(parse_args())
