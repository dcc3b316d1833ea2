"""Chooses a codec for each tensor: `sample` estimates the ratios, then `choose` decides from the estimates.

The model is a pipeline in which `threads` encoders feed one disk. A tensor of B bytes is durable after B / disk if stored raw,
and after max(B / (encode * threads), ratio * B / disk) if compressed, since the slower of the two stages sets the pace. Each
compressed tensor beats its own raw time in both stages, so the whole checkpoint does, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from checkpointd.codec.buffers import Buffer, Bytes, byte_view
from checkpointd.codec.chunk import Codec, encode
from checkpointd.codec.element import ElementType

Compression: TypeAlias = Literal["auto", "none", "zstd", "planes"]
"""The user's choice. `auto` compresses only if a checkpoint is durable sooner than raw; the others always apply."""

RUNS, RUN_ELEMENTS = 3, 16 << 10
"""A tensor is sampled in this many runs, spread evenly, of this many elements."""

GAIN_MIN = 0.10
"""Compression must save at least this share of the raw time: estimates err, and it takes cores from the trainer."""

ASSUMED_PLANES_BPS = 1.0e9
"""Raw bytes per second that one thread encodes by `planes`, until a save has measured it (`benchmarks/codec.py`)."""
ZSTD_SPEED = 0.25
"""A lower bound for the speed of `zstd` over the speed of `planes` on one machine."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Stored size over raw size for each codec; below 1 is a gain."""

    zstd: float
    planes: float


def planes_ratio(data: Buffer, element: ElementType) -> float:
    """Estimate the ratio of `planes` alone."""
    return _ratio(_taken(byte_view(data), element.itemsize), "planes", element)


def sample(data: Buffer, element: ElementType) -> Estimate:
    """Estimate the ratios of a tensor from 3 runs of 16 Ki elements, in about a millisecond. Small tensors get exact ratios.

    Raises:
        ValueError: `data` is not C-contiguous.
    """
    taken = _taken(byte_view(data), element.itemsize)
    if taken.size == 0:
        return Estimate(zstd=1.0, planes=1.0)
    return Estimate(zstd=_ratio(taken, "zstd", element), planes=_ratio(taken, "planes", element))


def choose(
    compression: Compression,
    estimate: Estimate,
    *,
    disk_bps: float | None,
    encode_bps: float | None = None,
    threads: int = 1,
) -> Codec:
    """The codec for a tensor with this estimate.

    `disk_bps`: raw bytes per second that this writer makes durable; None before the first measurement.
    `encode_bps`: raw bytes per second that ONE thread encodes by `planes`; None assumes ASSUMED_PLANES_BPS. `threads`: how many
    threads encode at once. Only `auto` uses these numbers. It stores raw until the disk was measured: that makes one save at
    most 1 / ratio times as long, about 1.5 for bf16 weights, while compression on a slow core can cost much more.

    Raises:
        ValueError: an unknown compression, a speed that is not positive, or no thread.
    """
    if compression not in get_args(Compression):
        raise ValueError(f"compression is {compression!r}, not one of {', '.join(get_args(Compression))}")
    if threads < 1 or not all(speed is None or speed > 0 for speed in (disk_bps, encode_bps)):
        raise ValueError(f"need positive speeds and a thread: {disk_bps=} {encode_bps=} {threads=}")
    if compression == "none":
        return "raw"
    if compression != "auto":
        return compression
    if disk_bps is None:
        return "raw"
    return _soonest(estimate, disk_bps, threads * (encode_bps or ASSUMED_PLANES_BPS))


def _soonest(estimate: Estimate, disk_bps: float, planes_bps: float) -> Codec:
    """The codec that is durable first, compared in seconds per raw byte."""
    planes_s = max(1 / planes_bps, estimate.planes / disk_bps)
    zstd_s = max(1 / (planes_bps * ZSTD_SPEED), estimate.zstd / disk_bps)
    if min(planes_s, zstd_s) > (1 - GAIN_MIN) / disk_bps:
        return "raw"
    return "planes" if planes_s <= zstd_s else "zstd"


def _taken(raw: Bytes, itemsize: int) -> Bytes:
    """The sampled runs, back to back; all of `raw` if it is not larger than the sample."""
    run_size = RUN_ELEMENTS * itemsize
    if raw.size <= RUNS * run_size:
        return raw
    # The first and the last run touch the ends; each begins at a whole element.
    step = (raw.size - run_size) // (RUNS - 1) // itemsize * itemsize
    return np.concatenate([raw[start : start + run_size] for start in range(0, RUNS * step, step)])


def _ratio(raw: Bytes, codec: Codec, element: ElementType) -> float:
    stored = encode(raw, codec=codec, itemsize=element.itemsize, kind=element.kind)
    return stored.nbytes / raw.size
