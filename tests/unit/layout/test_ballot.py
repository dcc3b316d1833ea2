"""The ballot: what is encoded is read, rank by rank, and what was changed is noticed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import DamagedError
from checkpointd.layout.ballot import BallotTable, encode_ballot, table_bytes
from checkpointd.layout.manifest import BallotRef, Vote, WriterIdentity, digest, encode

KEY = "tag/00000001-0/ballot"
PREFIX = "tag/00000001-0"
WRITER = WriterIdentity(host="node7", pid=4711, time="2026-01-01T00:00:00.000+00:00")


def vote(rank: int, world_size: int = 3) -> Vote:
    said = {"tag": "tag", "attempt": "00000001-0", "step": 1, "n": 0, "save_latest": True, "vote": "yes"}
    return Vote(rank=rank, world_size=world_size, writer=WRITER, **said)  # type: ignore[arg-type]  # each has its type


def table_of(data: bytes, ref: BallotRef, world_size: int) -> BallotTable:
    return BallotTable.of(memoryview(data)[: table_bytes(world_size)], world_size, ref, KEY)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_the_bytes_of_every_vote_lie_where_the_table_says(votes: list[bytes]) -> None:
    ref, data = encode_ballot(votes)
    table = table_of(data, ref, len(votes))
    assert [data[a:b] for a, b in zip(table.starts, table.starts[1:], strict=False)] == votes
    assert (table.starts[-1], encode_ballot(iter(votes))) == (len(data), (ref, data))


def test_the_table_has_the_bytes_that_the_page_describes() -> None:
    ref, data = encode_ballot([b"one", b"three"])
    rows = bytes.fromhex(digest(b"one")) + b"\3" + bytes(7) + bytes.fromhex(digest(b"three")) + b"\5" + bytes(7)
    assert data == rows + b"onethree"
    assert ref == BallotRef(digest=digest(rows), size=len(data))


def test_every_vote_is_read_and_one_that_changed_is_damage_of_its_rank_alone() -> None:
    votes = [vote(rank) for rank in range(3)]
    ref, data = encode_ballot(map(encode, votes))
    changed = bytearray(data)
    changed[-1] ^= 1
    table = table_of(bytes(changed), ref, 3)
    parts = [bytes(changed)[a:b] for a, b in zip(table.starts, table.starts[1:], strict=False)]
    assert [table.vote(rank, parts[rank], PREFIX, KEY) for rank in (0, 1)] == votes[:2]
    with pytest.raises(DamagedError, match="the vote of rank 2 is not the one that was counted"):
        table.vote(2, parts[2], PREFIX, KEY)


@pytest.mark.parametrize("at", [0, 16, 71])
def test_a_changed_table_is_damage(at: int) -> None:
    ref, data = encode_ballot([b"a", b"b", b"c"])
    changed = bytearray(data)
    changed[at] ^= 1
    with pytest.raises(DamagedError, match="its table is not the one that the outcome names"):
        table_of(bytes(changed), ref, 3)
    with pytest.raises(DamagedError, match="its table is not the one that the outcome names"):
        table_of(data[:71], ref, 3)


def test_the_vote_of_another_rank_or_attempt_is_damage() -> None:
    ref, data = encode_ballot([encode(vote(1, 1 + 1)), encode(msgspec.structs.replace(vote(1, 2), tag="other"))])
    table = table_of(data, ref, 2)
    for rank, words in enumerate(("rank 1 of tag/00000001-0 for rank 0", "rank 1 of other/00000001-0 for rank 1")):
        with pytest.raises(DamagedError, match=words):
            table.vote(rank, data[table.starts[rank] : table.starts[rank + 1]], PREFIX, KEY)
