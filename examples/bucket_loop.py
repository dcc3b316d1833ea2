"""Train a small model with its checkpoints in a bucket. A sidecar makes each save durable on this node, and uploads it.

    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...      # or ~/.aws, or a role
    python examples/bucket_loop.py --root s3://my-bucket/run1 --spool /nvme/spool

With a server of your own, the URL names it: s3://my-bucket/run1?endpoint=http://127.0.0.1:8333. Kill the loop, the sidecar or
both, or unplug the network, and start the loop again: training goes on from the newest state that is anywhere.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn

from checkpointd_client import Checkpointer, RngState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", default=os.environ.get("CHECKPOINTD_ROOT"), help="URL of the root (default: CHECKPOINTD_ROOT)"
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--spool", help="directory on this node's own disk, for the spool of the sidecar that this starts")
    place.add_argument("--sidecar", help="socket of `checkpointd serve --spool DIR`, if you start one yourself")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    args = parser.parse_args()
    if args.root is None:
        parser.error("give --root, or set CHECKPOINTD_ROOT")

    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    targets = inputs.sum(1, keepdim=True) / 4
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": RngState()}

    # The last save before a preemption has 60 s. With a spool, it needs the bucket for none of them.
    signals = {signal.SIGTERM: 60}
    with Checkpointer(args.root, sidecar=args.sidecar, spool=args.spool, retention=3, preempt_signals=signals) as ckpt:
        loaded = ckpt.load(state)  # from the sidecar's memory, from the spool, or from the bucket
        start = loaded.step + 1 if loaded else 0
        print(f"starting at step {start}" + (f", from the {loaded.source}" if loaded else ""), flush=True)
        for step in range(start, args.steps):
            chosen = torch.randint(len(inputs), (32,))
            loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            leaving = ckpt.preempted(step)
            if leaving or (step + 1) % args.save_every == 0:
                handle = ckpt.save(step, state, metrics={"loss": loss.item()})  # returns at once
                handle.wait("spooled")  # only to show it: durable on this node, perhaps not yet in the bucket
                print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
            if leaving:
                break


if __name__ == "__main__":
    main()
