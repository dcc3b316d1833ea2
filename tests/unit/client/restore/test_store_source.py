"""How many indexes a rank reads: its own, and those of ranks that stored what it wants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from checkpointd.config import LoadConfig, Ranks
from checkpointd.layout.boxes import Box, whole
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import joint_plan_key
from checkpointd.store.memory import MemoryStore
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.store_source import StoredSource
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard
from tests.builders import Piece, save_checkpoint

RANKS, ROWS = 16, 64
SHAPE = (ROWS, 8)
WEIGHT = np.arange(ROWS * 8, dtype=np.float32).reshape(SHAPE)
STEP = np.array(7.0, dtype=np.float32)


class IndexCountingStore(MemoryStore):
    """Counts the indexes that are read."""

    indexes = 0

    async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
        self.indexes += key.endswith(".index")
        return await super().get(key, size_max=size_max)


def rows_of(rank: int, ranks: int = RANKS) -> Box:
    return Box((ROWS // ranks * rank, 0), (ROWS // ranks, 8))


def saved(ranks: int = RANKS) -> IndexCountingStore:
    """Ranks with their rows of one weight. Rank 0 alone writes the step, and the last rank alone a tensor below `other`."""
    store = IndexCountingStore()

    def pieces(rank: int) -> list[Piece]:
        step = [Piece.part("optimizer.step", STEP, Box((), ()))] if rank == 0 else []
        lone = [Piece.part("other.lone", WEIGHT, whole(SHAPE))] if rank == ranks - 1 else []
        return [Piece.part("model.weight", WEIGHT, rows_of(rank, ranks)), *step, *lone]

    asyncio.run(save_checkpoint(store, world_size=ranks, tensors=lambda _: {}, pieces=pieces))
    return store


@pytest.fixture
def writer() -> Iterator[WriterThread]:
    thread = WriterThread(2)
    yield thread
    thread.close()


def source_of(store: IndexCountingStore, writer: WriterThread, rank: int, ranks: int = RANKS) -> StoredSource:
    checkpoint = asyncio.run(root_view.find(store, "global_step1"))
    store.indexes = 0
    return StoredSource(store, writer, LoadConfig(), 30.0, Ranks(rank=rank, world_size=ranks), checkpoint)


def rows_target(rank: int, ranks: int = RANKS) -> Target:
    box = rows_of(rank, ranks)
    return Target("model.weight", torch.full(box.sizes, -1.0), LocalShard(SHAPE, (LocalBox(SHAPE, box, (0, 0)),)))


def filled(source: StoredSource, target: Target) -> torch.Tensor:
    content = source.content()
    source.verify([target], content)
    source.fill([target], content)
    return target.tensor


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_rank_that_takes_what_it_saved_reads_its_own_index_alone(writer: WriterThread, ranks: int) -> None:
    store = saved(ranks)
    source = source_of(store, writer, 2, ranks)
    at = ROWS // ranks * 2
    assert torch.equal(filled(source, rows_target(2, ranks)), torch.from_numpy(WEIGHT[at : at + ROWS // ranks]))
    assert store.indexes == 1


def test_what_one_rank_wrote_for_all_takes_the_index_of_that_rank(writer: WriterThread) -> None:
    store = saved()
    source = source_of(store, writer, 5)
    assert source.content().entries["optimizer.step"] == ("float32", ())
    assert filled(source, Target("optimizer.step", torch.tensor(-1.0))) == 7.0
    assert store.indexes == 2


def test_a_box_of_other_ranks_takes_the_indexes_of_those_ranks(writer: WriterThread) -> None:
    store = saved()
    source = source_of(store, writer, 5)
    box = Box((30, 0), (10, 8))  # of the ranks 7, 8 and 9
    target = Target("model.weight", torch.full(box.sizes, -1.0), LocalShard(SHAPE, (LocalBox(SHAPE, box, (0, 0)),)))
    assert torch.equal(filled(source, target), torch.from_numpy(WEIGHT[30:40]))
    assert store.indexes == 1 + 3
    assert torch.equal(filled(source, Target("model.weight", torch.full(SHAPE, -1.0))), torch.from_numpy(WEIGHT))
    assert store.indexes == RANKS


def test_a_job_of_another_size_reads_the_index_of_one_twin_and_those_of_its_boxes(writer: WriterThread) -> None:
    store = saved()
    source = source_of(store, writer, 1, ranks=8)
    content = source.content()
    assert store.indexes == 3  # one of the first, one of the last, and one of the ranks between, which are twins
    assert content.entries.keys() == {"model.weight", "optimizer.step", "other.lone"}
    assert torch.equal(filled(source, rows_target(1, ranks=8)), torch.from_numpy(WEIGHT[8:16]))
    assert store.indexes == 3 + 2


def test_what_only_another_rank_has_is_seen(writer: WriterThread) -> None:
    store = saved()
    source = source_of(store, writer, 5)
    content = source.content()
    assert source.has_elsewhere(["other"], content)
    assert not source.has_elsewhere(["another"], content)
    assert store.indexes == 1


def test_all_ranks_compare_two_shared_tensors_by_the_parts_of_all(writer: WriterThread) -> None:
    store = saved()
    source = source_of(store, writer, 3)
    assert source.equal("model.weight", "other.lone", source.content())
    assert store.indexes == RANKS


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_without_its_joint_plan_a_checkpoint_loads_all_the_same(
    writer: WriterThread, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved()
    key = joint_plan_key(asyncio.run(root_view.find(store, "global_step1")).commit)
    data = asyncio.run(store.get(key))
    if damage == "gone":
        asyncio.run(store.delete(key))
    else:
        asyncio.run(store.put(key, data[:-1] + bytes([data[-1] ^ 1])))
    source = source_of(store, writer, 5)
    assert torch.equal(filled(source, rows_target(5)), torch.from_numpy(WEIGHT[20:24]))
    assert store.indexes == RANKS
    assert "all indexes are read instead" in caplog.text
