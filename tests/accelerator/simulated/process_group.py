"""Collectives of the simulated device, as NCCL has them for CUDA: importing this module registers the backend with torch.

`dist.init_process_group()` then takes it wherever `sim` is the accelerator. A group of it has no backend for host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.accelerator.simulated import simulator as simulator  # registers the device that this needs

BACKEND = "simgloo"
INTO_THE_FIRST = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall"),
    *("all_gather_single", "all_gather_single_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("all_to_all_single", "alltoall_base"),
)
"""Collectives that fill the tensors of their first argument, by the names that versions of torch have for them."""


class HostedGroup(dist.ProcessGroup):
    """Each collective waits for the current stream, runs with gloo in host memory, and copies what it filled back.

    So it is over when the call returns, for the host and for every stream.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        self.host = dist.ProcessGroup(store, rank, size)
        self.host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        # What has no method here is refused by gloo, which knows no such device. torch asks this group for its devices.
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("sim"), dist.ProcessGroup.BackendType.CUSTOM, gloo)

    def getBackendName(self) -> str:
        return BACKEND

    def send(self, tensors: list[torch.Tensor], *arguments: Any) -> dist.Work:
        self.host.send(_in_host_memory(tensors), *arguments).wait()
        return _ended(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        torch.accelerator.synchronize()
        self.host.barrier().wait()
        return _ended([])


def _collective(name: str) -> Callable[..., dist.Work]:
    def run(self: HostedGroup, into: Any, *others: Any, **options: Any) -> dist.Work:
        filled = _in_host_memory(into)
        getattr(self.host, name)(filled, *_in_host_memory(others), **options).wait()
        _copy_back(filled, into)
        return _ended(into)

    return run


for _name in INTO_THE_FIRST:
    setattr(HostedGroup, _name, _collective(_name))


def _in_host_memory(tensors: Any) -> Any:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "sim":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        return tensor.detach().cpu()

    return tree_map_only(torch.Tensor, copied, tensors)


def _copy_back(filled: Any, into: Any) -> None:
    if isinstance(into, torch.Tensor):
        into.detach().copy_(filled)
    else:
        for source, target in zip(filled, into, strict=True):
            _copy_back(source, target)


def _ended(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[torch.device("sim", i) for i in range(simulator.DEVICES)])
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


dist.Backend.register_backend(BACKEND, HostedGroup, devices=["sim"])
