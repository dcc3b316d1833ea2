"""Mapped files that are read once: their pages go as soon as they were used, rather than when memory is short."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import torch

_PAGEOUT = 21
"""Of Linux since 5.4 (madvise(2)): it drops clean pages of files, and never changes what memory says."""


def drop(tensor: torch.Tensor) -> None:
    """Let the pages of a contiguous tensor go; they are read again when needed. Where that cannot be, nothing is done."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > first and sys.platform == "linux":
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _PAGEOUT)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
