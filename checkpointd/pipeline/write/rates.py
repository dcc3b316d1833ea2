"""Measurements from saves, from which the next save chooses its codecs: speed of store and encoders, ratios of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from checkpointd.codec import ElementType, Estimate, sample
from checkpointd.pipeline.shard import Shard, ShardTensor

DISK_SAMPLE_BYTES_MIN = 32 << 20
"""Smaller writes measure caches and fsync more than the store."""
ENCODE_SAMPLE_BYTES_MIN = 1 << 20
SMALL_BYTES = 64 << 10
"""Tensors of at most this size may share an estimate."""
ALIKE_MIN = 64
"""More tensors than this of one dtype and one small size share an estimate, from about so many of them."""
ESTIMATES_LAST_SAVES = 16
"""A tensor is sampled again after this many saves, since weights change slowly."""


@dataclass(slots=True)
class Rates:
    """The measurements that one rank's saves share: speeds (None until measured), and each tensor's estimate."""

    disk_bps: float | None = None
    encode_bps: float | None = None
    _estimates: dict[tuple[str, int], Estimate] = field(default_factory=dict)
    _saves: int = 0
    _left_out: dict[str, int] = field(default_factory=dict)

    def measured_disk(self, nbytes: int, seconds: float) -> None:
        if nbytes >= DISK_SAMPLE_BYTES_MIN and seconds > 0:
            self.disk_bps = _smooth(self.disk_bps, nbytes / seconds)

    def measured_encode(self, nbytes: int, seconds: float) -> None:
        if nbytes >= ENCODE_SAMPLE_BYTES_MIN and seconds > 0:
            self.encode_bps = _smooth(self.encode_bps, nbytes / seconds)

    @property
    def left_out(self) -> Collection[str]:
        """The tensors, by FQN, of which no deltas are made for now, so that their bases need not be read."""
        return self._left_out.keys()

    def leave_out(self, fqn: str, saves: int) -> None:
        """Make no deltas of the tensor until `pass_save` was called so often."""
        self._left_out[fqn] = saves

    def pass_save(self) -> None:
        self._left_out = {fqn: left - 1 for fqn, left in self._left_out.items() if left > 1}

    def estimates(self, shard: Shard) -> dict[str, Estimate]:
        """Ratios by FQN, sampled if they are unknown or too old. Call it on a thread: it takes up to a millisecond a tensor."""
        if self._saves % ESTIMATES_LAST_SAVES == 0:
            self._estimates.clear()
        self._saves += 1
        self._sample_alike(shard)
        return {tensor.fqn: self._estimate(shard, tensor) for tensor in shard.tensors}

    def _sample_alike(self, shard: Shard) -> None:
        """Give many small tensors of one dtype and size one estimate, from some of them: a sample takes longer than to encode
        one.
        """
        alike: dict[tuple[str, int], list[ShardTensor]] = defaultdict(list)
        for tensor in shard.tensors:
            if 0 < tensor.nbytes <= SMALL_BYTES and (tensor.fqn, tensor.nbytes) not in self._estimates:
                alike[tensor.dtype, tensor.nbytes].append(tensor)
        for (dtype, _), tensors in alike.items():
            if len(tensors) > ALIKE_MIN:
                some = tensors[:: len(tensors) // ALIKE_MIN]
                data = np.concatenate([shard.buffer[one.offset : one.offset + one.nbytes] for one in some])
                estimate = sample(data, ElementType.of_dtype(dtype))
                self._estimates.update({(one.fqn, one.nbytes): estimate for one in tensors})

    def _estimate(self, shard: Shard, tensor: ShardTensor) -> Estimate:
        key = (tensor.fqn, tensor.nbytes)
        if key not in self._estimates:
            data = shard.buffer[tensor.offset : tensor.offset + tensor.nbytes]
            self._estimates[key] = sample(data, ElementType.of_dtype(tensor.dtype))
        return self._estimates[key]


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else 0.5 * old + 0.5 * new
