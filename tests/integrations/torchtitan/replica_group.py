"""One replica group of a run with torchft, as a process of its own: torchft's own Manager, torchtitan's containers, and a small
model. It trains until the two groups have been together for some steps. Run by test_replica_groups.py.

Usage: replica_group.py JSON, where the JSON has the keys of `Given`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.torchtitan import titan_on_cpu  # isort: skip  # before torchtitan

titan_on_cpu.prepare()

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.experiments.torchft.manager import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from checkpointd_client.integrations.torchtitan import TorchFTCheckpointdManager
from tests.integrations.torchtitan.titan_job import Job


@dataclass
class Given:
    """`number`: of the group. `together`: leave after so many steps of both groups. `dies`: by SIGKILL, in place of leaving.
    `result`: the weights and the step that it ended with.
    """

    dump: str
    result: str
    number: int
    together: int = 3
    dies: bool = False


def main(given: Given) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ft = TorchFTManager.Config(enable=True, replica_id=given.number, group_size=1).build()
    job = Job(seed=given.number)
    groups = default_adamw(lr=0.1).param_groups
    job.optimizers = TorchFTOptimizersContainer.Config(param_groups=groups, implementation="foreach").build(
        model_parts=job.parts, ft_manager=ft
    )
    # The rate is constant: a group that torchft heals takes one step with the rate of the other group's start.
    constant = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    job.schedulers = constant.build(optimizers=job.optimizers, training_steps=1000)
    manager = job.manager(Path(given.dump), TorchFTCheckpointdManager, parts={"ft_manager": ft})
    manager.load()
    together = 0
    while together < given.together:
        step(job, ft)
        manager.maybe_wait_for_staging()
        job.optimizers.step()
        job.schedulers.step()
        manager.save(job.step)
        manager.maybe_wait_for_saving()  # else a save is skipped where two are in flight
        together += ft.manager.num_participants() == 2
    if given.dies:
        os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    weights = {name: value for part in job.parts for name, value in part.state_dict().items()}
    torch.save({"weights": weights, "step": job.step, "data": job.loader.position}, given.result)
    ft.manager.shutdown()
    dist.destroy_process_group()


def step(job: Job, ft: TorchFTManager) -> None:
    """Everything before the optimizer's step."""
    job.step += 1
    job.optimizers.zero_grad()
    batch = torch.full((2, 8), float(job.loader.next()))
    job.parts[1]["head"](job.parts[0](batch)).square().mean().backward()
    for part in job.parts:
        for parameter in part.parameters():
            ft.manager.allreduce(parameter.grad).wait()


if __name__ == "__main__":
    main(Given(**json.loads(sys.argv[1])))
