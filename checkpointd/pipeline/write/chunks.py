"""The stages that turn a shard into durable chunks, in order. Each stage uses only the results of earlier ones.

Invariants
  CHUNKS-1  When `write_chunks` returns, every object of this attempt that the index names is durable.
  CHUNKS-2  When it returns or raises, no thread reads the buffer any more.
  CHUNKS-3  Memory beside the buffer stays below `budget_bytes`.
"""

from __future__ import annotations

from checkpointd.layout.indexes import Index
from checkpointd.pipeline.workers import aside
from checkpointd.pipeline.write.build_index import build_index
from checkpointd.pipeline.write.choose_codec import choose_codecs, choose_deltas
from checkpointd.pipeline.write.compare import compare
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.place import place
from checkpointd.pipeline.write.split import split
from checkpointd.pipeline.write.write_objects import write_objects


async def write_chunks(job: PersistJob) -> Index:
    """Write all changed chunks durably, and return the index of the shard, which is not written yet."""
    job.progress.begin(job.shard.nbytes)
    tensors = len(job.shard.tensors)
    spans = await aside(tensors, split, job.shard.tensors, job.config.chunk_bytes)
    comparison = await compare(job, spans)
    job.progress.keep(sum(span.nbytes for span in spans if span.key in comparison.unchanged))
    codecs = await choose_codecs(job)
    deltas = await aside(tensors, choose_deltas, job, spans, comparison)
    placement = await aside(tensors, place, spans, comparison, codecs, deltas)
    # Encodes each chunk just before it is written.
    written = await write_objects(job, placement, codecs, comparison.digests, deltas)
    return await aside(tensors, build_index, job, comparison, written)
