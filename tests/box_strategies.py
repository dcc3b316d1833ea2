"""Hypothesis strategies for shapes, for boxes in them, and for boxes that tile them, also uneven and empty ones."""

from __future__ import annotations

from hypothesis import strategies as st

from checkpointd.layout.boxes import Box, whole

Shape = tuple[int, ...]

shapes = st.one_of(
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
    st.lists(st.integers(1, 3), min_size=4, max_size=6).map(tuple),
)
"""From no dimensions to six; now and then without elements."""


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box inside `shape`, empty ones included."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def tilings_of(draw: st.DrawFn, shape: Shape, cuts: int = 6) -> list[Box]:
    """Boxes that hold each element of `shape` once: `shape` cut up to `cuts` times, each time one box along one dimension."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, cuts)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += _cut(box, dim, draw(st.integers(0, box.sizes[dim])))
    # Two empty boxes may be the same one, which no rank lists twice.
    return draw(st.permutations(sorted(set(boxes), key=lambda box: (box.offsets, box.sizes))))


def _cut(box: Box, dim: int, at: int) -> list[Box]:
    first, rest, offsets = [*box.sizes], [*box.sizes], [*box.offsets]
    first[dim], rest[dim], offsets[dim] = at, box.sizes[dim] - at, box.offsets[dim] + at
    return [Box(box.offsets, tuple(first)), Box(tuple(offsets), tuple(rest))]
