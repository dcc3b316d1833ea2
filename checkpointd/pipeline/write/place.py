"""Stage 4 of a save: place the spans that must be written into this attempt's objects.

A rank writes up to two objects. One holds whole pages of the snapshot for spans stored raw, which go to the disk without a
copy. The other holds the encoded chunks back to back, in the order in which they are ready.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from checkpointd.codec import Codec
from checkpointd.pipeline.pages import PageRun, locate, runs_of
from checkpointd.pipeline.write.compare import ChunkComparison
from checkpointd.pipeline.write.split import ChunkKey, Span

RAW_OBJECT, ENCODED_OBJECT = 0, 1


@dataclass(frozen=True, slots=True)
class RawPlaces:
    """The raw object: runs of pages of the snapshot, back to back."""

    spans: list[Span]
    runs: list[PageRun]

    @property
    def nbytes(self) -> int:
        """The object's size."""
        return self.runs[-1].base + self.runs[-1].stop - self.runs[-1].start if self.runs else 0

    def offset(self, span: Span) -> int:
        """Where `span` begins in the object."""
        return locate(self.runs, span.offset)


@dataclass(frozen=True, slots=True)
class Placement:
    """The spans of the raw object, and those of the encoded object."""

    raw: RawPlaces
    encoded: list[Span]


def place(
    spans: list[Span], comparison: ChunkComparison, codecs: dict[str, Codec], deltas: Collection[ChunkKey] = ()
) -> Placement:
    """Place those of `spans` that must be written. Those in `deltas` may become deltas, so they are encoded.

    Unchanged spans that are written again go to the object that the changing spans of their codec do not use. The object then
    holds mostly unchanged bytes, so that later saves can refer to it.
    """
    changed = comparison.changed(spans)
    others = [span for span in changed if span.key not in deltas]
    raw = [span for span in others if (codecs[span.tensor.fqn] == "raw") != (span.key in comparison.settled)]
    chosen = {span.key for span in raw}
    return Placement(RawPlaces(raw, runs_of(raw)), [span for span in changed if span.key not in chosen])
