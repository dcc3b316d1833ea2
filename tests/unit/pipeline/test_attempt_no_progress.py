"""The no-progress alarm: the step moved on, and no rank's tensors that require grad have changed."""

from __future__ import annotations

import numpy as np
import pytest

from checkpointd.commit.decide import OnNoProgress, has_no_progress
from checkpointd.commit.machine import Phase
from checkpointd.errors import NoProgressError
from checkpointd.layout import tree
from checkpointd.layout.manifest import Trained, Vote, WriterIdentity
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.shard import Shard
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.builders import Save, begin_start, make_shard, phases


def shard(rank: int, weight: float, *, grad: bool = True) -> Shard:
    """A weight, and a moment that always moves."""
    moment = np.random.default_rng().normal(size=2000).astype(np.float32)
    made = make_shard({"weight": np.full(2000, weight + rank, dtype=np.float32), "moment": moment})
    leaves = (("weight", tree.Tensor("weight", requires_grad=grad)), ("moment", tree.Tensor("moment")))
    return Shard(buffer=made.buffer, tensors=made.tensors, tree=tree.encode(tree.Dict("dict", leaves)))


async def saves(
    store: Store,
    weights: list[tuple[float, float]],
    *,
    on_no_progress: OnNoProgress = "warn",
    grad: bool = True,
    step: int | None = None,
) -> list[list[Attempt]]:
    """One save after another, with these weights on the two ranks."""
    start, made = await begin_start(store), []
    for n, weight in enumerate(weights, 1):
        save = Save(
            store=store,
            tag=f"t{n}",
            step=step or n,
            start=start,
            n=n,
            shard_of=lambda rank, weight=weight: shard(rank, weight[rank], grad=grad),
            on_no_progress=on_no_progress,
            dedup=True,
        )
        made.append(await save.run_all())
    return made


def is_flagged(attempts: list[Attempt]) -> list[bool]:
    return [attempt.progress.no_progress for attempt in attempts]


async def test_a_save_without_progress_commits_with_a_warning_on_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    moved, no_progress = await saves(store, [(1, 1), (1, 1)])
    assert is_flagged(moved) == [False, False]
    assert is_flagged(no_progress) == [True, True]
    assert phases(no_progress) == [Phase.COMMITTED] * 2
    assert caplog.text.count("no tensor that requires grad has changed") == 1
    assert (await root_view.find(store, "t2")).commit.no_progress


async def test_a_save_without_progress_is_aborted_where_that_is_asked_for() -> None:
    store = MemoryStore()
    _, no_progress, moved = await saves(store, [(1, 1), (1, 1), (2, 2)], on_no_progress="abort")
    assert phases(no_progress) == [Phase.ABORTED] * 2
    assert all(isinstance(attempt.error, NoProgressError) for attempt in no_progress)
    assert "to 2" in str(no_progress[0].error)
    assert phases(moved) == [Phase.COMMITTED] * 2


async def test_a_save_without_progress_is_no_matter_where_it_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    _, no_progress = await saves(MemoryStore(), [(1, 1), (1, 1)], on_no_progress="ignore")
    assert is_flagged(no_progress) == [False, False]
    assert "requires grad" not in caplog.text


async def test_the_same_step_saved_again_needs_no_progress() -> None:
    _, second = await saves(MemoryStore(), [(1, 1), (1, 1)], step=5)
    assert is_flagged(second) == [False, False]


async def test_without_anything_that_is_trained_no_progress_is_asked_for() -> None:
    _, second = await saves(MemoryStore(), [(1, 1), (1, 1)], grad=False)
    assert is_flagged(second) == [False, False]


@pytest.mark.parametrize(
    ("words", "no_progress"),
    [
        (["still", "still"], True),
        (["still", ""], True),
        (["still", "moved"], False),
        (["", ""], False),
        (["moved", ""], False),
        ([], False),
    ],
)
def test_all_ranks_that_train_decide(words: list[Trained], no_progress: bool) -> None:
    writer = WriterIdentity(host="h", pid=1, time="")
    votes = {
        rank: Vote(
            tag="t",
            attempt="00000001-0",
            rank=rank,
            world_size=2,
            step=1,
            n=0,
            save_latest=True,
            vote="yes",
            trained=word,
            writer=writer,
        )
        for rank, word in enumerate(words)
    }
    assert has_no_progress(votes) == no_progress
