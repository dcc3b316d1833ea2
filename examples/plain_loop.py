"""Train a small model in one process, saving in the background, and go on from the newest checkpoint.

    python examples/plain_loop.py --root runs/plain --steps 30

Stop it at any moment (Ctrl-C, kill -9) and start it again: it goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from checkpointd_client import Checkpointer, RngState


class Batches:
    """An endless loader that knows where it is: `state_dict` and `load_state_dict` are all that checkpointd asks of one.

    torchdata's StatefulDataLoader has both; torch's own DataLoader has neither.
    """

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size, self.position = x, y, size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.arange(self.position, self.position + self.size) % len(self.x)
            self.position += self.size
            yield self.x[chosen], self.y[chosen]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the checkpoints; made if missing")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=found, help="default here: %(default)s")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(1000, 16)
    loader = Batches(x, x.sum(1, keepdim=True) / 4, size=32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    # Everything that the next step depends on. Pass the objects themselves, not their state_dicts.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "rng": RngState()}

    with Checkpointer(args.root, retention=3) as ckpt:  # leaving the `with` waits for saves in flight
        loaded = ckpt.load(state)  # fills the objects in place; None where there is no checkpoint
        start = loaded.step + 1 if loaded else 0
        print(f"starting at step {start}")
        batches = iter(loader)
        for step in range(start, args.steps):
            inputs, targets = (part.to(args.device) for part in next(batches))
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (step + 1) % args.save_every == 0:
                ckpt.save(step, state, metrics={"loss": loss.item()})  # returns at once
                print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
