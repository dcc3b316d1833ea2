"""The optimizer state of a DeepSpeed engine, at any ZeRO stage, by the names of the parameters.

Under ZeRO the base optimizer steps flat tensors, each made of ranges of many parameters and of padding; without it, tensors of
the parameters' own shapes. A Bundle is one of those tensors, with the ranges of parameters that it holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from checkpointd.errors import StateError, UsageError
from checkpointd_client.integrations.deepspeed.optimizer_process import is_zenflow
from checkpointd_client.sharding.dtensor import ReplicaGroup, group_of
from checkpointd_client.sharding.flat_range import LocalShardTensor, flat, same
from checkpointd_client.sharding.wrappers import Names


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `[start, start + count)` of the parameter called `name`, which lie in a flat tensor from element `at` on. With
    `by_columns` they are counted column by column.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    at: int
    by_columns: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """One tensor that the base optimizer steps. `group`: number of its param_group. `copies`: the ranks that have the same
    elements; None if each rank has ranges of its own.
    """

    tensor: torch.Tensor
    group: int
    ranges: tuple[Range, ...]
    copies: ReplicaGroup | None

    def held(self, one: Range, like: torch.Tensor) -> LocalShardTensor:
        """The part of a parameter in `like`, a tensor of the shape of this bundle's."""
        elements = like.detach().view(-1)[one.at : one.at + one.count]
        if self.copies is not None:
            return same(elements.view(one.shape), self.copies, optimizer_only=True)
        return flat(one.shape, one.start, elements, optimizer_only=True, by_columns=one.by_columns)


def check_supported(engine: Any) -> None:
    """Raise UsageError for an engine whose state cannot be stored by the names of parameters."""
    why = _refusal(engine)
    if why is not None:
        raise UsageError(f"layout='checkpointd' cannot store this engine: {why}. layout='deepspeed' can")


def _refusal(engine: Any) -> str | None:
    optimizer = engine.optimizer
    if isinstance(engine.module, PipelineModule):
        return "its module is a pipeline, which names the parameters of each stage by layer"
    if engine.has_moe_layers:
        return "its module has mixture-of-experts layers, whose experts lie on other ranks under the same names"
    if engine.curriculum_learning_enabled() or engine.random_ltd_enabled():
        return "its data sampler or its random-LTD scheduler has a state of its own, which this layout does not store"
    if group_of(engine.seq_data_parallel_group).replicas != torch.distributed.get_world_size():
        return "its module is model-parallel, so that ranks have different tensors of one name"
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        return "its tensors are swapped to NVMe"
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        whole = group_of(engine.seq_data_parallel_group).replicas
        if any(count != whole for count in optimizer.sub_group_partition_counts):
            return "its parameters are partitioned over a part of the ranks (MiCS)"
    return None


def data_parallel(engine: Any) -> ReplicaGroup:
    """The ranks over which the engine partitions parameters, or keeps them equal."""
    return group_of(engine.seq_data_parallel_group)


def base_optimizer(engine: Any) -> Any:
    """The optimizer that steps; None if the engine has none."""
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return getattr(optimizer, "optimizer", None)


def names_of(engine: Any) -> dict[int, str]:
    """The name of each parameter by its identity; the first one, if it has several."""
    found: dict[int, str] = {}
    named = dict(engine.module.named_parameters())
    names = Names(engine.module, named)
    for name, parameter in named.items():
        found.setdefault(id(parameter), names.clean(name))
    return found


def parameter_held(engine: Any, parameter: Any, copies: ReplicaGroup) -> LocalShardTensor:
    """This rank's part of a parameter of the module, at any stage. StateError if DeepSpeed has moved its elements away."""
    trained = bool(parameter.requires_grad)
    if not hasattr(parameter, "ds_id"):  # at stage 3 the elements lie in `ds_tensor`
        return same(parameter.detach(), copies, optimizer_only=trained, trained=trained)
    part, (shape, by_columns) = parameter.ds_tensor, _partitioned(engine.optimizer, parameter)
    if part.numel() and not part.untyped_storage().nbytes():
        raise StateError(
            f"a parameter of the shape {list(shape)} was moved away by DeepSpeed: reload the engine's states first"
        )
    start = min(copies.replica * part.numel(), math.prod(shape))
    count = min(part.numel(), math.prod(shape) - start)
    return flat(shape, start, part.detach()[:count], optimizer_only=trained, trained=trained, by_columns=by_columns)


def _partitioned(optimizer: Any, parameter: Any) -> tuple[tuple[int, ...], bool]:
    """The shape of a parameter of stage 3, and whether its elements lie column by column: ZenFlow transposes all matrices."""
    shape = tuple(parameter.ds_shape)
    by_columns = is_zenflow(optimizer) and len(shape) == 2
    return (shape[::-1] if by_columns else shape), by_columns


def gather_persistent(engine: Any) -> None:
    """Gather the parameters that stage 3 keeps whole on every rank, if they are not whole now. Call it on every rank.

    DeepSpeed's own save does so, too: `empty_partition_cache` may have freed them before.
    """
    persistent = getattr(engine.optimizer, "persistent_parameters", [])
    if any(parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE for parameter in persistent):
        engine.optimizer.checkpoint_event_epilogue()


# --- bundles --------------------------------------------------------------------------------------------------------


def bundles_of(engine: Any) -> list[Bundle]:
    """Everything that the engine's optimizer steps."""
    optimizer, names, copies = engine.optimizer, names_of(engine), data_parallel(engine)
    if base_optimizer(engine) is None:
        return []
    return list(_bundles(optimizer, names, copies))


def _bundles(optimizer: Any, names: dict[int, str], copies: ReplicaGroup) -> Iterator[Bundle]:
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield from _stage_3(optimizer, names, copies)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for i, flat_master in enumerate(optimizer.single_partition_of_fp32_groups):
            parameters = optimizer.round_robin_bit16_groups[i]
            # Releases that have no offsets (0.19.6) put the parameters end to end.
            known = getattr(optimizer, "round_robin_bit16_offsets", None)
            offsets = _end_to_end(parameters) if known is None else known[i]
            yield Bundle(flat_master, i, _cut(parameters, offsets, names, flat_master.numel(), copies.replica), None)
    elif isinstance(optimizer, BF16_Optimizer):
        for i, flat_master in enumerate(optimizer.fp32_groups_flat_partition):
            parameters = optimizer.bf16_groups[i]
            yield Bundle(
                flat_master, i, _cut(parameters, _end_to_end(parameters), names, flat_master.numel(), copies.replica), None
            )
    elif isinstance(optimizer, FP16_Optimizer):
        for i, flat_master in enumerate(optimizer.fp32_groups_flat):
            parameters = optimizer.fp16_groups[i]
            yield Bundle(flat_master, i, _cut(parameters, _end_to_end(parameters), names, flat_master.numel(), 0), copies)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for i, (parameters, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
            yield from (_own(master, i, names[id(p)], copies) for p, master in zip(parameters, masters, strict=True))
    else:
        for i, group in enumerate(optimizer.param_groups):
            yield from (_own(p, i, names[id(p)], copies) for p in group["params"] if id(p) in names)


def _own(tensor: torch.Tensor, group: int, name: str, copies: ReplicaGroup) -> Bundle:
    """The bundle of a tensor that is one whole parameter, on every rank."""
    return Bundle(tensor, group, (Range(name, tuple(tensor.shape), 0, tensor.numel(), 0),), copies)


def _end_to_end(parameters: Sequence[Any]) -> Iterator[int]:
    """The offsets of parameters that lie one after the other."""
    return itertools.accumulate((parameter.numel() for parameter in parameters[:-1]), initial=0)


def _cut(parameters: Sequence[Any], offsets: Iterable[int], names: dict[int, str], size: int, number: int) -> tuple[Range, ...]:
    """The ranges in partition `number`, of `size` elements, of parameters that lie one after the other at `offsets`."""
    first, found = number * size, []
    for parameter, offset in zip(parameters, offsets, strict=True):
        begin = min(max(first, offset), offset + parameter.numel())
        end = max(min(first + size, offset + parameter.numel()), begin)
        at = begin - first if end > begin else 0
        # ZenFlow lays matrices out column by column; releases that view them row by row again (0.19.8) rearrange the weights.
        by_columns = parameter.dim() == 2 and not parameter.is_contiguous() and parameter.t().is_contiguous()
        found.append(Range(names[id(parameter)], tuple(parameter.shape), begin - offset, end - begin, at, by_columns))
    return tuple(found)


def _stage_3(optimizer: Any, names: dict[int, str], copies: ReplicaGroup) -> Iterator[Bundle]:
    """Every parameter is cut into one part per rank, all equally long with padding; each rank's sub-groups hold its parts."""
    for number, (parameters, flat_master) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        ranges, at = [], 0
        for parameter in parameters:
            size, total = parameter.partition_numel(), parameter.ds_numel
            start, (shape, by_columns) = min(copies.replica * size, total), _partitioned(optimizer, parameter)
            ranges.append(Range(names[id(parameter)], shape, start, min(size, total - start), at, by_columns))
            at += size
        yield Bundle(flat_master, optimizer.sub_group_to_group_id[number], tuple(ranges), None)
