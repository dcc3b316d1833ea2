"""Three ways to train one GPT on several ranks: `ddp`, `fsdp2` and `tp`. A checkpoint of one of them loads into any other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gpt import GPT

KINDS = ("ddp", "fsdp2", "tp")


@dataclass(frozen=True)
class Parallel:
    """A model as this rank has it: call it, and save it. Of each batch this rank computes part `part` of `parts`."""

    model: nn.Module
    part: int
    parts: int


def parallelize(model: GPT, kind: str) -> Parallel:
    """Spread `model`, which all ranks have initialised alike, over the ranks of the default process group."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), next(model.parameters()).device.type
    if kind == "ddp":
        return Parallel(DistributedDataParallel(model), rank, world)
    if kind == "fsdp2":
        return Parallel(sharded(model, init_device_mesh(device, (world,), mesh_dim_names=("dp",))), rank, world)
    # All ranks are one tensor-parallel group, and compute the whole batch together; of several groups, each would take a part.
    mesh = init_device_mesh(device, (1, world), mesh_dim_names=("dp", "tp"))
    return Parallel(sharded(split_heads(model, mesh["tp"]), mesh["dp"]), mesh["dp"].get_local_rank(), mesh["dp"].size())


def sharded(model: GPT, mesh: DeviceMesh) -> GPT:
    """FSDP2: each rank of `mesh` holds an equal part of every parameter, and gathers a block when it computes it."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split_heads(model: GPT, mesh: DeviceMesh) -> GPT:
    """Tensor parallelism: each rank of `mesh` computes some of the attention heads, and some columns of the MLP."""
    if model.heads % mesh.size():
        raise ValueError(f"{mesh.size()} ranks cannot share {model.heads} heads equally: choose another --width")
    plan = {
        "attention.1.qkv": ColwiseParallel(),
        "attention.1.out": RowwiseParallel(),
        "mlp.1": ColwiseParallel(),
        "mlp.3": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def clip_gradients(model: nn.Module, limit: float) -> None:
    """clip_grad_norm_ for parameters that lie on several meshes, each of which it would want to itself."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    norm = torch.stack([whole(norm) for norm in norms]).norm()
    for group in by_mesh.values():
        clip_grads_with_norm_(group, limit, norm)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this rank may hold a part. Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
