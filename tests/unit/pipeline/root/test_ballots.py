"""The ballot of a commit: durable before the outcome, read by rank or whole."""

from __future__ import annotations

import logging

import pytest

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import BALLOT, OUTCOME, vote_name
from checkpointd.layout.manifest import Vote, decode
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.ballots import put_for_commit, vote_of, votes_of
from checkpointd.store.memory import MemoryStore
from tests.builders import save_checkpoint

PREFIX = "global_step1/00000001-0"
KEY = f"{PREFIX}/{BALLOT}"


async def committed(store: MemoryStore) -> catalog.Checkpoint:
    await save_checkpoint(store)
    return await catalog.find(store, "global_step1")


async def test_the_votes_of_a_commit_are_those_that_the_ranks_put_and_their_files_are_not_needed() -> None:
    store = MemoryStore()
    outcome = (await committed(store)).outcome
    put = {r: decode(await store.get(f"{PREFIX}/{vote_name(r)}"), Vote, "") for r in range(outcome.world_size)}
    for rank in put:
        await store.delete(f"{PREFIX}/{vote_name(rank)}")
    assert await votes_of(store, outcome) == put
    assert {rank: await vote_of(store, outcome, rank) for rank in put} == put


async def test_the_vote_of_one_rank_costs_the_table_and_that_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    outcome = (await committed(store)).outcome
    get_range, read = store.get_range, list[int]()

    async def noted(key: str, offset: int, out: memoryview) -> None:
        read.append(out.nbytes)
        await get_range(key, offset, out)

    monkeypatch.setattr(store, "get_range", noted)
    await vote_of(store, outcome, 1)
    assert read == [24 * outcome.world_size, len(await store.get(f"{PREFIX}/{vote_name(1)}"))]


async def test_damage_to_one_vote_leaves_the_others_readable() -> None:
    store = MemoryStore()
    outcome = (await committed(store)).outcome
    data = bytearray(await store.get(KEY))
    data[-1] ^= 1
    await store.put(KEY, bytes(data))
    votes = await votes_of(store, outcome)
    last = outcome.world_size - 1
    assert [rank for rank, vote in votes.items() if isinstance(vote, DamagedError)] == [last]
    with pytest.raises(DamagedError, match=f"the vote of rank {last} "):
        await vote_of(store, outcome, last)
    await store.put(KEY, bytes([*data, 0]))
    with pytest.raises(DamagedError, match="larger than"):
        await votes_of(store, outcome)
    await store.delete(KEY)
    with pytest.raises(NotFoundError):
        await vote_of(store, outcome, 0)


async def test_a_damaged_ballot_is_written_again_unless_there_is_an_outcome(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await store.put(KEY, b"torn")
    await put_for_commit(store, PREFIX, BALLOT, b"whole")
    assert await store.get(KEY) == b"whole"
    assert f"{KEY} is damaged" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        await put_for_commit(store, PREFIX, BALLOT, b"whole")
        await store.put(f"{PREFIX}/{OUTCOME}", b"decided")
        await put_for_commit(store, PREFIX, BALLOT, b"another")
    assert (await store.get(KEY), caplog.text) == (b"whole", "")
