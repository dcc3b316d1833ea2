"""One small model in every parallel layout, its optimizers, and its state in every form in which people pass it to a save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.e2e.sharded_models import _put as put

FORMS = ("module", "state_dict", "get_state_dict", "flat")
LAYOUTS = ("ddp", "fsdp2", "tp", "dp_tp", "hsdp")
OPTIMIZERS = ("adamw", "muon", "factored")
VOCABULARY, WIDTH, INNER = 13, 5, 21


class Net(nn.Module):
    """An embedding, two tensor-parallel layers, and a norm that tensor parallelism leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.norm(hidden + self.down(torch.relu(self.up(hidden)))).square().mean()


class Factored(torch.optim.Optimizer):
    """Second moments of a matrix as a factor for each row and one for each column, as Adafactor has them."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"])

    def _update(self, p: torch.Tensor, lr: float) -> None:
        assert p.grad is not None
        state, squares = self.state[p], p.grad.square() + 1e-12
        dims = {"rows": 1, "columns": 0} if p.dim() == 2 else {"all": ()}
        for name, dim in dims.items():
            mean = summed(squares.mean(dim=dim)) if dim != () else squares
            if name not in state:
                state[name] = torch.zeros_like(mean)
            state[name].mul_(0.9).add_(mean, alpha=0.1)
        state["step"] = state.get("step", torch.zeros(())) + 1
        if p.dim() == 2:
            scale = state["rows"].unsqueeze(1) * state["columns"].unsqueeze(0)
        else:
            scale = state["all"]
        p.sub_(p.grad * scale.add(1e-6).rsqrt(), alpha=lr)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its sums done."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


class AppState:
    """Model and optimizer as one object that a checkpointer asks for its state, as torch's own tutorial has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"])


@dataclass
class Job:
    """A model in one layout, and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    @property
    def inner(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def state(self, form: str) -> dict[str, Any]:
        """What is passed to save() and load()."""
        if form == "module":
            return {"model": self.model, "optimizer": self.optimizer}
        if form == "state_dict":
            return {"model": self.inner.state_dict(), "optimizer": self.optimizer}
        if form == "get_state_dict":
            return {"app": AppState(self.model, self.optimizer)}
        return {"average": self.tensors()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state by names that do not depend on the layout."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.inner.named_parameters():
            found[name] = parameter.detach()
            found |= {f"{name}/{key}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
        return found

    def full(self) -> dict[str, torch.Tensor]:
        """The same in full, copied. Collective."""
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in self.tensors().items()}

    def fill(self, full: dict[str, torch.Tensor]) -> None:
        """Put plain tensors in, by torch's own means; there is optimizer state already."""
        for name, tensor in self.tensors().items():
            put(tensor, full[name])

    def step(self, number: int) -> None:
        tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(number))
        self.model(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(layout: str, optimizer: str, seed: int) -> Job:
    """A new job on all ranks of the default group, the same whatever the layout."""
    torch.manual_seed(seed)
    model = _WRAPPERS[layout](Net())
    parameters = list(model.parameters())
    if optimizer == "muon":
        return Job(model, torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01))
    return Job(model, torch.optim.AdamW(parameters, lr=0.01) if optimizer == "adamw" else Factored(parameters))


_PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def _fsdp2(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _tensor_parallel(model: Any) -> Any:
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), _PLAN)


def _both(model: Any) -> Any:
    mesh = init_device_mesh("cpu", _grid(), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], _PLAN), mesh=mesh["dp"])


def _hybrid(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", _grid(), mesh_dim_names=("replicate", "shard")))


def _grid() -> tuple[int, int]:
    world = dist.get_world_size()
    return (2, world // 2) if world % 2 == 0 and world > 2 else (1, world)


_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": _fsdp2,
    "tp": _tensor_parallel,
    "dp_tp": _both,
    "hsdp": _hybrid,
}
