"""An engine as a state of named tensors, whatever its ZeRO stage and number of ranks.

    {"model": parameters and buffers by their plain names,
     "optimizer": {"state": {"model.<name>": {"exp_avg": ...}}, "param_groups": [{..., "params": [names]}]},
     "master": the fp32 masters of parameters of another dtype,
     "scheduler": the state_dict of the LR scheduler,
     "deepspeed": counters, loss scaler}

Names and shapes are those that checkpointd stores for `{"model": model, "optimizer": optimizer}` without DeepSpeed, so that
either loads the checkpoints of the other.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd_client.capture import objects
from checkpointd_client.capture.optimizers import of_no_parameter
from checkpointd_client.capture.state_dicts import HandedOut
from checkpointd_client.integrations.deepspeed.optimizer_process import keeps_moments
from checkpointd_client.integrations.deepspeed.zero_optimizer import (
    Bundle,
    Range,
    base_optimizer,
    bundles_of,
    data_parallel,
    names_of,
    parameter_held,
)
from checkpointd_client.sharding.flat_range import LocalShardTensor, same
from checkpointd_client.sharding.wrappers import Names

MODEL, OPTIMIZER, MASTER, SCHEDULER, ENGINE = "model", "optimizer", "master", "scheduler", "deepspeed"
STEP = "step"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALES = frozenset(
    {"dynamic_loss_scale", "overflow", "clip_grad", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor"}
    | {"scale_window", "min_scale", "delayed_shift", "cur_hysteresis", "consecutive_hysteresis"}
)
_PRIVATE = "_ds_"
_SPARSE = "sparse_tensor_module_names"
"""An engine's set of the parameters whose gradients are sparse, in releases that have it (0.19.6)."""


def state_of(engine: Any, *, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
    """The state that a save of the engine stores. StateError for values that cannot be stored."""
    bundles = bundles_of(engine)
    tensors, left_out = _model(engine, exclude_frozen_parameters=exclude_frozen_parameters)
    state: dict[str, Any] = {MODEL: tensors}
    if bundles:
        state[OPTIMIZER] = HandedOut({"state": _optimizer_state(engine, bundles), "param_groups": _groups(engine, bundles)})
        masters = dict(_masters(engine, bundles))
        if masters:
            state[MASTER] = masters
    if engine.lr_scheduler is not None:
        state[SCHEDULER] = HandedOut(objects.state_dict_of(engine.lr_scheduler, SCHEDULER))
    state[ENGINE] = {**_engine_state(engine), "left_out": left_out, "buffers": _buffer_names(engine)}
    return state


def module_entries(engine: Any) -> Iterator[tuple[str, str, Any]]:
    """Key in the module, name under which it is stored, and the live value of everything in the module's state_dict."""
    live = objects.module_tensors(engine.module, MODEL)
    names = Names(engine.module, live)
    for key, value in live.items():
        yield key, names.clean(key), value


def versions_of(engine: Any) -> dict[str, Any]:
    """What state_dict() notes of the version of each part of the module, by its path without wrappers."""
    live = objects.module_tensors(engine.module, MODEL)
    noted: dict[str, Any] = getattr(live, objects.METADATA, None) or {}
    names = Names(engine.module, [*live, *noted])
    return {names.clean(path): dict(version) for path, version in noted.items()}


def _model(engine: Any, *, exclude_frozen_parameters: bool) -> tuple[dict[str, Any], list[str]]:
    copies = data_parallel(engine)
    made: dict[int, LocalShardTensor] = {}
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for _, name, value in module_entries(engine):
        if isinstance(value, nn.Parameter):
            if exclude_frozen_parameters and not value.requires_grad:
                left_out.append(name)
                continue
            # Tied weights are one HeldTensor, and so stored once.
            found[name] = made[id(value)] = made.get(id(value)) or parameter_held(engine, value, copies)
        elif isinstance(value, torch.Tensor):
            # Every rank has its own buffers; those of the first rank are stored, as in DeepSpeed's files.
            found[name] = made[id(value)] = made.get(id(value)) or same(value.detach(), copies, first_writes=True)
        else:
            found[name] = value
    return found, left_out


def _buffer_names(engine: Any) -> list[str]:
    """The names of buffers. They are stored, because fp32 weights treat buffers and frozen parameters differently."""
    entries = module_entries(engine)
    return [name for _, name, value in entries if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]


def stored_name(name: str) -> str:
    """The name of a parameter in the state of the optimizer."""
    return f"{MODEL}.{name}"


# --- the optimizer --------------------------------------------------------------------------------------------------


def _optimizer_state(engine: Any, bundles: list[Bundle]) -> dict[Hashable, Any]:
    base = base_optimizer(engine)
    if keeps_moments(engine.optimizer):
        return {}
    found: dict[Hashable, Any] = of_no_parameter(base)
    for bundle in bundles:
        entry = base.state.get(bundle.tensor, {})
        for one in bundle.ranges if entry else ():
            found[stored_name(one.name)] = {key: _entry(engine, bundle, one, key, value) for key, value in entry.items()}
    return found


def _entry(engine: Any, bundle: Bundle, one: Range, key: Hashable, value: Any) -> Any:
    """One entry of the optimizer state of a bundle, cut out for one of its parameters."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_elementwise(key, value, bundle.tensor):
        return bundle.held(one, value)
    if value.numel() == 1:  # every parameter gets its own: it may part from its bundle
        return same(value.detach().clone(), data_parallel(engine))
    if bundle.copies is not None:
        return same(value.detach(), bundle.copies, optimizer_only=True)
    raise StateError(
        f"optimizer.state.{stored_name(one.name)}.{key}: a tensor of the shape {list(value.shape)}, where the optimizer steps "
        f"{bundle.tensor.numel()} elements of several parameters: it cannot be divided among these parameters"
    )


def is_elementwise(key: Hashable, value: torch.Tensor, optimizer_only: torch.Tensor) -> bool:
    """Whether each element of `value` belongs to one element of the tensor that the optimizer steps."""
    return key != STEP and value.shape == optimizer_only.shape


def _groups(engine: Any, bundles: list[Bundle]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(base_optimizer(engine).param_groups):
        kept = {key: value for key, value in group.items() if key != "params" and not str(key).startswith(_PRIVATE)}
        names = [stored_name(one.name) for bundle in bundles if bundle.group == number for one in bundle.ranges]
        groups.append({**kept, "params": names})
    return groups


def parameters_by_name(engine: Any) -> dict[str, Any]:
    """The parameters of the module, each under its first name."""
    names = names_of(engine)
    return {names[id(parameter)]: parameter for parameter in engine.module.parameters()}


def _masters(engine: Any, bundles: list[Bundle]) -> Iterator[tuple[str, LocalShardTensor]]:
    """The masters whose dtype differs from their parameters'; with the same dtype, both have the same elements."""
    parameters = parameters_by_name(engine)
    for bundle in bundles:
        for one in bundle.ranges:
            if parameters[one.name].dtype != bundle.tensor.dtype:
                yield one.name, bundle.held(one, bundle.tensor)


# --- everything else ------------------------------------------------------------------------------------------------


def _engine_state(engine: Any) -> dict[str, Any]:
    return {
        **{name: getattr(engine, name) for name in _COUNTERS},
        "dp_world_size": int(engine.seq_dp_world_size),
        "mp_world_size": int(engine.mp_world_size),
        "zero_stage": int(engine.zero_optimization_stage()),
        "ds_version": deepspeed.__version__,
        "dtype": str(engine.get_data_types()[0]),
        "versions": versions_of(engine),
        "scales": {holder: _plain(value) for holder, value in scale_holders(engine).items()},
        **({_SPARSE: sorted(getattr(engine, _SPARSE))} if hasattr(engine, _SPARSE) else {}),
    }


def scale_holders(engine: Any) -> dict[str, Any]:
    """The objects that hold loss scales: the optimizer's wrapper, and its loss scaler."""
    optimizer = engine.optimizer
    if optimizer is None or optimizer is base_optimizer(engine):
        return {}
    inner = {name: getattr(optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")}
    return {"optimizer": optimizer, **{name: value for name, value in inner.items() if value is not None}}


def _plain(holder: Any) -> dict[str, Any]:
    values = {name: value for name, value in vars(holder).items() if name in _SCALES and isinstance(value, bool | int | float)}
    return {"class": type(holder).__name__, **values}


def restore_engine(engine: Any, stored: Mapping[str, Any], model: Container[str]) -> None:
    """Set counters and, if they are of the same kind, loss scales. `model`: the stored names of the module."""
    for name in _COUNTERS:
        if name in stored:
            setattr(engine, name, stored[name])
    engine.loaded_checkpoint_dp_world_size = stored.get("dp_world_size", engine.seq_dp_world_size)
    engine.loaded_checkpoint_mp_world_size = stored.get("mp_world_size", engine.mp_world_size)
    if _SPARSE in stored and hasattr(engine, _SPARSE):
        kept = {name for name in getattr(engine, _SPARSE) if name not in model}
        setattr(engine, _SPARSE, kept | (set(stored[_SPARSE]) & dict(engine.module.named_parameters()).keys()))
    same_dtype = stored.get("dtype") == str(engine.get_data_types()[0])
    for holder, live in scale_holders(engine).items():
        values = stored.get("scales", {}).get(holder, {})
        if same_dtype and values.get("class") == type(live).__name__:
            for name in _SCALES & values.keys() & vars(live).keys():
                setattr(live, name, values[name])
