"""The state of one FSDP2 rank: the model of `state.py` whole, sharded by `fully_shard`, in fp32, and AdamW over its shards.

12 bytes a parameter: the weight, `exp_avg` and `exp_avg_sq`, all of them DTensors, and AdamW's 0-d step, which is plain.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.state import BYTES_PER_PARAMETER, State, initialise, shape_for, whole_model

_BYTES_PER_PARAMETER = 12
_STEPS_BEFORE_START = 3


class ShardedState(State):
    """The same tensors from the first save to the last, spread over `ranks` ranks. `digests` is for all ranks together."""

    def __init__(self, *, target_bytes: int, ranks: int, rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        with torch.device("meta"):
            model = whole_model(shape_for(target_bytes * BYTES_PER_PARAMETER // _BYTES_PER_PARAMETER))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model.to_empty(device="cpu")
        for weight in self.model.parameters():
            initialise(_local(weight), generator)
            weight.grad = torch.empty_like(weight)
            _local(weight.grad).normal_(0.0, 1e-2, generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        for _ in range(_STEPS_BEFORE_START):
            self.advance()
        self.tree = self._tree()

    def advance(self) -> None:
        """One optimizer step: changes every tensor of the state, and allocates nothing that stays."""
        for weight in self.model.parameters():
            assert weight.grad is not None
            _local(weight.grad).mul_(-0.9)
        self.optimizer.step()

    def _tree(self) -> dict[str, Any]:
        slots = {name: self.optimizer.state[weight] for name, weight in self.model.named_parameters()}
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": {key: {name: slot[key] for name, slot in slots.items()} for key in ("exp_avg", "exp_avg_sq", "step")},
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor, put together from all ranks: the same on any number of them."""
        return {path: _digest(tensor) for path, tensor in self.tensors()}

    def scribble(self) -> None:
        """Overwrite the first, middle and last element of what this rank has of every tensor."""
        for _, tensor in self.tensors():
            flat = _local(tensor).view(-1)
            for at in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
                flat[at] = 3.0

    def clear(self) -> None:
        """Overwrite all of the state with zeros, so that a load that does nothing is seen."""
        for _, tensor in self.tensors():
            _local(tensor).zero_()

    def nbytes(self) -> int:
        """Bytes of all that this rank has."""
        return sum(_local(tensor).nbytes for _, tensor in self.tensors())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(np.asarray(whole.detach().reshape(-1).view(torch.uint8)).data).hexdigest()
