"""Recovery after a job that was killed: no leftover object is loaded, or gets into a later attempt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, load_arrays, plan_save, rank_arrays, restart, save_checkpoint


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "root")


async def test_leftovers_of_a_killed_save_are_never_loaded(store: PosixStore, tmp_path: Path) -> None:
    await save_checkpoint(store, tag="global_step1")
    await leave_in_doubt(store, tag="global_step2", voting=(0,))
    await restart(store)
    assert [c.tag for c in await root_view.checkpoints(store)] == ["global_step1"]
    assert await root_view.latest(store) == "global_step1"
    assert not list((tmp_path / "root" / "global_step2").glob("*/*.chunks"))
    assert await load_arrays(store, "global_step1", 1) == {k: v.tobytes() for k, v in rank_arrays(1).items()}


async def test_leftovers_of_an_earlier_attempt_never_get_into_a_later_one(store: PosixStore, tmp_path: Path) -> None:
    await leave_in_doubt(store, tag="global_step2", voting=(1,), tensors=lambda rank: rank_arrays(rank + 50))
    await starts.take(store, 2)
    await save_checkpoint(store, tag="global_step2")
    for rank in (0, 1):
        assert await load_arrays(store, "global_step2", rank) == {k: v.tobytes() for k, v in rank_arrays(rank).items()}
    await restart(store)
    attempts = {path.parent.name for path in (tmp_path / "root" / "global_step2").glob("*/*.chunks")}
    assert attempts == {str(AttemptId(2, 0))}


async def test_saving_a_tag_again_never_mixes_two_steps(store: PosixStore) -> None:
    first = await plan_save(store, tag="last", start=1)
    await asyncio.gather(*(first.run(rank) for rank in range(2)))
    second = replace(first, k=1, n=1, step=2, shard_of=(await plan_save(store, tensors=lambda r: rank_arrays(r + 9))).shard_of)
    await second.vote(0)  # and the job dies
    await restart(store)
    for rank in (0, 1):
        assert await load_arrays(store, "last", rank) == {k: v.tobytes() for k, v in rank_arrays(rank).items()}
