"""One small model in every parallel layout, with sizes that nothing divides, and its state as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = ("plain", "ddp", "zero", "fsdp2", "tp", "hsdp")
"""`zero`: DDP with a ZeroRedundancyOptimizer. `tp`: tensor parallelism with FSDP2 over the other dimension of a 2-d mesh.
`build` has one more, for devices: `offload`, which is FSDP2 with its shards and the optimizer's state in host memory."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HOST = torch.device("cpu")
VOCABULARY, WIDTH, INNER = 13, 5, 21


class Net(nn.Module):
    """An embedding, two tensor-parallel layers, a norm that stays whole, a buffer, and one weight too large to be one box."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.large = nn.Linear(WIDTH, 7001)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.down(torch.relu(self.up(hidden))))
        return self.large(hidden).float().square().mean() * self.scale.float().sum()  # type: ignore[operator]


@dataclass
class Job:
    """A model in one layout and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device = HOST
    """Where the model computes."""

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 + number)
        tokens = torch.randint(VOCABULARY, (4, 6), generator=generator)
        self.model(tokens.to(self.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(layout: str, dtype: torch.dtype, seed: int, device: torch.device = HOST) -> Job:
    """A new job on all ranks of the default group (`plain`: on each for itself), the same on every device in every layout."""
    torch.manual_seed(seed)
    model: Any = Net().to(dtype).to(device)
    model = _WRAPPERS.get(layout, lambda whole: whole)(model)
    if layout == "zero":
        return Job(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01), device)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=0.01), device)


def _mesh(model: nn.Module, shape: tuple[int, ...], *names: str) -> DeviceMesh:
    kind = next(model.parameters()).device.type
    return init_device_mesh(kind, shape, mesh_dim_names=names or None)


def _fsdp2(model: nn.Module) -> nn.Module:
    return _shard(model, _mesh(model, (dist.get_world_size(),)))


def _offloaded(model: nn.Module) -> nn.Module:
    return _shard(model, _mesh(model, (dist.get_world_size(),)), offload_policy=CPUOffloadPolicy())


def _shard(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    fully_shard(model.large, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _hybrid(model: nn.Module) -> nn.Module:
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    return _shard(model, _mesh(model, shape, "replicate", "shard"))


def _tensor_parallel(model: Any) -> nn.Module:
    world = dist.get_world_size()
    shape = (2, world // 2) if world == 4 else (1, world)
    mesh = _mesh(model, shape, "dp", "tp")
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    return _shard(parallelize_module(model, mesh["tp"], plan), mesh["dp"])


_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "zero": DistributedDataParallel,
    "fsdp2": _fsdp2,
    "offload": _offloaded,
    "tp": _tensor_parallel,
    "hsdp": _hybrid,
}


def plain_tensors(job: Job) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state in full, by names that do not depend on the layout. Collective."""
    model = job.model.module if isinstance(job.model, DistributedDataParallel) else job.model
    found = {name: _full(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, parameter in model.named_parameters():
        for key, value in state_of(job).get(parameter, {}).items():
            found[f"{name}/{key}"] = _full(value)
    if isinstance(job.optimizer, ZeroRedundancyOptimizer):
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, found)
        found = {name: tensor for part in parts for name, tensor in part.items()}
    return found


def state_of(job: Job) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """What this rank keeps for each parameter."""
    optimizer: Any = job.optimizer
    return optimizer.optim.state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state  # type: ignore[no-any-return]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def locals_of(job: Job) -> list[torch.Tensor]:
    """What this rank holds, parameters and state."""
    tensors = [*job.model.parameters(), *(v for p in job.model.parameters() for v in state_of(job).get(p, {}).values())]
    return [(t._local_tensor if isinstance(t, DTensor) else t).detach() for t in tensors]


def distribute_like(job: Job, plain: dict[str, torch.Tensor]) -> None:
    """Fill the job from plain tensors by torch's own means: what a load is compared with."""
    model = job.model.module if isinstance(job.model, DistributedDataParallel) else job.model
    for name, parameter in model.state_dict(keep_vars=True).items():
        _put(parameter, plain[name])
    for name, parameter in model.named_parameters():
        state: dict[str, Any] = {}
        for path, value in plain.items():
            if path.startswith(f"{name}/"):
                key = path.removeprefix(f"{name}/")
                state[key] = value.clone() if value.dim() == 0 else _put(torch.zeros_like(parameter, dtype=value.dtype), value)
        zero = job.optimizer if isinstance(job.optimizer, ZeroRedundancyOptimizer) else None
        if state and (zero is None or zero._param_to_rank[parameter] == dist.get_rank()):
            state_of(job)[parameter] = state


@torch.no_grad()
def _put(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if not isinstance(target, DTensor):
        return target.copy_(source)
    index = torch.arange(source.numel()).view(source.shape)
    place = _cut(index, target)
    if place.numel():
        target._local_tensor.copy_(source.reshape(-1)[place.reshape(-1)].view(target._local_tensor.shape))
    return target


def _cut(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of `full`, by torch's own functions; where FSDP2 lies over tensor parallelism, right to left."""
    placements, mesh = like.placements, like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    dims = sorted(range(len(placements)), key=lambda i: getattr(placements[i], "split_factor", 1) > 1)
    for i in dims:
        if not placements[i].is_replicate():
            dim: int = placements[i].dim  # type: ignore[attr-defined]  # what is not replicated is sharded here
            pieces = torch.chunk(full, mesh.size(i), dim)
            at = coordinate[i]
            full = pieces[at] if at < len(pieces) else full.narrow(dim, 0, 0)
    return full
