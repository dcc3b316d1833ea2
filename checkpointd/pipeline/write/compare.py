"""Stage 2 of a save: compare its spans with the checkpoint before, and decide which become references.

Unchanged spans are hashed, but not encoded and not written. If they are only a small part of the old object that holds them,
such as constants among weights, they are written again, since a reference keeps a whole object alive.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from checkpointd.codec.checksum import xxh3_128
from checkpointd.layout.manifest import ObjectRef
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.workers import aside, run_workers
from checkpointd.pipeline.write.dedup import Base, Held
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.split import ChunkKey, Span, grouped

REFERRED_PART_MIN = 0.25
"""The smallest part of an older object that is worth references, since all of the object stays."""
UNCHANGED_PART_MIN = 0.01
"""The smallest unchanged part of a shard that is worth references. With less, such as a few constants, all of it is written."""


@dataclass(slots=True)
class ChunkComparison:
    """The result of the comparison; empty if there was no checkpoint to compare with."""

    unchanged: dict[ChunkKey, Held] = field(default_factory=dict)
    """Spans that become references."""
    settled: set[ChunkKey] = field(default_factory=set)
    """Spans that have not changed, but are written again."""
    digests: dict[ChunkKey, bytes] = field(default_factory=dict)
    """The digests of compared spans that must be written."""

    def changed(self, spans: Iterable[Span]) -> list[Span]:
        """The spans that must be written."""
        return [span for span in spans if span.key not in self.unchanged]

    def keep_worthy(self, raw_total: int) -> None:
        """Drop references that are not worth it: all of them if they cover almost nothing of `raw_total` bytes, and those that
        would keep an object alive for a small part of it.
        """
        needed: dict[ObjectRef, int] = defaultdict(int)
        for ref, chunk in self.unchanged.values():
            needed[ref] += chunk.stored
        is_little = sum(chunk.raw for _, chunk in self.unchanged.values()) < UNCHANGED_PART_MIN * raw_total
        for key, (ref, chunk) in list(self.unchanged.items()):
            if is_little or needed[ref] < REFERRED_PART_MIN * ref.size:
                del self.unchanged[key]
                self.digests[key] = chunk.digest
                if not is_little:
                    self.settled.add(key)


async def compare(job: PersistJob, spans: list[Span]) -> ChunkComparison:
    """Find the unchanged spans that are worth a reference."""
    comparison, base = ChunkComparison(), job.base
    if base is None or not job.config.dedup:
        return comparison
    loop = asyncio.get_running_loop()

    async def look(group: list[Span]) -> None:
        with job.spent.hash.busy():
            found = await loop.run_in_executor(None, _compared, base, job.shard.buffer, group, job.makes_deltas)
        comparison.unchanged.update(found.unchanged)
        comparison.digests.update(found.digests)

    groups = await aside(len(spans), grouped, spans, job.config.block_bytes)
    await run_workers([partial(look, group) for group in groups], job.config.writes, job.check_stop)
    comparison.keep_worthy(job.shard.nbytes)
    return comparison


def _compared(base: Base, buffer: Bytes, group: list[Span], refers_to_deltas: bool) -> ChunkComparison:
    found = ChunkComparison()
    for span in group:
        held = base.held(span.tensor, span.start, span.nbytes)
        if held is None or (held[1].base is not None and not refers_to_deltas):
            continue
        digest = xxh3_128(span.of(buffer))
        if digest == held[1].digest:
            found.unchanged[span.key] = held
        else:
            found.digests[span.key] = digest
    return found
