"""Sinks: they put the bytes of a chunk into the memory of the tensor that is loaded, or are that memory.

Invariants
  SINK-1  A sink runs on any thread, and on several at once. Bytes for a device go through the load's uploads, which
      keep the copies in order with the caller's streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.regions import regions, slices
from checkpointd.pipeline.read.plan import CARRIERS, BoxMemory, BoxSink, ByteMemory, Sink
from checkpointd.pipeline.shard import Bytes
from checkpointd_client.capture.aliasing import array_at
from checkpointd_client.capture.dtypes import DTYPES, bits
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.stored import Entries
from checkpointd_client.restore.uploads import Uploads, fill_at_once


def sinks_for(targets: Sequence[Target], entries: Entries, uploads: Uploads) -> dict[str, Sink]:
    """By FQN, a sink for each of `targets`, which hold all of their stored tensors."""
    plain = [target for target in targets if _is_host_memory(target.tensor)]
    memory = _bytes_of([target.tensor for target in plain])
    sinks: dict[str, Sink] = {target.fqn: ByteMemory(data) for target, data in zip(plain, memory, strict=True)}
    for target in targets:
        if target.fqn not in sinks:
            sinks[target.fqn] = sink_for(target.tensor, target.fqn, entries[target.fqn][0], uploads)
    return sinks


def _is_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes > 0 and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensors: list[torch.Tensor]) -> list[Bytes]:
    """The bytes of contiguous tensors in host memory, made for many at a tenth of the cost of `Tensor.numpy`.

    They are parts of one array, which spans them all and keeps them alive. Other memory lies in between.
    """
    if not tensors:
        return []
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [start + tensor.nbytes for start, tensor in zip(starts, tensors, strict=True)]
    low = min(starts)
    span = array_at(low, (max(ends) - low,), (1,), 1, kind="u", owner=tensors)
    return [span[start - low : end - low] for start, end in zip(starts, ends, strict=True)]


def sink_for(target: torch.Tensor, fqn: str, dtype: str, uploads: Uploads) -> Sink:
    """A sink that fills `target` in place, whatever its device and strides; `dtype` is its dtype by name."""
    live = target.detach()
    if not live.numel():
        return lambda _start, _data: None  # the strides of an empty view may be any
    if live.is_contiguous():
        live = live.view(-1)  # each chunk is one box of it
    frame = whole(tuple(live.shape))
    return _in_boxes(frame, ITEM_BYTES[dtype], box_sink(live, frame, fqn, dtype, uploads))


def _in_boxes(frame: Box, item: int, fill: BoxSink) -> Sink:
    """A sink of runs of the elements of `frame`, each of which is a few boxes."""

    def sink(start: int, data: Bytes) -> None:
        run, first = data.view(CARRIERS[item]), start // item
        for region in regions(frame, first, first + run.size, frame):
            fill(region.box, region.of(run))

    return sink


def box_sink(target: torch.Tensor, box: Box, fqn: str, dtype: str, uploads: Uploads) -> BoxSink:
    """A sink that fills `target`, which holds `box` of a stored tensor of `dtype`; converts if `target` has another dtype."""
    if target.device.type == "cpu":
        return host_sink(target, box, dtype)
    live, stored = target.detach(), DTYPES[dtype]
    fill = uploads.into(live, fqn)

    def sink(inside: Box, data: NDArray[Any]) -> None:
        fill(live[slices(box, inside)], data if live.dtype == stored else _converted(data, stored, live.dtype))

    return sink


def host_sink(target: torch.Tensor, box: Box, dtype: str) -> BoxSink:
    """`box_sink` for a tensor in host memory."""
    live, stored = target.detach(), DTYPES[dtype]
    if live.dtype != stored:
        return _converting(live, box, stored)
    if live.is_conj() or live.is_neg():
        return lambda inside, data: fill_at_once(live[slices(box, inside)], data)
    return _into_array(live, box)


def _into_array(live: torch.Tensor, box: Box) -> BoxSink:
    memory: NDArray[Any] = bits(live).numpy()
    memory = memory.view(CARRIERS[live.itemsize])
    if memory.flags.c_contiguous:
        return BoxMemory(box, memory)

    def sink(inside: Box, data: NDArray[Any]) -> None:
        memory[slices(box, inside)] = data

    return sink


def _converting(live: torch.Tensor, box: Box, dtype: torch.dtype) -> BoxSink:
    def sink(inside: Box, data: NDArray[Any]) -> None:
        with torch.no_grad():
            live[slices(box, inside)].copy_(_as_tensor(data, dtype))

    return sink


def _as_tensor(data: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The elements of `data`, an array of carriers, as a tensor of `dtype`."""
    row = torch.from_numpy(np.array(data, order="C").reshape(-1).view(np.uint8))
    return row.view(dtype).view(data.shape)


def _converted(data: NDArray[Any], stored: torch.dtype, wanted: torch.dtype) -> NDArray[Any]:
    """The same elements in another dtype, converted on the host as for a tensor there."""
    array: NDArray[Any] = bits(_as_tensor(data, stored).to(wanted)).numpy()
    return array.view(CARRIERS[wanted.itemsize])
