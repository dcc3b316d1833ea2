"""Tensors whose shape and dtype are known at once, and whose elements are read on demand."""

from __future__ import annotations

from typing import Protocol

import torch


class LazyTensor(Protocol):
    """A tensor that is read on demand."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def contiguous(self) -> torch.Tensor:
        """The tensor, read now."""
        ...

    def copy(self, start: int, target: torch.Tensor) -> None:
        """Fill `target` with the elements from `start` on, in row-major order."""
        ...


class ConvertedTensor:
    """A lazy tensor in another dtype."""

    def __init__(self, source: LazyTensor, dtype: torch.dtype) -> None:
        self._source, self.dtype, self.shape = source, dtype, source.shape

    def contiguous(self) -> torch.Tensor:
        """The tensor, read and converted now."""
        return self._source.contiguous().to(self.dtype)

    def copy(self, start: int, target: torch.Tensor) -> None:
        """Fill `target` with the elements from `start` on."""
        read = torch.empty(target.numel(), dtype=self._source.dtype)
        self._source.copy(start, read)
        target.copy_(read)


def as_fp32(tensor: LazyTensor) -> LazyTensor:
    """A floating tensor in fp32; any other tensor unchanged."""
    if not tensor.dtype.is_floating_point or tensor.dtype == torch.float32:
        return tensor
    return ConvertedTensor(tensor, torch.float32)
