"""Origins with checkpoints for the tests of mirrors, and what a mirror must be after each run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from checkpointd.config import LoadConfig
from checkpointd.layout.log_records import RollbackRecord
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring, run_once
from checkpointd.mirror.news import CheckpointNews, MirrorReport, News
from checkpointd.pipeline.gc.collect import DELETED_BY_NAME, remove, sweep
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome.recover import Recovery, recover
from checkpointd.pipeline.outcome.starting import begin
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import ballot_key
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import Arrays, load_arrays, save_checkpoint

T = TypeVar("T")
TAG = "global_step{}/00000001-0"
"""The attempt of a step, when it is saved for the first time in the first start."""
QUICK = LoadConfig(absence_s=0.1, retry_s=0.1)


def simulated(work: Awaitable[T], seed: int = 1) -> T:
    """The result of `work` in virtual time."""

    async def run() -> T:
        return await work

    return simloop.run(seed, run())


def arrays(step: int, rank: int) -> Arrays:
    """Mostly frozen state, so that later checkpoints refer to the first one."""
    return {
        "frozen": np.arange(5000, dtype=np.float32) + rank,
        "moving": np.random.default_rng(step * 100 + rank).normal(size=700).astype(np.float32),
    }


def _of(step: int, rank: int) -> Arrays:
    return arrays(step, rank)


async def save(store: Store, *steps: int, dedup: bool = True, of: int | None = None, **options: object) -> None:
    """Checkpoints global_step<n> at `store`, each referring to the one before. `of`: the step whose state all of them have."""
    for step in steps:
        tag = str(options.get("tag", f"global_step{step}"))
        others = {name: value for name, value in options.items() if name != "tag"}
        tensors = partial(_of, step if of is None else of)
        await save_checkpoint(store, tag=tag, step=step, tensors=tensors, dedup=dedup, **others)


async def origin_with(*steps: int, name: str = "origin", **options: object) -> MemoryStore:
    store = MemoryStore(name)
    await save(store, *steps, **options)
    return store


async def mirrored(origin: Store, mirror: Store, **config: object) -> MirrorReport:
    """One run."""
    news: list[News] = []
    return await run_once(Mirroring(origin, mirror, MirrorConfig(**config), tell=news.append), news)  # type: ignore[arg-type]


def kinds(report: MirrorReport) -> dict[str, str]:
    """What became of each tag."""
    return {one.tag: one.kind for one in report.checkpoints}


def told(news: Sequence[News]) -> dict[str, str]:
    return {one.tag: one.kind for one in news if isinstance(one, CheckpointNews)}


async def key_of(store: Store, step: int, name: str) -> str:
    """The key of the object `name` of a step; `ballot` stands for its ballot."""
    if name != "ballot":
        return f"{TAG.format(step)}/{name}"
    return ballot_key((await root_view.find(store, f"global_step{step}")).commit)


async def delete(store: Store, tag: str) -> None:
    """Remove a checkpoint, as a person does."""
    checkpoint = await root_view.find(store, tag)
    assert await remove(store, {DELETED_BY_NAME: [checkpoint.prefix]}) == ""
    await sweep(store)
    await move_latest(RootLog.of(store))


async def roll_back(store: Store, tag: str) -> None:
    """Let training go on from this checkpoint, as a person does."""
    checkpoint = await root_view.find(store, tag)
    assert await RootLog.of(store).add(RollbackRecord(attempt=checkpoint.prefix, writer=writer())) == ""
    await move_latest(RootLog.of(store))


async def recovered(store: Store) -> Recovery:
    """What `checkpointd recover` does."""
    taken = await begin(store, Beginner(world_size=0))
    done = await recover(store, taken.before)
    await taken.lease.release()
    return done


async def tags_of(store: Store) -> list[str]:
    """The tags of the checkpoints, newest first."""
    return [checkpoint.tag for checkpoint in await root_view.checkpoints(store)]


async def whole_ones(store: Store) -> list[str]:
    """The tags of the checkpoints whose bytes are whole, newest first."""
    return [one.tag for one in await root_view.checkpoints(store) if (await verify(store, one, QUICK)).whole]


async def check_whole(mirror: Store, origin: Store | None = None) -> None:
    """Every checkpoint of the mirror is whole, loads as it was saved, and the origin's own commit."""
    for checkpoint in await root_view.checkpoints(mirror):
        verdict = await verify(mirror, checkpoint, QUICK)
        assert verdict.whole, (checkpoint.prefix, verdict.damage, verdict.unreadable)
        for rank in range(checkpoint.commit.world_size):
            found = await load_arrays(mirror, checkpoint.tag, rank)
            assert found == {fqn: value.tobytes() for fqn, value in arrays(checkpoint.commit.step, rank).items()}
        if origin is not None:
            there = (await root_view.state_of(origin)).attempts.get(checkpoint.prefix)
            assert there is None or there.committed == checkpoint.commit
    latest = await root_view.readable_latest(mirror)
    newest = await tags_of(mirror)
    assert latest is None or latest in newest


def contents(store: MemoryStore) -> dict[str, bytes]:
    """Every object, so that a test can say that nothing was written."""
    return {key: data.tobytes() for key, data in store._objects.items()}


async def settled(*works: Awaitable[object]) -> list[object]:
    """The results of `works`, errors included."""
    return list(await asyncio.gather(*works, return_exceptions=True))
