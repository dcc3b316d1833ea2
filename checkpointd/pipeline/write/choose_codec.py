"""Stage 3 of a save: choose the codec of each tensor, and the chunks that may be stored as deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from checkpointd.codec import Codec, Estimate, choose
from checkpointd.pipeline.write.compare import ChunkComparison
from checkpointd.pipeline.write.dedup import Held
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.split import ChunkKey, Span

DELTA_BYTES_MIN = 64 << 10
"""Smaller chunks are stored in full, since a load reads two chunks for a delta."""


async def choose_codecs(job: PersistJob) -> dict[str, Codec]:
    """The codec of each tensor by FQN. Samples tensors only if the choice depends on it."""
    tensors, nothing, perfect = job.shard.tensors, Estimate(zstd=1.0, planes=1.0), Estimate(zstd=0.0, planes=0.0)
    forced = job.config.compression != "auto"
    if forced or _chosen(job, perfect) == "raw":
        return dict.fromkeys((t.fqn for t in tensors), _chosen(job, nothing))
    with job.spent.codec.busy():
        estimates = await asyncio.get_running_loop().run_in_executor(None, job.rates.estimates, job.shard)
    return {t.fqn: _chosen(job, estimates[t.fqn]) for t in tensors}


def choose_deltas(job: PersistJob, spans: Iterable[Span], comparison: ChunkComparison) -> dict[ChunkKey, Held]:
    """The chunk from which each span may be stored as a delta: the newest one at its place that is stored in full (DELTA-1)."""
    job.rates.pass_save()
    base, found = job.base, dict[ChunkKey, Held]()
    if base is None or not job.makes_deltas:
        return found
    for span in comparison.changed(spans):
        if span.nbytes < DELTA_BYTES_MIN or span.tensor.fqn in job.rates.left_out or span.key in comparison.settled:
            continue
        held = base.held(span.tensor, span.start, span.nbytes)
        if held is not None:
            found[span.key] = base.full(held[1])
    return found


def _chosen(job: PersistJob, estimate: Estimate) -> Codec:
    config, rates = job.config, job.rates
    return choose(config.compression, estimate, disk_bps=rates.disk_bps, encode_bps=rates.encode_bps, threads=config.encoders)
