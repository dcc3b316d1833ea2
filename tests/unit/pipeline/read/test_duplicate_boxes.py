"""What several ranks store alike: one tensor where it is equal, no checkpoint where it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpointd.commit.facts import STATES
from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig
from checkpointd.errors import AbortedError
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.plan import PlanComparison
from checkpointd.pipeline.read.checkpoint_view import read_view
from checkpointd.pipeline.read.load import read_boxes
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import Piece, attempts_at, begin_start, leave_in_doubt, phases, restart, save_checkpoint

TENSOR = np.arange(24, dtype=np.float32).reshape(6, 4)
HALVES = (Box((0, 0), (3, 4)), Box((3, 0), (3, 4)))


def on_two_stages(rank: int, *, other: NDArray[np.float32] = TENSOR) -> Sequence[Piece]:
    """Ranks 0 and 1 hold a half each, and so do ranks 2 and 3, of `other`."""
    tensor = TENSOR if rank < 2 else other
    return [Piece.part("head.weight", tensor, HALVES[rank % 2]), Piece.part("step", np.array(7), whole(()))]


async def read(store: Store) -> tuple[NDArray[np.float32], int]:
    """The tensor of the newest checkpoint, and how many bytes were read of it."""
    world = await read_view(store, await root_view.find(store, "global_step1"), LoadConfig())
    found, read_bytes = np.zeros_like(TENSOR), []

    def sink(box: Box, elements: NDArray[np.uint32]) -> None:
        rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        found[rows] = np.ascontiguousarray(elements).view(np.float32)

    want = BoxRequest("head.weight", whole(TENSOR.shape), sink)
    assert not await read_boxes(store, world, [want], LoadConfig(), read_bytes.append)
    return found, sum(read_bytes)


async def test_what_two_stages_hold_alike_is_saved_and_read_once(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        attempts = await save_checkpoint(store, world_size=4, tensors=lambda _: {}, pieces=on_two_stages)
        assert set(phases(attempts)) == {Phase.COMMITTED}
        found, count = await read(store)
        assert np.array_equal(found, TENSOR)
        assert count == TENSOR.nbytes
        verdict = await verify(store, await root_view.find(store, "global_step1"), LoadConfig())
        assert verdict.whole


async def test_what_two_stages_hold_and_is_not_equal_aborts_with_the_remedy() -> None:
    store, other = MemoryStore(), TENSOR.copy()
    other[5, 3] += 1
    attempts = await save_checkpoint(
        store, world_size=4, tensors=lambda _: {}, pieces=lambda rank: on_two_stages(rank, other=other)
    )
    error = attempts[0].error
    assert isinstance(error, AbortedError)
    words = r"head\.weight: ranks 1 and 3 both stored the box \(3, 0\)\+\(3, 4\) of it, and their values differ: if it is one"
    with pytest.raises(AbortedError, match=words):
        raise error


async def test_it_is_compared_for_every_save_although_the_plans_stay() -> None:
    store, other = MemoryStore(), TENSOR + 1
    start = await begin_start(store, 4)
    for number, (values, phase) in enumerate([(TENSOR, Phase.COMMITTED), (other, Phase.ABORTED), (TENSOR, Phase.COMMITTED)]):
        attempts = await save_checkpoint(
            store,
            tag=f"global_step{number}",
            start=start,
            world_size=4,
            tensors=lambda _: {},
            pieces=lambda rank, values=values: on_two_stages(rank, other=values),
        )
        assert set(phases(attempts)) == {phase}


async def test_recovery_commits_no_job_whose_ranks_held_other_values() -> None:
    for values, state in ((TENSOR, "committed"), (TENSOR + 1, "aborted")):
        store = MemoryStore()
        await leave_in_doubt(
            store,
            voting=(0, 1, 2, 3),
            world_size=4,
            tensors=lambda _: {},
            pieces=lambda rank, values=values: on_two_stages(rank, other=values),
        )
        await restart(store, world_size=4)
        [attempt] = await attempts_at(store, "global_step1")
        assert STATES[attempt.status] == state


async def test_boxes_that_overlap_in_part_name_the_remedy() -> None:
    store = MemoryStore()
    boxes = (Box((0, 0), (4, 4)), Box((3, 0), (3, 4)))
    attempts = await save_checkpoint(
        store, tensors=lambda _: {}, pieces=lambda rank: [Piece.part("model.norm", TENSOR, boxes[rank])]
    )
    assert isinstance(attempts[0].error, AbortedError)
    assert "model.norm (ranks [0, 1]): boxes" in str(attempts[0].error)
    assert "overlap: these ranks say that they hold the same part of it: pass the module itself" in str(attempts[0].error)


def torn(rank: int) -> Sequence[Piece]:
    return [Piece.part("head.weight", TENSOR, HALVES[0])] if rank == 0 else []


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (lambda rank: on_two_stages(rank, other=TENSOR * 2), "head.weight: ranks 0 and 2 both stored"),
        (torn, "head.weight (ranks [0]): 12 of 24 elements are written by no rank"),
    ],
)
async def test_verify_finds_what_no_coordinator_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: Callable[[int], Sequence[Piece]], words: str
) -> None:
    monkeypatch.setattr("checkpointd.pipeline.outcome.publish.compared", lambda *_: PlanComparison())
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, world_size=4, tensors=lambda _: {}, pieces=pieces)
        [damage] = (await verify(store, await root_view.find(store, "global_step1"), LoadConfig())).damage
    assert (damage.code, damage.key.partition("-0/ballot-")[0]) == ("FormatError", "global_step1/00000001")
    assert f"the ranks of global_step1 did not store one whole state: {words}" in damage.message
