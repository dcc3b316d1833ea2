"""Training that keeps a part of its state in host memory: each part is staged by the way that its own device asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from checkpointd_client import Checkpointer
from tests.accelerator.simulated.schedules import SCHEDULES, main_stream, under
from tests.accelerator.simulated.small_nets import Net

State = dict[str, Any]


class HostMasters:
    """As ZeRO-Offload does it: the optimizer's parameters are float32 masters in host memory. After a step they are copied to
    the bfloat16 weights on the device.
    """

    def __init__(self, value: float, device: torch.device) -> None:
        self.net = Net(value, device).to(torch.bfloat16)
        self.master = torch.nn.Parameter(self.net.weight.detach().cpu().float())
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW([self.master], lr=0.1)

    @property
    def state(self) -> State:
        return {"net": self.net, "master": self.master, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        self.change_buffer(number)
        self.master.grad = self.gradient(number).cpu().float()
        self.optimizer.step()
        with torch.no_grad():
            self.net.weight.copy_(self.master)

    def change_buffer(self, number: int) -> None:
        with torch.no_grad():
            self.net.seen.add_(number)

    def gradient(self, number: int) -> torch.Tensor:
        return torch.full_like(self.net.weight, number + 1.0)

    def moments(self) -> dict[str, torch.Tensor]:
        return dict(self.optimizer.state[self.master])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies in host memory of all that is trained."""
        found = {"weight": self.net.weight, "seen": self.net.seen, "master": self.master, **self.moments()}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


class HostAdam(torch.optim.Optimizer):
    """Its parameters are on a device. Their float32 masters and their moments are in host memory, where a step changes them."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().cpu().float()
                    state |= {name: torch.zeros_like(state["master"]) for name in ("exp_avg", "exp_avg_sq")}
                gradient = parameter.grad.cpu().float()
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                state["master"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-group["lr"])
                parameter.copy_(state["master"])

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)  # which gives state the device of its parameter
        for state in self.state.values():
            state.update({name: tensor.cpu() for name, tensor in state.items()})


class HostState(HostMasters):
    """As SuperOffload does it, with one optimizer that knows both memories."""

    def __init__(self, value: float, device: torch.device) -> None:
        super().__init__(value, device)
        self.optimizer = HostAdam([self.net.weight])

    @property
    def state(self) -> State:
        return {"net": self.net, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        self.change_buffer(number)
        self.net.weight.grad = self.gradient(number)
        self.optimizer.step()

    def moments(self) -> dict[str, torch.Tensor]:
        return dict(self.optimizer.state[self.net.weight])


def differing(job: HostMasters, expected: dict[str, torch.Tensor]) -> list[str]:
    found = job.tensors()
    assert found.keys() == expected.keys()
    return [name for name in found if not found[name].equal(expected[name])]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fresh", [True, False], ids=["new optimizer", "optimizer with moments"])
@pytest.mark.parametrize("kind", [HostMasters, HostState])
def test_an_optimizer_in_host_memory(
    sim: ModuleType, tmp_path: Path, device: torch.device, kind: type[HostMasters], schedule: str, fresh: bool
) -> None:
    main = main_stream(device)
    reference = kind(1.0, torch.device("cpu"))
    expected = []
    for number in range(3):
        reference.step(number)
        expected.append(reference.tensors())
    job = kind(1.0, device)
    before = sim.counts()
    with Checkpointer(tmp_path) as ckpt:
        with sim.races() as races, under(sim, schedule, main, patience_ms=100):
            handles = []
            for number in range(3):
                job.step(number)
                handles.append(ckpt.save(number, job.state))
            with torch.no_grad():
                job.net.seen.zero_()
        for handle in handles:
            handle.wait()
        assert races == []
        assert sim.counts().since(before).unpinned == 0
        for number in range(3):
            target = kind(-1.0, device)
            if not fresh:
                target.step(0)
            ckpt.load(target.state, f"global_step{number}")
            assert differing(target, expected[number]) == []
            assert {tensor.device.type for tensor in target.moments().values()} == {"cpu"}


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(sim: ModuleType) -> Iterator[None]:
    sim.spare_freed_memory()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def offloaded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose shards and optimizer are in pinned host memory; the device has a layer while it computes it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to("sim")
    mesh = init_device_mesh("sim", (1,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    model(x.to("sim")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors: list[Any] = [*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("seed", range(4))
def test_fsdp2_with_offload(sim: ModuleType, tmp_path: Path, seed: int) -> None:
    """Its shards are in host memory, and its mesh is one of devices: no copy is queued for the shards, and a load leaves them
    where they are.
    """
    model, optimizer = offloaded(1)
    expected = []
    with Checkpointer(tmp_path) as ckpt:
        with sim.races() as races, sim.chaos(seed):
            handles = []
            for number in range(3):
                step(model, optimizer, number)
                expected.append(shards(model, optimizer))
                before = sim.counts()
                handles.append(ckpt.save(number, {"model": model, "optimizer": optimizer}))
                assert sim.counts().since(before).launches == 0
        for handle in handles:
            handle.wait()
        assert races == []
        for number in range(3):
            into = offloaded(2)
            ckpt.load({"model": into[0], "optimizer": into[1]}, f"global_step{number}")
            found = shards(*into)
            assert {tensor.device.type for tensor in found} == {"cpu"}
            assert all(map(torch.equal, found, expected[number]))
            assert all(parameter._local_tensor.is_pinned() for parameter in into[0].parameters())
