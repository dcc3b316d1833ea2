"""Captures files of torch.distributed.checkpoint (DCP) as its writer of files would write them.

Such a file holds a torch.save file of each item, one behind the other; the metadata tells where each begins.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from checkpointd_client.capture.torch_files import CapturedFile, FileBuilder, Hollow, hollow_of

_ARCHIVE = "archive"
"""torch.save calls what it writes to a stream so."""


def capture_items(
    name: str,
    key: str,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    results: list[WriteResult],
    optimizer_only: Collection[int],
) -> CapturedFile:
    """Capture `items` as the file `name`, which DCP's metadata calls `key`, without copying a tensor that is contiguous. Adds
    the result of each to `results`. `optimizer_only`: the addresses of storages that only optimizer steps change.
    """
    file = FileBuilder(name)
    for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
        data, start = planner.resolve_data(item), file.size
        if isinstance(data, io.BytesIO):
            file.add_bytes(data.getbuffer())
        else:
            tensor = data.detach().contiguous()
            by_steps = tensor.untyped_storage().data_ptr() in optimizer_only
            hollow = _hollow_of(tuple(tensor.shape), tensor.dtype)
            file.add(hollow, [tensor] * len(hollow.placeholders), [by_steps] * len(hollow.placeholders))
        size = file.size - start
        info: Any = _StorageInfo(key, start, size)
        results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=info))
    return file.captured()


@lru_cache(maxsize=4096)
def _hollow_of(shape: tuple[int, ...], dtype: torch.dtype) -> Hollow:
    """The file of a tensor in host memory, whatever device the tensor is on. Nothing touches the memory of this one."""
    return hollow_of(_ARCHIVE, torch.empty(shape, dtype=dtype))
