"""Stage 7 of a save: build the index, which names every chunk of the shard, in this attempt or in older ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from checkpointd.layout.manifest import Alias, Chunk, Index, ObjectRef, TensorEntry
from checkpointd.pipeline.shard import ShardTensor
from checkpointd.pipeline.write.compare import ChunkComparison
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.split import ChunkKey, split
from checkpointd.pipeline.write.write_objects import WrittenObjects


def build_index(job: PersistJob, comparison: ChunkComparison, written: WrittenObjects) -> Index:
    """The index of a shard whose chunks were `written`, or are unchanged."""
    older = sorted({ref for ref, _ in comparison.unchanged.values()}, key=lambda ref: (ref.held_by, ref.name))
    positions = {ref: len(written.objects) + number for number, ref in enumerate(older)}
    chunks: dict[ChunkKey, Chunk] = dict(written.chunks)
    for key, (ref, chunk) in comparison.unchanged.items():
        chunks[key] = replace(chunk, object=positions[ref])

    def chunks_of(tensor: ShardTensor) -> tuple[Chunk, ...]:
        return tuple(chunks[span.key] for span in split([tensor], job.config.chunk_bytes))

    return index_of(job, (*written.objects, *older), chunks_of, aliases=job.shard.aliases, excluded=job.shard.excluded)


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
