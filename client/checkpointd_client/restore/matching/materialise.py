"""Gives memory to tensors on the meta device: as the checkpoint has them, in the objects that the user has.

Invariants
  META-1  The tensor object stays the same one, so every module, optimizer and variable that has it sees the loaded values.
  META-2  Memory is made only for tensors that the checkpoint has, after every check. Others stay as they are, and are reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture.tensor_kinds.kind import swap
from checkpointd_client.capture.tensors import is_meta, stride_like
from checkpointd_client.restore.bind import Binding
from checkpointd_client.restore.matching.context import Context, StepOrder
from checkpointd_client.restore.stored import StridedView
from checkpointd_client.sharding.dtensor import LocalShard, is_dtensor


def materialise(
    match: Context, live: Any, node: tree.Tensor, place: StridedView, held: LocalShard | None, device: torch.device, fqn: str
) -> None:
    """Make memory for `live`, a tensor or a DTensor on the meta device, and fill it from the stored tensor.

    `device`: that of plain tensors. A DTensor gets memory on the device of its mesh.
    """
    first = match.materialised.setdefault(id(live), place.owner)
    if first != place.owner and not match.are_equal(first, place.owner):
        match.mismatched.append(
            f"{fqn}: this tensor is tied to another one now, and was stored as different tensors of different values"
        )
        return
    binding = Binding(node, place, device, dtype=live.dtype)
    if is_dtensor(live):
        kind = live._spec.mesh.device_type
        binding.device = torch.device(kind) if kind == "cpu" else match.device_of(kind)
        binding.like, binding.held = live, held
    else:
        binding.stride = stride_like(live)
    match.bindings.add(binding)
    match.do(StepOrder.CONTAINERS, lambda: binding.value, lambda made: _put(match, live, made, fqn))


def _put(match: Context, live: Any, made: Any, fqn: str) -> None:
    """Give the object `live` the memory of `made`."""
    if not is_meta(live):
        return  # another name of the same tensor
    local = made._local_tensor if is_dtensor(made) else made
    address = local.data_ptr()
    if local.numel() and address in match.addresses:
        made = made.clone()  # tied when it was saved, and two tensors here
    match.addresses.add(address)
    marks = dict(vars(live))  # such as a library sets on parameters
    try:
        swap(live, made)
    except (RuntimeError, AttributeError) as error:
        raise StateError(
            f"{fqn}: it is on the meta device, and torch cannot give it memory in place: {error}. Call to_empty(device=...) "
            "on the module before the load"
        ) from error
    vars(live).update({name: value for name, value in marks.items() if name not in vars(live)})


def note_left_on_meta(match: Context, module: nn.Module, stored: Iterable[object], fqn: str) -> None:
    """Report buffers on the meta device that no checkpoint has, since they are not persistent."""
    names = set(stored)
    for path, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            buffer, key = part._buffers.get(name), f"{path}.{name}" if path else name
            if is_meta(buffer) and key not in names:
                match.mismatched.append(
                    f"{fqn}.{key}: this buffer is on the meta device, and is not persistent, so no checkpoint has it: give it "
                    "its value before the load"
                )
