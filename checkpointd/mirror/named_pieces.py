"""The pieces of an object that attempts at the mirror name. Whoever replaces the object there keeps all of them whole."""

from __future__ import annotations

from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.catalog_records import CatalogEntry
from checkpointd.layout.indexes import Index, decode_index
from checkpointd.layout.keys import holder_of, index_rank, object_key, object_rank
from checkpointd.layout.manifest import LISTING_BYTES_MAX
from checkpointd.mirror.pieces import StoredPiece, pieces_by_object
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.store.base import Store


async def named_pieces(mirror: Store, key: str, elsewhere: Store) -> set[StoredPiece]:
    """The pieces of the object `key` that checkpoints at the mirror name, and copies that were begun and may be committed yet.

    An index that is damaged at the mirror is read `elsewhere`, at the origin. Raises DamagedError or NotFoundError if that does
    not tell either.
    """
    holder, found = holder_of(key), set[StoredPiece]()

    def may_name(entry: CatalogEntry) -> bool:
        outcome = None if entry.removed else entry.decoded
        return outcome is not None and holder in (outcome.prefix, *outcome.holders)

    for view in await catalog.scan(mirror, newest=0, wanted=may_name):
        for index in await _indexes(mirror, view, key, elsewhere):
            for named, pieces in zip(index.objects, pieces_by_object(index), strict=True):
                if named.key(view.prefix) == key:
                    found.update(pieces)
    return found


async def _indexes(mirror: Store, view: AttemptView, key: str, elsewhere: Store) -> list[Index]:
    """The indexes of `view` that may name the object: those of the rank that wrote it (`check_chunks_ref`)."""
    holder, rank = holder_of(key), object_rank(key.rpartition("/")[2])
    assert rank is not None  # the objects of tensors have the rank in their names
    match view.state:
        case "committed":
            assert view.outcome is not None
            if rank >= view.outcome.world_size or holder not in (view.prefix, *view.outcome.holders):
                return []
            checkpoint = Checkpoint(view.tag, view.attempt, view.outcome)
            try:
                return [await read_index(mirror, checkpoint, rank)]
            except (DamagedError, UnreadableError):
                return [await read_index(elsewhere, checkpoint, rank)]
        case "in-doubt":
            names = [name for name in view.sizes if index_rank(name) == rank]
            return [index for name in names if (index := await _begun(mirror, object_key(view.prefix, name))) is not None]
        case "damaged" | "unreadable":
            raise DamagedError(f"the outcome of {view.prefix} at {mirror.url}, which may need parts of {key}, is {view.state}")
        case _:
            return []


async def _begun(mirror: Store, key: str) -> Index | None:
    """The index of a copy that was begun; None if it is not whole, so that nothing is committed by it."""
    try:
        return decode_index(await mirror.get(key, size_max=LISTING_BYTES_MAX), key)
    except (DamagedError, NotFoundError):
        return None
