"""Stage 2 of a load: read the indexes of a checkpoint, along the chain of digests."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointd.errors import DamagedError, FormatError, NotFoundError, WorldSizeError
from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Chunk, Index, TensorEntry
from checkpointd.layout.keys import object_key
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root.ballots import CountedVotes, ballot_key
from checkpointd.pipeline.root.indexes import index_named_by
from checkpointd.store.base import Store


async def read_index(store: Store, checkpoint: LoggedAttempt, rank: int, votes: CountedVotes | None = None) -> Index:
    """The index of `rank`, verified along commit, ballot and vote. Raises WorldSizeError if the rank did not exist.

    `votes`: those of the checkpoint, for a reader of several ranks.
    """
    commit = checkpoint.commit
    if not 0 <= rank < commit.world_size:
        raise WorldSizeError(f"{checkpoint.tag} was saved by {rank_runs(range(commit.world_size))}, not by rank {rank}")
    key = ballot_key(commit)
    try:
        vote = await (votes or CountedVotes(store, commit)).of(rank)
        key = object_key(checkpoint.prefix, vote.index.name) if vote.index else key
        index = await index_named_by(store, checkpoint.prefix, vote)
        if index.step != commit.step:
            raise DamagedError(f"{key} is of step {index.step}, the commit of step {commit.step}")
        return index
    except (NotFoundError, DamagedError) as error:
        raise DamagedError(f"{error} (rank {rank} of {checkpoint.tag})", key=key, rank=rank) from error


def entries_by_fqn(index: Index) -> dict[str, TensorEntry]:
    """The tensors of `index` by FQN. Raises FormatError if one is not stored whole (`checkpoint_view.py` joins parts)."""
    part = next((entry for entry in index.tensors if entry.scope != "rank" or entry.box != whole(entry.shape)), None)
    if part is not None:
        message = f"rank {index.rank} of {index.tag} stored only a part of {part.fqn}, which is its own: it must be whole"
        raise FormatError(message, fqn=part.fqn, rank=index.rank)
    return {entry.fqn: entry for entry in index.tensors}


def chunk_starts(entry: TensorEntry) -> Iterator[tuple[int, Chunk]]:
    """The chunks of `entry`, each with its first byte in the box."""
    start = 0
    for chunk in entry.chunks:
        yield start, chunk
        start += chunk.raw
