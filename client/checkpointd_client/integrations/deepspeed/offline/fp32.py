"""DeepSpeed's functions that get fp32 weights from a ZeRO checkpoint, under their own names, without DeepSpeed.

Their results equal DeepSpeed's, bit for bit. They read DeepSpeed's own checkpoints, the checkpoints that checkpointd saved as
DeepSpeed's files, and roots in checkpointd's own format.

Invariant
  WEIGHTS-1  Beside the result, one parameter is in memory at a time: files are mapped, and pages that were read are dropped.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn

from checkpointd import arguments
from checkpointd.layout.keys import SERVICE
from checkpointd_client.integrations.deepspeed.offline.file_names import is_zero_checkpoint
from checkpointd_client.integrations.deepspeed.offline.lazy_tensor import LazyTensor, as_fp32
from checkpointd_client.integrations.deepspeed.offline.zero_files import ZeroFiles, checked, open_files, tag_directory
from checkpointd_client.integrations.deepspeed.offline.zero_map import map_files, mapped_tensor

Directory = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Directory, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The weights of a checkpoint of ZeRO 1, 2 or 3 by name, in fp32; frozen parameters keep the dtype of the training.

    `checkpoint_dir` is the save_dir of save_checkpoint, `tag` the checkpoint in it (default: the one in `latest`). Tied names
    have one tensor. With `lazy_mode` the values are read on demand, each time anew: they have `shape`, `dtype` and
    `contiguous()`.

    Raises NotFoundError if files are missing; DamagedError, with the file, if they cannot be read or do not belong together;
    UsageError for pipelines, model parallelism and experts.
    """
    lazy = lazy_state_dict(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    if lazy_mode:
        return lazy
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in lazy.items():
        if id(tensor) not in made:
            made[id(tensor)] = tensor.contiguous()
        found[name] = made[id(tensor)]
    return found


def load_state_dict_from_zero_checkpoint(model: M, checkpoint_dir: Directory, tag: str | None = None) -> M:
    """Move `model` to the CPU, load the weights of a checkpoint into it, one parameter at a time, and return it.

    As in DeepSpeed, weights that only the checkpoint or only the model has are skipped, and an engine can no longer use the
    model. Raises as get_fp32_state_dict_from_zero_checkpoint, and RuntimeError for shapes that differ.
    """
    lazy = lazy_state_dict(checkpoint_dir, tag)
    model.cpu()
    own = model.state_dict()
    wrong = [
        f"{name}: {list(own[name].shape)} in the model, {list(tensor.shape)} in the checkpoint"
        for name, tensor in lazy.items()
        if name in own and own[name].shape != tensor.shape
    ]
    if wrong:
        raise RuntimeError(f"the checkpoint does not fit {type(model).__name__}: {'; '.join(wrong)}")
    for name, tensor in lazy.items():
        if name in own:
            model.load_state_dict({name: tensor.contiguous()}, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint to `output_dir`: files of torch.save, or with `safe_serialization` safetensors.

    They have DeepSpeed's names, and an index if there are several; each holds at most `max_shard_size` of tensors (None: all in
    one file). Files with other names stay. As in Hugging Face's files, names that are tied to another one are left out of
    safetensors files, and their metadata lists them. Raises as get_fp32_state_dict_from_zero_checkpoint, UsageError for a dtype
    that the format does not support, StoreError.
    """
    from checkpointd_client.integrations.deepspeed.offline.fp32_files import write_files

    lazy = lazy_state_dict(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    write_files(lazy, output_dir, max_shard_size, safe_serialization=safe_serialization)


def lazy_state_dict(
    checkpoint_dir: Directory, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> OrderedDict[str, LazyTensor]:
    """The weights, each to be read on demand; tied names have the same object."""
    arguments.path("checkpoint_dir", checkpoint_dir)
    directory = tag_directory(checkpoint_dir, tag)
    if not is_zero_checkpoint(directory) and is_root(checkpoint_dir):
        from checkpointd_client.integrations.deepspeed.offline.fp32_stored import stored_state_dict

        return stored_state_dict(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    files = open_files(directory)
    found: OrderedDict[str, LazyTensor] = OrderedDict(_buffers(files))
    zero = map_files(files)
    if not exclude_frozen_parameters:
        found.update(zero.frozen)
    found.update({name: parameter.master for name, parameter in zero.trained.items()})
    found.update({name: found[owner] for name, owner in files.shared.items() if owner in found})
    return found


def is_root(directory: Directory) -> bool:
    """Whether `directory` has checkpoints in checkpointd's own format."""
    return os.path.isdir(os.path.join(directory, SERVICE))


def _buffers(files: ZeroFiles) -> list[tuple[str, LazyTensor]]:
    """The buffers in the order of the module, floating ones in fp32; buffers that share memory are one object."""
    model = files.model
    module = checked(model.content.get("module"), dict, model.path, "module")
    names = set(files.buffers)
    made: dict[object, LazyTensor] = {}
    return [(name, _buffer(value, model.path, name, made)) for name, value in module.items() if name in names]


def _buffer(value: Any, path: str, name: str, made: dict[object, LazyTensor]) -> LazyTensor:
    tensor = checked(value, torch.Tensor, path, name)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    where = (*place, tensor.is_conj(), tensor.is_neg())
    if not tensor.numel():
        return as_fp32(mapped_tensor(tensor, path, name))
    if where not in made:
        made[where] = as_fp32(mapped_tensor(tensor, path, name))
    return made[where]
