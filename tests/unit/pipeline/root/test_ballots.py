"""The ballot of a commit: read by rank or whole."""

from __future__ import annotations

import pytest

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import ballot_name, vote_name
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import Vote, decode
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import ballot_key, put_named, vote_of, votes_of
from checkpointd.store.memory import MemoryStore
from tests.builders import save_checkpoint

PREFIX = "global_step1/00000001-0"


async def committed(store: MemoryStore) -> LoggedAttempt:
    await save_checkpoint(store)
    return await root_view.find(store, "global_step1")


async def test_the_votes_of_a_commit_are_those_that_the_ranks_put_and_their_files_are_not_needed() -> None:
    store = MemoryStore()
    commit = (await committed(store)).commit
    put = {r: decode(await store.get(f"{PREFIX}/{vote_name(r)}"), Vote, "") for r in range(commit.world_size)}
    for rank in put:
        await store.delete(f"{PREFIX}/{vote_name(rank)}")
    assert await votes_of(store, commit) == put
    assert {rank: await vote_of(store, commit, rank) for rank in put} == put


async def test_the_vote_of_one_rank_costs_the_table_and_that_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    commit = (await committed(store)).commit
    get_range, read = store.get_range, list[int]()

    async def noted(key: str, offset: int, out: memoryview) -> None:
        read.append(out.nbytes)
        await get_range(key, offset, out)

    monkeypatch.setattr(store, "get_range", noted)
    await vote_of(store, commit, 1)
    assert read == [24 * commit.world_size, len(await store.get(f"{PREFIX}/{vote_name(1)}"))]


async def test_damage_to_one_vote_leaves_the_others_readable() -> None:
    store = MemoryStore()
    commit = (await committed(store)).commit
    key = ballot_key(commit)
    data = bytearray(await store.get(key))
    data[-1] ^= 1
    await store.put(key, bytes(data))
    votes = await votes_of(store, commit)
    last = commit.world_size - 1
    assert [rank for rank, vote in votes.items() if isinstance(vote, DamagedError)] == [last]
    with pytest.raises(DamagedError, match=f"the vote of rank {last} "):
        await vote_of(store, commit, last)
    await store.put(key, bytes([*data, 0]))
    with pytest.raises(DamagedError, match="larger than"):
        await votes_of(store, commit)
    await store.delete(key)
    with pytest.raises(NotFoundError):
        await vote_of(store, commit, 0)


async def test_a_damaged_ballot_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    store, key = MemoryStore(), f"{PREFIX}/{ballot_name('0' * 64)}"
    await store.put(key, b"torn")
    await put_named(store, key, b"whole")
    assert await store.get(key) == b"whole"
    assert f"{key} is damaged" in caplog.text
    caplog.clear()
    await put_named(store, key, b"whole")
    assert caplog.text == ""
