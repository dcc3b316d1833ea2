"""The ballot of a commit: the exact bytes of all votes in one object, of which a reader can read the votes of single ranks.

A table comes first, with the digest and the size of each rank's vote, in the order of ranks; the votes follow. The commit has
the digest of the table, and the size of the ballot. Two processes that decide on the same votes make the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import xxhash
from typing_extensions import Buffer

from checkpointd.errors import DamagedError, FormatError
from checkpointd.layout.keys import ballot_name, vote_name
from checkpointd.layout.manifest import VOTE_BYTES_MAX, BallotRef, Vote, decode, digest

_ROW = struct.Struct("<16sQ")
"""The digest of a vote, and its size in bytes."""


def table_bytes(world_size: int) -> int:
    """The size of the table of a ballot."""
    return _ROW.size * world_size


def encode_ballot(votes: Iterable[bytes]) -> tuple[BallotRef, bytes]:
    """The ballot that holds the bytes `votes` of rank 0, rank 1 and so on."""
    votes = list(votes)
    table = b"".join(_ROW.pack(xxhash.xxh3_128_digest(vote), len(vote)) for vote in votes)
    data = b"".join([table, *votes])
    return BallotRef(digest=digest(table), size=len(data)), data


def votes_in(data: bytes, name: str, key: str) -> list[bytes]:
    """The votes in the ballot `data`, in the order of ranks, for a reader that has no commit: the `name` of a ballot has the
    digest of its table. Raises FormatError if the bytes are not those of such a ballot.
    """
    starts = [0]
    for ranks, (_, size) in enumerate(_ROW.iter_unpack(data[: len(data) // _ROW.size * _ROW.size]), 1):
        starts.append(starts[-1] + size)
        table = table_bytes(ranks)
        if table + starts[-1] >= len(data):
            break
    else:
        ranks, table = 0, 0
    if not ranks or table + starts[-1] != len(data) or ballot_name(digest(data[:table])) != name:
        raise FormatError(f"{key} is damaged: it is not the ballot that its name says", key=key)
    return [data[table + first : table + end] for first, end in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class BallotTable:
    """The checked table of a ballot."""

    digests: Sequence[bytes]
    starts: Sequence[int]
    """The first byte of each vote in the ballot, and the end of the last one."""

    @staticmethod
    def of(table: memoryview, world_size: int, ref: BallotRef, key: str) -> BallotTable:
        """The table in the bytes `table`. Raises DamagedError if they are not those that the commit names in `ref`,
        FormatError if no commit of `world_size` ranks has such a table.
        """
        if len(table) != table_bytes(world_size) or digest(table) != ref.digest:
            raise DamagedError(f"{key} is damaged: its table is not the one that the outcome names", key=key)
        rows = list(_ROW.iter_unpack(table))
        starts = list(accumulate((size for _, size in rows), initial=table_bytes(len(rows))))
        if any(size > VOTE_BYTES_MAX for _, size in rows) or starts[-1] != ref.size:
            raise FormatError(f"{key} is damaged: its votes do not take the {ref.size} bytes that the outcome names", key=key)
        return BallotTable([each for each, _ in rows], starts)

    def vote(self, rank: int, data: Buffer, prefix: str, key: str) -> Vote:
        """The vote of `rank` in the attempt `prefix`, from its bytes `data`. Raises DamagedError if it is not that."""
        if xxhash.xxh3_128_digest(data) != self.digests[rank]:
            raise DamagedError(f"{key} is damaged: the vote of rank {rank} is not the one that was counted", key=key, rank=rank)
        vote = decode(bytes(data), Vote, f"{vote_name(rank)} in {key}")
        if (vote.prefix, vote.rank) != (prefix, rank):
            raise DamagedError(f"{key} has the vote of rank {vote.rank} of {vote.prefix} for rank {rank}", key=key, rank=rank)
        return vote
