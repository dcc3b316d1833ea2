"""Torch's dtypes by name, and copies of tensors as plain bits: nothing is converted, so every NaN keeps its payload."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpointd.layout.dtypes import ITEM_BYTES

ALL: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of this torch by its name without `torch.`."""

DTYPES: dict[str, torch.dtype] = {name: ALL[name] for name in ITEM_BYTES if name in ALL}
"""The dtypes of stored tensors: all except quantized ones and dtypes that torch itself cannot copy (int4, bits8)."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED_TOGETHER = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


def carrier_of(dtype: torch.dtype) -> torch.dtype | None:
    """The integers of the same width, as which elements are copied bit for bit; None for complex128."""
    return _CARRIERS.get(dtype.itemsize)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor viewed as integers of the same width. complex128 stays as it is, because torch copies it bit for bit."""
    carrier = _CARRIERS.get(tensor.itemsize)
    return tensor if carrier is None or carrier == tensor.dtype else tensor.view(carrier)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, stride: Sequence[int] | None = None) -> torch.Tensor:
    """A new tensor with arbitrary content, contiguous unless `stride` is given. It is made as integers, because torch warns
    when it makes complex32.
    """
    carrier = _CARRIERS.get(dtype.itemsize)
    size, own = tuple(shape), carrier or dtype
    if stride is None:
        made = torch.empty(size, dtype=own, device=device)
    else:
        made = torch.empty_strided(size, tuple(stride), dtype=own, device=device)
    return made if carrier is None or carrier == dtype else made.view(dtype)


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fill `target` with the elements of `source`, of the same shape and dtype, on any devices.

    If elements of `target` share memory, as in an expanded tensor, each memory location is written once. Such elements must
    then be equal in `source`.
    """
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if overlaps_itself(target):
        for part, part_source in zip(target.unbind(0), source.unbind(0), strict=True):
            copy_bits(part, part_source)
    elif target.is_conj() or target.is_neg():
        target.copy_(source)
    else:
        bits(target).copy_(bits(source))


def can_be_copied_together(tensor: torch.Tensor) -> bool:
    """Whether torch copies the bits of `tensor` as they are, together with other tensors, into memory of the same dtype."""
    return tensor.dtype in _COPIED_TOGETHER and tensor.is_contiguous()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of `tensor` may lie at one address (a stride of 0, sliding windows)."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def is_floating(name: str) -> bool:
    """Whether `name` is a floating-point dtype: such dtypes can be converted to each other."""
    dtype = DTYPES.get(name)
    return dtype is not None and dtype.is_floating_point
