"""Captures tensors as a file of safetensors: its header, and the tensors as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from checkpointd.errors import StateError
from checkpointd.export.safetensors import Item, Unsupported, plan_file
from checkpointd_client.capture.torch_files import CapturedFile, FileBuilder


def capture_safetensors(
    name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, optimizer_only: Collection[int]
) -> CapturedFile:
    """Capture contiguous `tensors` as the file `name`, without copying one. `optimizer_only`: the addresses of storages that
    only optimizer steps change. StateError if the format cannot hold a tensor.
    """
    items = [
        Item(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for key, tensor in sorted(tensors.items())
    ]
    try:
        plan = plan_file(name, items, dict(metadata or {}))
    except (Unsupported, KeyError) as error:
        raise StateError(f"{name} cannot be saved in the format of safetensors: {error}") from error
    file = FileBuilder(name)
    file.add_bytes(plan.header)
    for key in sorted((key for key in plan.offsets if tensors[key].nbytes), key=plan.offsets.__getitem__):
        tensor = tensors[key]
        file.add_tensor(tensor, by_steps=tensor.untyped_storage().data_ptr() in optimizer_only)
    return file.captured()
