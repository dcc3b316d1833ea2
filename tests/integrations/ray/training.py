"""A run of Ray Train on two workers of this machine, for test_training.py: a small model, and one worker that is killed.

The arguments are JSON: `storage`, `name`, `steps`, `kill_at` (the step before which rank 1 is killed, once), `keep`
(num_to_keep) and `root`. It prints one JSON line of what came out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def train_function(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from ray import train
    from torch.nn.parallel import DistributedDataParallel

    from checkpointd_client.integrations.ray import RayCheckpointer

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with RayCheckpointer(config["root"], staging="eager") as ckpt:
        loaded = ckpt.load(state)
        first = loaded.step + 1 if loaded else 1
        for step in range(first, config["steps"] + 1):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mark = Path(config["storage"], "killed")
            if step == config["kill_at"] and dist.get_rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.report({"loss": loss.item(), "first": first, "step": step}, step, state)
        ckpt.report({"loss": loss.item(), "first": first, "step": step})
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), Path(config["storage"], "end.pt"))
    assert train.get_context().get_world_size() == 2


def main() -> None:
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer

    from checkpointd_client.integrations.ray import open_reported

    config = {"kill_at": None, "keep": None, "root": None, **json.loads(sys.argv[1])}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    result = TorchTrainer(
        train_function,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=train.RunConfig(
            name=config["name"],
            storage_path=config["storage"],
            checkpoint_config=train.CheckpointConfig(num_to_keep=config["keep"]),
            failure_config=train.FailureConfig(max_failures=1),
        ),
    ).fit()
    reported = []
    for checkpoint, metrics in result.best_checkpoints:
        with open_reported(checkpoint) as found:
            reported.append({"step": found.step, "metrics": metrics})
    print("RESULT " + json.dumps({"reported": reported, "error": str(result.error or "")}))
    ray.shutdown()


if __name__ == "__main__":
    main()
