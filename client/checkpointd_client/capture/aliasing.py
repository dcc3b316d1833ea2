"""Finds the tensors that share memory by their addresses, whatever objects they share it through.

Two devices may use the same addresses for different memory, so the device is a part of the address here. An interval of bytes
spans a tensor's first to last element. Strided tensors may interleave in an interval without sharing an element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.layout.indexes import Alias
from checkpointd.layout.strides import contiguous_stride
from checkpointd.layout.tree import Overlap

Shape = tuple[int, ...]

_EXACT_TEST_EFFORT = 100_000
"""The limit of numpy's exact search for a common element. Beyond the limit, two tensors count as sharing memory."""


_DEVICE_SHIFT = 58
"""No process has addresses of so many bits."""


def address_of(tensor: torch.Tensor) -> int:
    """Where `tensor` begins. In host memory this is its address; on a device, the device's number is added above it."""
    if tensor.is_cpu:
        return tensor.data_ptr()
    return tensor.data_ptr() + (1 + tensor.get_device() << _DEVICE_SHIFT)


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """The memory of a tensor: addresses, strides in elements, and torch's lazy bits."""

    start: int
    end: int
    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MemoryRegion:
        start = address_of(tensor)
        return cls(
            start,
            start + extent(tensor),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.is_contiguous(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def lazy_bits(self) -> tuple[bool, bool]:
        return self.conjugate, self.negative

    @property
    def byte_stride(self) -> tuple[int, ...]:
        """Strides in bytes; 0 for a dimension of one element, which needs no stride."""
        return tuple(s * self.dtype.itemsize if n > 1 else 0 for n, s in zip(self.shape, self.stride, strict=True))

    def equals(self, other: MemoryRegion) -> bool:
        """Whether both are the same elements in the same order."""
        return (
            (self.start, self.end, self.shape, self.dtype) == (other.start, other.end, other.shape, other.dtype)
            and self.byte_stride == other.byte_stride
            and self.lazy_bits == other.lazy_bits
        )

    def shares_with(self, other: MemoryRegion) -> bool:
        """Whether an element of this region has a byte in common with an element of the other."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.contiguous and other.contiguous:
            return True
        try:
            return np.shares_memory(_addresses(self), _addresses(other), max_work=_EXACT_TEST_EFFORT)  # type: ignore[arg-type]  # typed for two of its values
        except np.exceptions.TooHardError:
            return True


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of `tensor` to the end of its last one."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def overlapping(starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """The groups of two or more intervals that overlap one another (in a chain), as positions. Empty intervals overlap none."""
    first = np.fromiter(starts, np.uint64, len(starts))
    last = np.fromiter(ends, np.uint64, len(ends))
    order = np.argsort(first, kind="stable")
    order = order[first[order] < last[order]]
    if len(order) < 2:
        return []
    reach = np.maximum.accumulate(last[order])
    joined = first[order][1:] < reach[:-1]
    if not joined.any():
        return []
    groups = np.split(order, np.flatnonzero(~joined) + 1)
    return [group.tolist() for group in groups if len(group) > 1]


def overlapping_pairs(regions: Sequence[MemoryRegion]) -> Iterator[tuple[int, int]]:
    """Positions of every two regions that share memory."""
    for group in overlapping([region.start for region in regions], [region.end for region in regions]):
        active: list[int] = []
        for i in group:
            active = [j for j in active if regions[j].end > regions[i].start]
            yield from ((j, i) for j in active if regions[j].shares_with(regions[i]))
            active.append(i)


def alias_of(fqn: str, part: MemoryRegion, owner_fqn: str, owner: MemoryRegion) -> Alias | None:
    """`part` as an alias of `owner` if it has the same elements, or lies inside a contiguous owner; else None."""
    if part.equals(owner):
        return Alias(fqn, owner_fqn, part.shape, contiguous_stride(part.shape), 0)
    offset, rest = divmod(part.start - owner.start, owner.dtype.itemsize)
    plain = owner.contiguous and not any(owner.lazy_bits) and not any(part.lazy_bits) and part.dtype == owner.dtype
    if plain and rest == 0 and offset >= 0 and part.end <= owner.end:
        return Alias(fqn, owner_fqn, part.shape, part.stride, offset)
    return None


def overlap_of(region: MemoryRegion, group: int, lowest: int) -> Overlap:
    """The place of `region` in the memory of its group, whose lowest address is `lowest`."""
    return Overlap(group, region.start - lowest, region.byte_stride, region.conjugate, region.negative)


def _addresses(region: MemoryRegion) -> Any:
    """An array for numpy's overlap test. The test reads only addresses, so this works for device memory, too."""
    item = region.dtype.itemsize
    return array_at(region.start, region.shape, tuple(s * item for s in region.stride), item)


def array_at(
    start: int, shape: Shape, strides: tuple[int, ...], item: int, *, kind: str = "V", owner: object = None
) -> NDArray[Any]:
    """The memory at an address, as items of `item` bytes; strides in bytes. The array keeps `owner` alive, and nothing else."""

    class _Interface:
        owner: object
        __array_interface__ = {  # noqa: RUF012  # numpy's protocol wants a dict here
            "data": (start, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|{kind}{item}",
            "version": 3,
        }

    interface = _Interface()
    interface.owner = owner  # not on the class, which refers to itself and so would be freed only by the garbage collector
    return np.asarray(interface)
