"""Compares boxes that several ranks stored: equal bytes count as one tensor.

If the bytes differ, the coordinator aborts the save, and `verify` calls the checkpoint damaged.

Such boxes come from pipeline stages that each hold a tied embedding, and from replicas that the state does not show as
replicas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Index, TensorEntry
from checkpointd.layout.plan import Doubled
from checkpointd.pipeline.workers import run_workers

_Content = tuple[tuple[int, bytes], ...]
"""Size and digest of each chunk of a box. They are equal for equal bytes, since equal boxes are split into the same chunks."""

UNEQUAL_REMEDY = (
    "if it is one tensor, make it equal on these ranks before saving (broadcast it, or sum its gradients, as for a tied "
    "embedding); if it is several, give each a name of its own in the state; if DistributedDataParallel or a larger mesh holds "
    "it, pass the module itself"
)


async def unequal(read: Callable[[int], Awaitable[Index]], doubled: Iterable[Doubled], reads: int) -> str | None:
    """A message about the first tensor whose doubled boxes differ, with its FQN, ranks and a remedy; None if all are equal.

    `read` gives the index of a rank; it is called for `reads` ranks at once.
    """
    named: dict[int, set[str]] = {}
    for one in doubled:
        for rank in one.ranks:
            named.setdefault(rank, set()).add(one.fqn)
    found: dict[int, dict[tuple[str, Box], _Content]] = {}

    async def take(rank: int) -> None:
        index = await read(rank)
        found[rank] = {
            (entry.fqn, entry.box): _content(entry) for entry in index.tensors if entry.chunks and entry.fqn in named[rank]
        }

    await run_workers([partial(take, rank) for rank in named], reads)
    first: dict[tuple[str, Box], tuple[int, _Content]] = {}
    for rank in sorted(found):
        for place, content in found[rank].items():
            other, known = first.setdefault(place, (rank, content))
            if content != known:
                fqn, box = place
                what = f"the box {box.offsets}+{box.sizes} of it" if box.sizes else "it"
                return f"{fqn}: ranks {other} and {rank} both stored {what}, and their values differ: {UNEQUAL_REMEDY}"
    return None


def _content(entry: TensorEntry) -> _Content:
    return tuple((chunk.raw, chunk.digest) for chunk in entry.chunks)
