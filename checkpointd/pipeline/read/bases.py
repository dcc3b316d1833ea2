"""The bases of deltas: the chunks of older attempts without which the deltas cannot be decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np

from checkpointd.errors import CodecError, DamagedError, NotFoundError
from checkpointd.pipeline.read.decode import decoded
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd.pipeline.shard import Bytes
from checkpointd.store.base import Store


async def read_bases(
    store: Store, wanted: Iterable[ChunkRead], on_bytes: Callable[[int], None]
) -> tuple[dict[int, Bytes], list[DamagedError]]:
    """The verified raw bytes of the base of each delta in `wanted`, by the place of the delta there, and the damage of bases.

    A damaged base makes every delta of it damaged, so the damage names both. Raises UnreadableError as `read_chunks` does.
    """
    loop, found, damage = asyncio.get_running_loop(), dict[int, Bytes](), list[DamagedError]()
    for number, item in enumerate(wanted):
        if item.chunk.base is None:
            continue
        base = item.chunk.full
        stored = np.empty(base.stored, dtype=np.uint8)
        try:
            await store.get_range(item.base_key, base.offset, stored.data)
            found[number] = await loop.run_in_executor(None, decoded, base, stored)
        except CodecError as error:
            damage.append(_damage(item, f"{item.base_key} is damaged at byte {base.offset}: {error}"))
        except (NotFoundError, DamagedError) as error:
            damage.append(_damage(item, str(error)))
        on_bytes(stored.nbytes)
    return found, damage


def _damage(item: ChunkRead, why: str) -> DamagedError:
    what = f"{why}; {item.key} at byte {item.chunk.offset} is a delta of it (rank {item.rank}, {item.entry.fqn})"
    return DamagedError(what, key=item.base_key, fqn=item.entry.fqn, rank=item.rank)
