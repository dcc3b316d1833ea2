"""Sinks: they put the bytes of a chunk into the memory of the tensor that is loaded.

Invariants
  SINK-1  A sink runs on any thread. On a device its copies are queued on the stream that was current when the sink was made. So
      they come after the work that the caller had queued, and before the work that it queues later.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.layout.boxes import Box
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.regions import slices
from checkpointd.pipeline.read.plan import CARRIERS, BoxSink, Sink
from checkpointd.pipeline.shard import Bytes
from checkpointd_client import devices
from checkpointd_client.capture.dtypes import DTYPES, bits, copy_bits


def sink_for(target: torch.Tensor, dtype: str) -> Sink:
    """A sink that fills `target` in place, whatever its device and strides; `dtype` is its dtype by name."""
    live = target.detach()
    if not live.numel():
        return lambda _start, _data: None  # the strides of an empty view may be any
    if live.device.type == "cpu" and live.is_contiguous() and not live.is_conj() and not live.is_neg():
        return _into_bytes(live)
    if live.is_contiguous():
        return _into_flat(live, ITEM_BYTES[dtype])
    return _Gathering(live)


def _into_bytes(live: torch.Tensor) -> Sink:
    memory = live.reshape(-1).view(torch.uint8).numpy()

    def sink(start: int, data: Bytes) -> None:
        memory[start : start + data.nbytes] = data

    return sink


def _into_flat(live: torch.Tensor, item: int) -> Sink:
    flat, ordered = live.view(-1), devices.callers_stream(live.device)

    def sink(start: int, data: Bytes) -> None:
        part = flat[start // item : (start + data.nbytes) // item]
        with ordered(), torch.no_grad():
            bits(part).copy_(bits(torch.from_numpy(data).view(live.dtype)))

    return sink


class _Gathering:
    """A sink for a tensor that is not contiguous: it gathers the bytes, then copies them at once."""

    def __init__(self, live: torch.Tensor) -> None:
        self._live, self._ordered = live, devices.callers_stream(live.device)
        self._left = live.numel() * live.itemsize
        self._bytes: Bytes | None = None
        self._lock = threading.Lock()

    def __call__(self, start: int, data: Bytes) -> None:
        # Chunks come on several threads at once; the lock is held for the bookkeeping, not for the copy.
        with self._lock:
            if self._bytes is None:
                self._bytes = np.empty(self._left, dtype=np.uint8)
            gathered = self._bytes
        gathered[start : start + data.nbytes] = data
        with self._lock:
            self._left -= data.nbytes
            last = self._left == 0
        if last:
            whole = torch.from_numpy(gathered).view(self._live.dtype).view(self._live.shape)
            with self._ordered(), torch.no_grad():
                copy_bits(self._live, whole)
            self._bytes = None


def box_sink(target: torch.Tensor, box: Box, dtype: str) -> BoxSink:
    """A sink that fills `target`, which holds `box` of a stored tensor of `dtype`; converts if `target` has another dtype."""
    live = target.detach()
    if live.dtype != DTYPES[dtype]:
        return _converting(live, box, DTYPES[dtype])
    if live.device.type == "cpu" and not live.is_conj() and not live.is_neg():
        return _into_array(live, box)
    return _into_view(live, box)


def _into_array(live: torch.Tensor, box: Box) -> BoxSink:
    memory: NDArray[Any] = bits(live).numpy()
    memory = memory.view(CARRIERS[live.itemsize])

    def sink(inside: Box, data: NDArray[Any]) -> None:
        memory[slices(box, inside)] = data

    return sink


def _as_tensor(data: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The elements of `data`, an array of carriers, as a tensor of `dtype`."""
    row = torch.from_numpy(np.array(data, order="C").reshape(-1).view(np.uint8))
    return row.view(dtype).view(data.shape)


def _into_view(live: torch.Tensor, box: Box) -> BoxSink:
    ordered = devices.callers_stream(live.device)

    def sink(inside: Box, data: NDArray[Any]) -> None:
        with ordered(), torch.no_grad():
            copy_bits(live[slices(box, inside)], _as_tensor(data, live.dtype).to(live.device))

    return sink


def _converting(live: torch.Tensor, box: Box, dtype: torch.dtype) -> BoxSink:
    ordered = devices.callers_stream(live.device)

    def sink(inside: Box, data: NDArray[Any]) -> None:
        with ordered(), torch.no_grad():
            live[slices(box, inside)].copy_(_as_tensor(data, dtype))

    return sink
