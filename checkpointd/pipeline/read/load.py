"""The stages of a load in order. Each stage uses only the results of earlier ones.

1. choose a checkpoint (`choice.py` for a reader, `root/candidates.py` for a job)
2. read the indexes of its ranks (`index.py`), which together make the checkpoint view (`checkpoint_view.py`)
3. plan which chunks to read, and which part of each goes to which sink (`plan.py`)
4. read neighbouring chunks together (`chunks.py`)
5. check a chunk, decode it, and check the result (`decode.py`)
6. fill: pass the bytes to the sinks, which put them into the user's tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.chunks import read_chunks
from checkpointd.pipeline.read.plan import BoxRequest, Sink, plan_reads, rank_reads
from checkpointd.pipeline.read.shared_reads import Sharing
from checkpointd.store.base import Store


async def read_boxes(
    store: Store,
    world: CheckpointView,
    wants: Iterable[BoxRequest],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
    sharing: Sharing | None = None,
) -> list[DamagedError]:
    """Read the chunks that the wanted boxes touch, verify each, and pass every sink its elements, in any order.

    Returns all damage: first boxes that the ranks did not store whole, of which nothing is read, then damaged chunks in the
    order of the objects. Whole chunks reach their sinks even if others are damaged. Raises NotFoundError if a tensor or a rank
    does not exist, FormatError if a box does not lie in its tensor, StoreError if the storage fails.
    """
    gaps, wanted = plan_reads(world, wants)
    return gaps + await read_chunks(store, wanted, config, on_bytes, sharing)


async def read_tensors(
    store: Store,
    prefix: str,
    index: Index,
    sinks: Mapping[str, Sink | None],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
    sharing: Sharing | None = None,
) -> list[DamagedError]:
    """Read and verify the chunks of one rank's tensors named in `sinks`, and pass them on; a sink of None only verifies.

    Returns and raises as `read_chunks` does.
    """
    return await read_chunks(store, rank_reads(prefix, index, sinks), config, on_bytes, sharing)
