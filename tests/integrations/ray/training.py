"""A run of Ray Train on two workers of this machine, for test_training.py: a small model, and one worker that is killed.

The arguments are JSON: `storage`, `name`, `steps`, `workers`, `kill_at` (the step before which rank 1 is killed, once), `keep`
(num_to_keep), `scores` (the score of each step, by which checkpoints are kept), `refused_at` (the step whose report Ray's
storage does not take, once), `sharded` (FSDP2 in place of DDP) and `root`. It prints one JSON line of what came out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def train_function(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from ray import train
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from checkpointd_client.integrations.ray import RayCheckpointer

    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(8, 8)
    model = (
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if config["sharded"]
        else DistributedDataParallel(model)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with RayCheckpointer(config["root"], staging="eager") as ckpt:
        loaded = ckpt.load(state)
        first = loaded.step + 1 if loaded else 1
        for step in range(first, config["steps"] + 1):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(4, 8, generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mark = Path(config["storage"], "killed")
            if step == config["kill_at"] and dist.get_rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            metrics = {"loss": loss.item(), "first": first, "step": step, "score": config["scores"].get(str(step), 0)}
            refused = Path(config["storage"], config["name"], "refused")
            is_refused = step == config["refused_at"] and not refused.exists()
            dist.barrier()
            if is_refused:
                refused.touch()  # a file is where the directory of the report is to be
            ckpt.report(metrics, step, state, checkpoint_dir_name="refused" if is_refused else None)
            if is_refused:
                threading.Event().wait()  # Ray ends this worker
        ckpt.report(metrics)
    whole = get_model_state_dict(getattr(model, "module", model), options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(whole, Path(config["storage"], "end.pt"))
    assert train.get_context().get_world_size() == config["workers"]


def main() -> None:
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer

    from checkpointd_client.integrations.ray import open_reported

    defaults = {"workers": 2, "kill_at": None, "keep": None, "scores": {}, "refused_at": None, "sharded": False, "root": None}
    config = {**defaults, **json.loads(sys.argv[1])}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    result = TorchTrainer(
        train_function,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": 1}),
        run_config=train.RunConfig(
            name=config["name"],
            storage_path=config["storage"],
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=config["keep"], checkpoint_score_attribute="score" if config["scores"] else None
            ),
            failure_config=train.FailureConfig(max_failures=1),
        ),
    ).fit()
    reported = []
    for checkpoint, metrics in result.best_checkpoints:
        with open_reported(checkpoint) as found:
            reported.append({"step": found.step, "metrics": metrics})
    with open_reported(result.checkpoint) as found:
        newest = found.step
    print("RESULT " + json.dumps({"reported": reported, "newest": newest, "error": str(result.error or "")}))
    ray.shutdown()


if __name__ == "__main__":
    main()
