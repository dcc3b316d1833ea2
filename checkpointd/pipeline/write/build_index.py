"""Stage 7 of a save: build the index, which names every chunk of the shard, in this attempt or in older ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from checkpointd.layout.indexes import Alias, Chunk, Index, TensorEntry
from checkpointd.layout.manifest import ObjectRef
from checkpointd.pipeline.shard import ShardTensor
from checkpointd.pipeline.write.compare import ChunkComparison
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.split import ChunkKey, split
from checkpointd.pipeline.write.write_objects import WrittenObjects


def build_index(job: PersistJob, comparison: ChunkComparison, written: WrittenObjects) -> Index:
    """The index of a shard whose chunks were `written`, or are unchanged."""
    bases = dict(written.bases)
    for key, (_, chunk) in comparison.unchanged.items():
        if chunk.base is not None and job.base is not None:
            bases[key] = job.base.full(chunk)
    held = (*comparison.unchanged.values(), *bases.values())
    older = sorted({ref for ref, _ in held}, key=lambda ref: (ref.held_by, ref.name))
    positions = {ref: len(written.objects) + number for number, ref in enumerate(older)}
    chunks: dict[ChunkKey, Chunk] = dict(written.chunks)
    for key, (ref, chunk) in comparison.unchanged.items():
        chunks[key] = replace(chunk, object=positions[ref])
    for key, (ref, base) in bases.items():
        chunks[key] = replace(chunks[key], base=base.as_base(positions[ref]))

    def chunks_of(tensor: ShardTensor) -> tuple[Chunk, ...]:
        return tuple(chunks[span.key] for span in split([tensor], job.config.chunk_bytes))

    index = index_of(job, (*written.objects, *older), chunks_of, aliases=job.shard.aliases, excluded=job.shard.excluded)
    return replace(index, since_full=job.base.since_full + 1) if bases and job.base is not None else index


def index_of(
    job: PersistJob,
    objects: Sequence[ObjectRef],
    chunks_of: Callable[[ShardTensor], tuple[Chunk, ...]],
    *,
    aliases: tuple[Alias, ...] = (),
    excluded: tuple[str, ...] = (),
) -> Index:
    """The index of this job's shard, whose chunks lie in `objects`."""
    info = job.info
    return Index(
        tag=info.tag,
        attempt=str(info.attempt),
        rank=info.rank,
        world_size=info.world_size,
        step=info.step,
        objects=tuple(objects),
        tensors=tuple(TensorEntry(t.fqn, t.dtype, t.shape, t.box, t.scope, chunks_of(t)) for t in job.shard.tensors),
        aliases=aliases,
        excluded=excluded,
        tree=job.shard.tree,
    )
