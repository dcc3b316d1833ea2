"""The pieces of an object that checkpoints at the mirror name. Whoever replaces the object there keeps all of them whole."""

from __future__ import annotations

from checkpointd.errors import DamagedError, UnreadableError
from checkpointd.layout.keys import holder_of, object_rank
from checkpointd.layout.log_records import LogState
from checkpointd.mirror.pieces import StoredPiece, pieces_by_object
from checkpointd.pipeline.read.index import read_index
from checkpointd.store.base import Store


async def named_pieces(mirror: Store, state: LogState, key: str, elsewhere: Store) -> set[StoredPiece]:
    """The pieces of the object `key` that the checkpoints in `state` of the mirror name.

    An index that is damaged at the mirror is read `elsewhere`, at the origin. Raises DamagedError or NotFoundError if that does
    not tell either.
    """
    holder, rank, found = holder_of(key), object_rank(key.rpartition("/")[2]), set[StoredPiece]()
    assert rank is not None  # the objects of tensors have the rank in their names
    for one in state.attempts.values():
        # Only the indexes of the rank that wrote the object name it (`check_chunks_ref`).
        if one.status != "checkpoint" or rank >= one.commit.world_size:
            continue
        if holder not in (one.prefix, *one.holders):
            continue
        try:
            index = await read_index(mirror, one, rank)
        except (DamagedError, UnreadableError):
            index = await read_index(elsewhere, one, rank)
        for named, pieces in zip(index.objects, pieces_by_object(index), strict=True):
            if named.key(one.prefix) == key:
                found.update(pieces)
    return found
