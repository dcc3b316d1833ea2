"""FullyShardedDataParallel (FSDP1): its parameters are ranges of flat tensors, which the ranks of a process group divide.

Invariants
  FLATSHARD-1  A rank finds its part from FSDP's handles in its own process. It gathers no tensor and asks no other rank.
  FLATSHARD-2  Tensors are views of the local shard: optimizers change it, and a load fills it in place.
  FLATSHARD-3  The ranks that hold elements of a parameter store its optimizer state.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd.layout.boxes import boxes_of_range
from checkpointd_client.sharding.dtensor import ALONE, FlatShard, LocalBox, LocalShard, ReplicaGroup, group_of


def wrapper_class() -> Any:
    """FullyShardedDataParallel; None if this process has not imported it."""
    found = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return None if found is None else getattr(found, "FullyShardedDataParallel", None)


def is_flat(module: nn.Module) -> bool:
    """Whether a part of `module` is in FullyShardedDataParallel."""
    wrapper = wrapper_class()
    return wrapper is not None and any(isinstance(part, wrapper) for part in module.modules())


def module_tensors(module: nn.Module, fqn: str) -> dict[str, Any]:
    """The tensors of `state_dict()`, without gathering any: FlatShards, and tensors that FSDP does not manage as they are.

    Their names still have what wrappers add.
    """
    wrapper = wrapper_class()
    found: dict[str, Any] = {}
    managed: set[tuple[int, str]] = set()
    try:
        for path, part in module.named_modules():
            if isinstance(part, wrapper) and part._handle is not None:
                prefix = _prefix(path)
                found.update((prefix + key, shard) for key, shard in _shards(part, f"{fqn}.{prefix}"))
                managed.update(_managed(part._handle.flat_param))
        for path, part in module.named_modules(remove_duplicate=False):
            found.update((_prefix(path) + key, value) for key, value in _rest(part, managed))
    except AttributeError as error:
        raise StateError(f"{fqn}: FullyShardedDataParallel of this torch cannot be saved by this version: {error}") from error
    return found


def versions(module: nn.Module) -> dict[str, Any]:
    """The versions of all parts of a module by their paths, as `state_dict()` notes them."""
    return {path: {"version": part._version} for path, part in module.named_modules(remove_duplicate=False)}


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _managed(flat: Any) -> Iterator[tuple[int, str]]:
    """The parameters in a flat parameter, each as the id() of its module and its name there."""
    for info in (*flat._param_infos, *flat._shared_param_infos):
        yield id(info.module), info.param_name


def _rest(module: nn.Module, managed: set[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    for name, parameter in module._parameters.items():
        if parameter is not None and name != "_flat_param" and (id(module), name) not in managed:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield "_extra_state", module.get_extra_state()


def loaded(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Finish a load after the local shards were filled: drop old gathered parameters, and give modules their extra state."""
    from torch.distributed.fsdp._runtime_utils import _reshard  # already imported, since `module` uses FSDP

    wrapper = wrapper_class()
    for path, part in module.named_modules(remove_duplicate=False):
        key = f"{_prefix(path)}_extra_state"
        if key in extra and not isinstance(part, wrapper):
            part.set_extra_state(extra[key])
        handle = part._handle if isinstance(part, wrapper) else None
        if handle is not None and handle.uses_sharded_strategy and not handle.is_sharded(handle.flat_param):
            _reshard(part, handle, True)


# --- the local shards -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Range:
    """The range of one parameter in the local shard of its flat parameter, and the ranks that hold some of its elements."""

    start: int
    count: int
    held: LocalShard
    holders: ReplicaGroup


_known: dict[int, tuple[weakref.ref[torch.Tensor], object, tuple[_Range, ...]]] = {}
"""Ranges by the id() of the flat parameter. They are valid while its `_shard_param_infos` are the same object."""


def _shards(wrapped: Any, fqn: str) -> Iterator[tuple[str, FlatShard]]:
    """The parameters of one wrapper by their FQNs below it."""
    flat = wrapped._handle.flat_param
    local = getattr(flat, "_local_shard", None)
    local = (flat if local is None else local).detach()
    ranges = _ranges(wrapped, fqn)
    by_place: dict[tuple[int, str], FlatShard] = {}
    for i, (key, at) in enumerate(zip(flat._fqns, ranges, strict=True)):
        parameter = flat if flat._params is None else flat._params[i]
        shard = FlatShard(local.narrow(0, at.start, at.count), at.held, parameter, at.start, at.holders)
        info = flat._param_infos[i]
        by_place[id(info.module), info.param_name] = shard
        yield key, shard
    for info in flat._shared_param_infos:
        key = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        yield key, by_place[id(info.prim_module), info.prim_param_name]


def _ranges(wrapped: Any, fqn: str) -> tuple[_Range, ...]:
    flat: Any = wrapped._handle.flat_param
    known = _known.get(id(flat))
    infos = flat._shard_param_infos
    if known is not None and known[0]() is flat and known[1] is infos:
        return known[2]
    for key in [key for key, (alive, _, _) in _known.items() if alive() is None]:
        del _known[key]
    made = tuple(_range(wrapped, i, fqn) for i in range(len(flat._fqns)))
    _known[id(flat)] = weakref.ref(flat), infos, made
    return made


def _range(wrapped: Any, i: int, fqn: str) -> _Range:
    handle = wrapped._handle
    flat, shape = handle.flat_param, tuple(handle.flat_param._shapes[i])
    if flat._param_extensions[i] is not None:
        raise StateError(
            f"{fqn}{flat._fqns[i]}: FullyShardedDataParallel over tensor parallelism cannot be saved by this version: "
            "use fully_shard (FSDP2)"
        )
    if not flat._contiguities[i]:
        raise StateError(
            f"{fqn}{flat._fqns[i]}: FullyShardedDataParallel keeps its elements in another order, because it was not "
            "contiguous when it was wrapped: make it contiguous before"
        )
    info, outer = flat._shard_param_infos[i], _outer(wrapped)
    holders = _holders(handle, i) if handle.uses_sharded_strategy else group_of(wrapped.process_group)
    replicas = outer if handle.uses_sharded_strategy else outer.times(group_of(wrapped.process_group))
    if not info.in_shard:
        return _Range(0, 0, LocalShard(shape, (), replicas.replica, replicas.replicas), ALONE)
    first, count = info.intra_param_start_idx, info.numel_in_shard
    parts, at = [], 0
    for box in boxes_of_range(shape, first, first + count):
        parts.append(LocalBox(shape, box, (0,) * len(shape), (at, box.sizes)))
        at += box.numel()
    held = LocalShard(shape, tuple(parts), replicas.replica, replicas.replicas)
    return _Range(info.offset_in_shard, count, held, outer.times(holders))


def _outer(wrapped: Any) -> ReplicaGroup:
    """The ranks outside the sharding group that hold the same elements, as in hybrid sharding."""
    between = getattr(wrapped, "_inter_node_pg", None)
    return ALONE if between is None else group_of(between)


def _holders(handle: Any, i: int) -> ReplicaGroup:
    """The ranks of the sharding group that hold elements of the parameter."""
    flat = handle.flat_param
    offsets = [at for at, pads in zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True) if not pads]
    each = flat._sharded_size.numel()
    first, last = (index // each for index in offsets[i])
    return ReplicaGroup(handle.rank - first, last - first + 1)


# --- optimizers -----------------------------------------------------------------------------------------------------


Shards = Mapping[int, Sequence[FlatShard]]
"""By the id() of each parameter that optimizers know: itself as a FlatShard, or all FlatShards of a flat parameter."""


def has_flat(optimizer: torch.optim.Optimizer, shards: Shards) -> bool:
    """Whether a parameter of the optimizer is in FullyShardedDataParallel."""
    return bool(shards) and any(id(p) in shards for group in optimizer.param_groups for p in group["params"])


def members(optimizer: torch.optim.Optimizer, shards: Shards) -> list[list[Any]]:
    """The parameters of each group, with the original parameters as FlatShards in place of flat parameters."""
    return [[one for p in group["params"] for one in shards.get(id(p), (p,))] for group in optimizer.param_groups]


def state_dict(optimizer: torch.optim.Optimizer, shards: Shards, fqn: str) -> dict[str, Any]:
    """The optimizer's state_dict as if it had the original parameters, not flat ones. Numbers follow the order of `members`."""
    state: dict[Hashable, Any] = {}
    groups, number = [], 0
    for live, found in zip(optimizer.param_groups, members(optimizer, shards), strict=True):
        groups.append({**live, "params": list(range(number, number + len(found)))})
        for one in found:
            owner = one.parameter if isinstance(one, FlatShard) else one
            if owner in optimizer.state:
                entry = optimizer.state[owner]
                if not isinstance(one, FlatShard):
                    state[number] = entry
                elif one.held.parts:
                    state[number] = {key: _cut(value, one, f"{fqn}.state.{key}") for key, value in entry.items()}
            number += 1
    return {"state": state, "param_groups": groups}


def _cut(value: Any, shard: FlatShard, fqn: str) -> Any:
    """The part of a flat parameter's state that belongs to one original parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return value.clone()  # every parameter gets its own scalar
    if value.numel() != shard.parameter.numel():
        raise StateError(
            f"{fqn}: the optimizer keeps a tensor of shape {list(value.shape)} for a parameter in FullyShardedDataParallel, of "
            f"which this rank has {shard.parameter.numel()} elements: this version cannot divide such state among parameters"
        )
    row = value.detach().reshape(-1)
    start = shard.start if _is_flat_parameter(shard.parameter) else 0
    return FlatShard(row.narrow(0, start, shard.local.numel()), shard.held, value, start, shard.holders)


def _is_flat_parameter(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_param_infos")


def joined(optimizer: torch.optim.Optimizer, shards: Shards, state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `state_dict`: a dict for the optimizer's own `load_state_dict`."""
    own = optimizer.state_dict()
    groups = zip(optimizer.param_groups, own["param_groups"], strict=True)
    numbers = {id(p): n for group, its in groups for p, n in zip(group["params"], its["params"], strict=True)}
    made: dict[Hashable, Any] = {}
    number = 0
    for live in optimizer.param_groups:
        for parameter in live["params"]:
            found = shards.get(id(parameter))
            entries = [(one, state["state"].get(number + i)) for i, one in enumerate(found or (parameter,))]
            number += len(entries)
            kept = [(one, entry) for one, entry in entries if entry is not None]
            if kept:
                whole = kept[0][1] if found is None else _entry(parameter, kept)
                made[numbers[id(parameter)]] = whole
    left = {key: entry for key, entry in state["state"].items() if not (isinstance(key, int) and key < number)}
    stored = zip(state["param_groups"], own["param_groups"], strict=True)
    return {**state, "state": made | left, "param_groups": [{**g, "params": o["params"]} for g, o in stored]}


def _entry(parameter: torch.Tensor, kept: Sequence[tuple[FlatShard, Mapping[str, Any]]]) -> dict[str, Any]:
    """The state of a flat parameter, joined from the states of its original parameters."""
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, entry in kept for key in entry):
        found = [(one, entry[key]) for one, entry in kept if key in entry]
        first = found[0][1]
        made[key] = _together(parameter, found) if isinstance(first, FlatShard) else first
    return made


def _together(parameter: torch.Tensor, found: Sequence[tuple[FlatShard, FlatShard]]) -> torch.Tensor:
    """One tensor like `parameter`: the existing tensor if all parts are views of it, else a new one."""
    there = found[0][1].parameter
    if there.shape == parameter.shape and all(part.parameter is there for _, part in found):
        return there
    if not _is_flat_parameter(parameter):
        return found[0][1].local.view(parameter.shape)
    made = torch.zeros(parameter.numel(), dtype=found[0][1].dtype, device=found[0][1].device)
    for one, part in found:
        made.narrow(0, one.start, part.local.numel()).copy_(part.local)
    return made.view(parameter.shape)
