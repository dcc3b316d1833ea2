"""Checks which tensors and arrays can be stored, and turns numpy arrays into tensors that share their memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from checkpointd.errors import FormatError, StateError
from checkpointd.layout.strides import contiguous_stride, stride_in_order_of
from checkpointd_client.capture.dtypes import DTYPES, NAMES
from checkpointd_client.capture.scalars import type_name

PLAIN_TENSORS: frozenset[type] = frozenset({torch.Tensor, nn.Parameter})
_ARRAY_KINDS = "biufcMmUS"
LIKELY_LOWEST_ADDRESS = 1 << 40
"""A lower address is checked more closely: a freed storage starts at 0."""


def refusal(tensor: torch.Tensor, *, in_module: bool = False) -> str | None:
    """The reason why `tensor` can be neither stored nor filled, with a remedy; None if it can. `in_module`: it is one of a
    module's.
    """
    if type(tensor) not in PLAIN_TENSORS:
        return _subclass_refusal(tensor, in_module=in_module)
    if tensor.is_meta:
        return "a meta tensor has no data: materialise it first (module.to_empty(device=...))"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "a quantized" if tensor.is_quantized else f"a {str(tensor.layout).removeprefix('torch.')}"
        return f"{kind} tensor cannot be stored here: convert it with .to_dense() or .dequantize()"
    if tensor.dtype not in NAMES:
        return f"dtype {tensor.dtype} cannot be stored: store .view(torch.uint8)"
    if tensor.nbytes and tensor.data_ptr() < LIKELY_LOWEST_ADDRESS and tensor.untyped_storage().nbytes() == 0:
        return "its storage was freed: gather or restore the tensor first"
    return None


def stride_like(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of `torch.empty_like(tensor)`, as torch's optimizers make the state of a parameter; None if row-major.

    If the elements of `tensor` fill their memory, these are its own strides. Otherwise they keep the order of its dimensions.
    """
    row_major = contiguous_stride(tensor.shape)
    if tensor.layout is not torch.strided or tensor.stride() == row_major:
        return None
    without_memory = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    stride = torch.empty_like(without_memory, memory_format=torch.preserve_format).stride()
    return None if stride == row_major else stride


def stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor in the layout of `tensor`: its own, or those of `stride_like` if its memory has gaps; None if
    row-major.
    """
    if tensor.layout is not torch.strided or tensor.stride() == contiguous_stride(tensor.shape):
        return None
    return tensor.stride() if tensor.is_contiguous() else stride_like(tensor)


def stride_of_whole(local: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a tensor of `shape` whose dimensions lie in memory as in its part `local`; None if row-major."""
    if local.dim() != len(shape) or local.is_contiguous():
        return None
    stride = stride_in_order_of(local.stride(), shape)
    return None if stride == contiguous_stride(shape) else stride


def is_meta(value: object) -> bool:
    """Whether `value` is a tensor, sharded or not, on the meta device, which has no memory."""
    return getattr(getattr(value, "device", None), "type", None) == "meta"


def refuse_meta(fqn: str, found: Sequence[str]) -> None:
    """StateError if the object at `fqn` has meta tensors, `found`, which a load would have to fill."""
    if found:
        raise StateError(
            f"{fqn}: {len(found)} of its tensors, such as {found[0]}, are on the meta device and in no module that is loaded, "
            "so nothing gives them memory: load the module as well, or call to_empty(device=...) on it first"
        )


def _subclass_refusal(tensor: torch.Tensor, *, in_module: bool) -> str:
    name = type_name(tensor)
    if any(cls.__name__ == "ShardedTensor" for cls in type(tensor).__mro__):
        return f"a {name} cannot be stored: use a DTensor for a tensor that is sharded over ranks"
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy module's parameter has no shape yet: run one forward pass first"
    if hasattr(tensor, "__tensor_flatten__"):
        return (
            f"the class {name} is not allowed: if it has __tensor_flatten__ and __tensor_unflatten__, pass "
            f"tensor_classes=[{type(tensor).__name__}] to the Checkpointer, which then stores its inner tensors"
        )
    if in_module and isinstance(tensor, nn.Parameter):
        return (
            f"the parameter class {name} is not allowed: pass tensor_classes=[{type(tensor).__name__}] to the Checkpointer, "
            "which then stores its elements, and at a load fills those of the module's own parameter. "
            "save(..., exclude_frozen_parameters=True) leaves out a frozen one, as under LoRA"
        )
    return f"the tensor subclass {name} would lose its class: store .as_subclass(torch.Tensor)"


def array_tensor(array: NDArray[np.generic], fqn: str) -> torch.Tensor:
    """`array` as a tensor on the same memory if torch can share it, else on a copy. StateError if it cannot be stored.

    If torch lacks the dtype, the tensor is uint8, with one more dimension for the bytes of each item.
    """
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.itemsize == 0:
        raise StateError(
            f"{fqn}: a numpy array of dtype {array.dtype} cannot be stored: "
            "convert it to numbers, or store a list or its fields one by one"
        )
    return torch.from_numpy(_shareable(array) if is_native(array.dtype) else _as_bytes(array))


def in_place(array: NDArray[np.generic]) -> bool:
    """Whether `array_tensor(array)` shares the array's memory, so that filling the one fills the other."""
    return array.flags.writeable and _has_plain_strides(array) and (is_native(array.dtype) or array.flags.c_contiguous)


def array_dtype(name: str, tensor: str) -> np.dtype[np.generic]:
    """The numpy dtype called `name` of an array stored with the torch dtype `tensor`; FormatError if they do not fit."""
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise FormatError(f"the state tree holds an array of unknown dtype {name!r}") from error
    if dtype.kind not in _ARRAY_KINDS or dtype.itemsize == 0 or tensor != stored_dtype(dtype):
        raise FormatError(f"the state tree holds an array of dtype {name!r}, stored as {tensor}")
    return dtype


def stored_dtype(dtype: np.dtype[np.generic]) -> str:
    """Torch's name of the dtype in which an array of `dtype` is stored."""
    return dtype.name if is_native(dtype) else "uint8"


def tensor_array(tensor: torch.Tensor, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """The array on the memory of the contiguous CPU tensor `tensor`: the inverse of `array_tensor`."""
    array: NDArray[np.generic] = tensor.numpy()
    return array if is_native(dtype) else array.view(dtype).reshape(array.shape[:-1])


def is_native(dtype: np.dtype[np.generic]) -> bool:
    """Whether torch has this dtype too."""
    return dtype.isnative and dtype.kind in "biufc" and dtype.name in DTYPES


def _has_plain_strides(array: NDArray[np.generic]) -> bool:
    return array.flags.aligned and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)


def _shareable(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """`array`, or a copy if torch would refuse it or warn: for read-only memory, or strides that torch cannot express."""
    return array if array.flags.writeable and _has_plain_strides(array) else np.array(array, order="C")


def _as_bytes(array: NDArray[np.generic]) -> NDArray[np.generic]:
    whole = np.ascontiguousarray(array)
    whole = whole if whole.flags.writeable else whole.copy()
    return whole.reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)
