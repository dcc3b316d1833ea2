"""Train a small GPT on two or more ranks, saving in the background and resuming from the newest checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a restarted rank may read a dead one's address: PyTorch issue 135712
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/demo/train_gpt.py --root runs/gpt --parallel fsdp2

Kill it, or any of its processes, at any moment and start it again: it goes on as if nothing had happened. Start it on another
number of ranks, or with another `--parallel`: it goes on from the same checkpoint. Each rank takes an accelerator of its own,
if torch offers any, or the CPU with `--device cpu`. The four lines that matter are marked
with (1) to (4).
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from checkpointd_client import Checkpointer, RngState
from corpus import Batches, standard_library
from gpt import GPT
from parallel import KINDS, clip_gradients, parallelize
from runlog import RunLog


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()

    seed_generators(args.seed)  # the same weights on every rank ...
    gpt = GPT(layers=args.layers, width=args.width, length=args.length, dropout=args.dropout).to(args.device)
    parallel = parallelize(gpt, args.parallel)
    seed_generators(args.seed + 1 + parallel.part)  # ... and dropout of its own for each part of a batch
    model = parallel.model
    optimizer = AdamW(model.parameters(), lr=args.lr)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps + 1)
    text, part, parts = standard_library(), parallel.part, parallel.parts
    batches = Batches(text, batch=args.batch, length=args.length, part=part, parts=parts, seed=args.seed)

    # (1) All that the next step depends on. `rng` differs from rank to rank, and is kept per rank. The model goes in as it is
    # trained, wrapped: so it is seen that the ranks hold it together, and each writes its part.
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": batches,
        "rng": RngState(),
    }
    options = {"sidecar": args.sidecar} if args.sidecar else {}  # with one, it persists, and outlives this process
    with Checkpointer(args.root, compression=args.compression, **options) as ckpt:  # (2) leaving waits for what is in flight
        began = time.perf_counter()
        loaded = ckpt.load(state)  # (3) in place; None where there is no checkpoint yet
        start = loaded.step + 1 if loaded else 0
        if rank == 0:
            load_s = time.perf_counter() - began
            resumed = f"resumed from {loaded.tag} ({loaded.source}) in {load_s:.2f} s at step {start}" if loaded else ""
            print(resumed or "starting at step 0", flush=True)

        log = RunLog(args.out, rank=rank, start=start, requests=lambda: ckpt.status().requests)
        for step in range(start, min(args.steps, args.until)):
            inputs, targets = (part.to(args.device) for part in next(batches))
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            clip_gradients(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = mean_over_ranks(loss)
            log.step(step, mean)

            if (step + 1) % args.save_every == 0:
                handle = ckpt.save(step, state, client_state={"seed": args.seed})  # (4) returns at once
                log.saving(step, handle)
            if rank == 0 and (step + 1) % args.print_every == 0:
                print(f"step {step:4d}  loss {mean:.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    log.finish(state)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The loss of the whole batch; where all ranks compute all of it, theirs."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the checkpoints, or the URL of a bucket")
    parser.add_argument("--out", type=Path, help="folder of losses, timings and digests (default: ROOT-log)")
    parser.add_argument("--parallel", choices=KINDS, default="ddp")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=found, help="default here: %(default)s")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--until", type=int, default=1 << 30, help="leave before this step, as where time is up")
    parser.add_argument("--sidecar", type=Path, help="socket of `checkpointd serve`")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--print-every", type=int, default=10, help="steps")
    parser.add_argument("--compression", choices=["auto", "none", "zstd", "planes"], default="auto")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--length", type=int, default=128, help="bytes of one window")
    parser.add_argument("--batch", type=int, default=6, help="windows per step, shared by the ranks")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    if args.out is None and "://" in args.root:
        parser.error("name a folder for losses, timings and digests with --out")
    args.out = args.out or Path(args.root.rstrip("/") + "-log")
    return args


if __name__ == "__main__":
    arguments = parse_args()
    if arguments.device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(arguments.device))
    train(arguments)
    dist.destroy_process_group()
