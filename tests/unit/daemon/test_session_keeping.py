"""What a sidecar does of a save's settings: references, retention, metrics and the no-progress alarm, as the
trainer does itself.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from checkpointd.daemon.protocol import wire
from checkpointd.daemon.roots.root_scan import RootScanner
from checkpointd.layout import tree
from checkpointd.pipeline.read import readback
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.shard import Shard
from checkpointd.store.posix.store import PosixStore
from tests.builders import attempts_at, load_arrays, make_shard
from tests.unit.daemon.conftest import Daemon, RawClient


def shard(step: int, *, weight: float = 1.0) -> Shard:
    """A weight that requires grad, and a tensor that always moves."""
    made = make_shard({"weight": np.full(4000, weight, dtype=np.float32), "moving": np.full(1000, step, dtype=np.float32)})
    leaves = (("weight", tree.Tensor("weight", requires_grad=True)), ("moving", tree.Tensor("moving")))
    return Shard(buffer=made.buffer, tensors=made.tensors, tree=tree.encode(tree.Dict("dict", leaves)))


async def save(client: RawClient, step: int, snapshot: Shard, **options: object) -> wire.PhaseEntered:
    """One save, in a slot of its own."""
    await client.slot(step, snapshot)
    await client.layout(step, snapshot)
    await client.whole_save(step, snapshot, slot=step, layout=step, **options)
    return await client.outcome(step)


async def holders(store: PosixStore, tag: str) -> set[str]:
    index = await read_index(store, await root_view.find(store, tag), 0)
    return {ref.held_by for ref in index.objects if ref.held_by}


async def test_saves_of_one_session_and_of_the_next_refer_to_the_first(daemon: Daemon, store: PosixStore, root: Path) -> None:
    for steps in ((1, 2), (3,)):
        client = await daemon.client()
        await client.join(root)
        await client.begin(1, on_no_progress="ignore")
        for step in steps:
            assert (await save(client, step, shard(step))).phase == "committed"
        client.close()
    assert await holders(store, "global_step1") == set()
    for step in (2, 3):
        assert await holders(store, f"global_step{step}") == {"global_step1/00000001-0"}
        found = await load_arrays(store, f"global_step{step}", 0)
        assert found["moving"] == np.full(1000, step, dtype=np.float32).tobytes()


async def test_the_daemon_reads_back_after_the_trainer_has_left_and_shows_it(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback, "QUIET_S", 0.2)
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    assert (await save(client, 1, shard(1))).phase == "committed"
    client.close()

    async def read_back() -> str:
        return (await attempts_at(store, "global_step1"))[0].read_back

    async with asyncio.timeout(60):
        while await read_back() != "whole":
            await asyncio.sleep(0.01)
    look, _ = await RootScanner().look(store)
    assert [checkpoint.read_back for checkpoint in look.checkpoints] == ["whole"]


async def test_without_dedup_nothing_is_referred_to(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, dedup=False)
    for step in (1, 2):
        await save(client, step, shard(step))
    assert await holders(store, "global_step2") == set()


async def test_full_every_reaches_the_writer(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, full_every=2, compression="planes", chunk_bytes=1 << 20)
    for step in (1, 2, 3):
        weights = (np.random.default_rng(0).standard_normal(50_000) * 0.02 + step * 1e-9).astype(np.float32)
        await save(client, step, make_shard({"weights": weights}))
    indexes = [await read_index(store, await root_view.find(store, f"global_step{step}"), 0) for step in (1, 2, 3)]
    assert [[chunk.codec for chunk in index.tensors[0].chunks] for index in indexes] == [["planes"], ["delta"], ["planes"]]


async def test_retention_and_metrics_reach_the_coordinator(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, retention=wire.Rules(best=1, metric="loss"))
    for step, loss in ((1, 1.0), (2, float("nan")), (3, 3.0)):
        await save(client, step, shard(step, weight=step), metrics={"loss": loss})
    found = {c.tag: c.commit.metrics for c in await root_view.checkpoints(store)}
    assert found["global_step1"] == {"loss": 1.0}
    assert found["global_step3"] == {"loss": 3.0}


async def test_rules_that_cannot_be_are_refused(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, retention=wire.Rules(keep_last=0))
    assert (await client.refused()).code == "UsageError"


async def test_a_save_without_progress_is_told_and_counted(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    for step in (1, 2):
        await save(client, step, shard(step))
    told = [message for message in client.heard if isinstance(message, wire.Progress) and message.no_progress]
    assert {message.save for message in told} == {2}
    [record] = daemon.hub.ranks_at(str(root))
    assert (record.tally.committed, record.tally.no_progress) == (2, 1)
