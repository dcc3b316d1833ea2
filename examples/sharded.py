"""Train a small model on several ranks under DDP or FSDP2, and go on with any number of ranks under either.

    torchrun --standalone --nproc-per-node=2 examples/sharded.py --root runs/sharded --parallel fsdp2
    torchrun --standalone --nproc-per-node=1 examples/sharded.py --root runs/sharded --parallel ddp --steps 40

Each rank takes an accelerator of its own, or the CPU with `--device cpu`. If torchrun restarts your workers, set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpointd_client import Checkpointer

BATCH = 24  # of all ranks together


def parallelize(model: nn.Sequential, kind: str) -> nn.Module:
    """The model as it is trained, and as it is saved: the wrapper says what is sharded and what is replicated."""
    if kind == "ddp":
        return DistributedDataParallel(model)  # save this object, not its .module
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step. The whole batch does not depend on the number of ranks."""
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
    y = x.sum(1, keepdim=True) / 4
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the checkpoints, which every rank sees")
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="fsdp2")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=found, help="default here: %(default)s")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    args = parser.parse_args()

    if args.device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(args.device))  # nccl for cuda, gloo for cpu
    torch.manual_seed(0)  # the same weights on every rank
    model = parallelize(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(args.device), args.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}

    # Every rank makes a Checkpointer, and calls load() and save(). Each writes its part, and nothing is gathered.
    with Checkpointer(args.root, retention=3) as ckpt:
        loaded = ckpt.load(state)
        start = loaded.step + 1 if loaded else 0
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, {args.parallel}: starting at step {start}", flush=True)
        for step in range(start, args.steps):
            inputs, targets = (part.to(args.device) for part in batch_of(step))
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = mean_over_ranks(loss)
            if (step + 1) % args.save_every == 0:
                ckpt.save(step, state, metrics={"loss": mean})  # returns at once
                if dist.get_rank() == 0:
                    print(f"step {step:4d}  loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
