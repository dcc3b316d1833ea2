"""What the layouts do not reach: each function is one case of `device_ranks.py`, run by both its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from checkpointd_client import Checkpointer, RngState
from checkpointd_client.integrations.dcp import CheckpointdReader, CheckpointdWriter
from tests.e2e.sharded_models import build

if TYPE_CHECKING:
    from tests.accelerator.ranks.device_ranks import Process

State = dict[str, Any]
ROWS = 6


def expect(process: Process, name: str, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Note which tensors are not bit for bit what they must be."""
    wrong = [i for i, (one, two) in enumerate(zip(found, wanted, strict=True)) if not one.cpu().equal(two.cpu())]
    if wrong:
        process.wrong.append(f"{name}: {wrong} of {len(wanted)} tensors differ")


def a_group_without_host_memory(process: Process) -> None:
    """The ranks agree on saves and loads although no collective of their group takes tensors in host memory."""
    with process.job("no host memory"), Checkpointer(process.folder / "no host memory") as ckpt:
        try:
            dist.all_reduce(torch.ones(1))
            process.wrong.append("the group took a tensor in host memory")
        except RuntimeError as error:
            if "No backend type associated with device type cpu" not in str(error):
                raise
        saved = {"own": torch.full((3,), float(process.number), device=process.device), "rng": RngState(), "step": 1}
        ckpt.save(1, saved).wait()
        drawn = torch.rand(3, device=process.device)
        found = {"own": torch.zeros(3, device=process.device), "rng": RngState(), "step": 0}
        ckpt.load(found)
        expect(process, "own", [found["own"], torch.rand(3, device=process.device)], [saved["own"], drawn])


def dcp_on_devices(process: Process) -> None:
    """torch.distributed.checkpoint plans with objects that it sends over the group."""
    root = str(process.folder / "dcp")
    with process.job("dcp"):
        job, fresh = (build("fsdp2", torch.float32, seed, process.device) for seed in (5, 6))
        job.step(0)
        dcp.save({"model": job.model.state_dict()}, storage_writer=CheckpointdWriter(root, tag="one"))
        state = {"model": fresh.model.state_dict()}
        dcp.load(state, storage_reader=CheckpointdReader(root))
        fresh.model.load_state_dict(state["model"])
        parameters = [[p._local_tensor for p in one.model.parameters()] for one in (fresh, job)]
        expect(process, "dcp", *parameters)


# --- two devices in each process -------------------------------------------------------------------------------------


def parts_on_two_devices(process: Process) -> None:
    """Each rank holds a part of one tensor on its first device, and a part of another on its second. Their addresses may be the
    same.
    """
    whole = {f"on {i}": torch.arange(2.0 * ROWS * 3).view(2 * ROWS, 3) + 100 * i for i in range(2)}
    root = process.folder / "two devices"
    with process.job("two devices"), Checkpointer(root) as ckpt:
        state = _sharded(whole)
        with process.in_any_order(7):
            handle = ckpt.save(0, state)
            for tensor in state.values():
                tensor.mul_(-1)
        handle.wait()
        fresh = _sharded({name: torch.zeros_like(full) for name, full in whole.items()})
        ckpt.load(fresh)
        expect(process, "two devices", _locals(fresh), _locals(_sharded(whole)))
    with process.job("two devices, one rank", 1) as mine:
        if mine:
            found = {name: torch.zeros_like(full, device=f"sim:{1 - i}") for i, (name, full) in enumerate(whole.items())}
            with Checkpointer(root) as ckpt:
                ckpt.load(found)
            expect(process, "two devices on one rank", list(found.values()), list(whole.values()))


def _sharded(whole: dict[str, torch.Tensor]) -> dict[str, DTensor]:
    made = {}
    for index, (name, full) in enumerate(whole.items()):
        local = full.chunk(2)[dist.get_rank()].to(f"sim:{index}")
        made[name] = DTensor.from_local(local, DeviceMesh("sim", [0, 1]), [Shard(0)])
    return made


def _locals(tensors: dict[str, DTensor]) -> list[torch.Tensor]:
    return [tensor._local_tensor for tensor in tensors.values()]


class TwoStages(nn.Module):
    """A model that lies on two devices, as a pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8).to("sim:0"), nn.Linear(8, 2).to("sim:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.to("sim:0"))).to("sim:1"))  # type: ignore[no-any-return]


def a_model_on_two_devices(process: Process) -> None:
    """DDP of a model with a stage on each device."""
    with process.job("two stages"), Checkpointer(process.folder / "two stages") as ckpt:
        trained, expected = _two_stages(process, 1), _two_stages(process, 1)
        with process.in_any_order(8):
            for step in range(3):
                _step(trained, step)
                handle = ckpt.save(step, {"model": trained[0], "optimizer": trained[1]})
        handle.wait()
        for step in range(2):
            _step(expected, step)
        fresh = _two_stages(process, 2)
        ckpt.load({"model": fresh[0], "optimizer": fresh[1]}, "global_step1")
        expect(process, "two stages", _all_of(fresh), _all_of(expected))


Stages = tuple[DistributedDataParallel, torch.optim.Optimizer]


def _two_stages(process: Process, seed: int) -> Stages:
    torch.manual_seed(seed)
    model = DistributedDataParallel(TwoStages())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(stages: Stages, step: int) -> None:
    model, optimizer = stages
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _all_of(stages: Stages) -> list[torch.Tensor]:
    model, optimizer = stages
    state = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [*(parameter.detach() for parameter in model.parameters()), *state]


CASES = (a_group_without_host_memory, dcp_on_devices, parts_on_two_devices, a_model_on_two_devices)
