"""Stage 3 of a save: choose the codec of each tensor."""

from __future__ import annotations

import asyncio

from checkpointd.codec import Codec, Estimate, choose
from checkpointd.pipeline.write.job import PersistJob


async def choose_codecs(job: PersistJob) -> dict[str, Codec]:
    """The codec of each tensor by FQN. Samples tensors only if the choice depends on it."""
    tensors, nothing, perfect = job.shard.tensors, Estimate(zstd=1.0, planes=1.0), Estimate(zstd=0.0, planes=0.0)
    forced = job.config.compression != "auto"
    if forced or _chosen(job, perfect) == "raw":
        return dict.fromkeys((t.fqn for t in tensors), _chosen(job, nothing))
    with job.spent.codec.busy():
        estimates = await asyncio.get_running_loop().run_in_executor(None, job.rates.estimates, job.shard)
    return {t.fqn: _chosen(job, estimates[t.fqn]) for t in tensors}


def _chosen(job: PersistJob, estimate: Estimate) -> Codec:
    config, rates = job.config, job.rates
    return choose(config.compression, estimate, disk_bps=rates.disk_bps, encode_bps=rates.encode_bps, threads=config.encoders)
