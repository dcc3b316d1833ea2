"""The joint plan of a commit: when there is one, what it says, and what verify says of a damaged one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpointd.config import LoadConfig
from checkpointd.layout.boxes import Box
from checkpointd.pipeline.read.checkpoint_view import checked_joint_plan
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import joint_plan_key
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests import format_reader
from tests.builders import Piece, leave_in_doubt, restart, save_checkpoint

WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)
PREFIX = "global_step1/00000001-0"


async def key_of(store: Store) -> str:
    return joint_plan_key((await root_view.find(store, "global_step1")).commit)


def halves(rank: int) -> list[Piece]:
    """Two boxes of a rank: its left and its right half, the right one first."""
    return [Piece.part("w", WEIGHT, Box((4 * rank, column), (4, 4))) for column in (4, 0)]


async def saved(store: Store, **options: object) -> None:
    await save_checkpoint(store, **{"tensors": lambda _: {}, "pieces": halves, **options})


async def test_it_says_which_rank_stored_which_box() -> None:
    store = MemoryStore()
    await saved(store)
    plan = await checked_joint_plan(store, await root_view.find(store, "global_step1"))
    assert plan.ranks_of("w", Box((0, 0), (4, 8))) == (0,)
    assert plan.ranks_of("w", Box((3, 6), (2, 1))) == (0, 1)


async def test_a_reader_made_from_the_page_reads_it(tmp_path: Path) -> None:
    def pieces(rank: int) -> list[Piece]:
        return [*halves(rank), Piece.own("seed", WEIGHT + rank), Piece.own("same", WEIGHT)]

    async with PosixStore(tmp_path) as store:
        await saved(store, pieces=pieces)
    boxes, twins, differing = format_reader.joint_plan(tmp_path, "global_step1")
    assert boxes == {"w": [[rank, 4 * rank, column, 4, 4] for rank in (0, 1) for column in (0, 4)]}
    assert (twins, differing) == ([0, 0], ["seed"])


@pytest.mark.parametrize("options", [{"world_size": 1, "pieces": lambda _: [Piece.own("w", WEIGHT)]}, {"pieces": lambda _: []}])
async def test_ranks_that_hold_nothing_together_have_none(options: dict[str, object]) -> None:
    store = MemoryStore()
    await saved(store, **options)
    checkpoint = await root_view.find(store, "global_step1")
    assert checkpoint.commit.plan is None
    assert not [entry for entry in await store.list(PREFIX) if entry.name.startswith("plan-")]


async def test_a_commit_of_recovery_has_the_same() -> None:
    store, other = MemoryStore(), MemoryStore()
    await saved(store)
    await leave_in_doubt(other, tensors=lambda _: {}, pieces=halves)
    await restart(other, world_size=0)
    assert (await root_view.find(other, "global_step1")).commit.plan == (
        await root_view.find(store, "global_step1")
    ).commit.plan
    assert await other.get(await key_of(other)) == await store.get(await key_of(store))


async def test_verify_finds_a_damaged_one() -> None:
    store = MemoryStore()
    await saved(store)
    checkpoint = await root_view.find(store, "global_step1")
    assert (await verify(store, checkpoint, LoadConfig())).whole
    key = await key_of(store)
    data = await store.get(key)
    await store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    verdict = await verify(store, checkpoint, LoadConfig())
    assert [damage.key for damage in verdict.damage] == [key]
    await store.delete(key)
    assert not (await verify(store, checkpoint, LoadConfig(absence_s=0.01))).whole
