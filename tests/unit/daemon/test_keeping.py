"""What a sidecar does of a save's settings: references, retention, metrics and the stale alarm, as the trainer does itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from checkpointd.daemon import wire
from checkpointd.layout import tree
from checkpointd.pipeline import catalog
from checkpointd.pipeline.load import read_index
from checkpointd.pipeline.shard import Shard
from checkpointd.store.posix import PosixStore
from tests.builders import load_arrays, make_shard
from tests.unit.daemon.conftest import Daemon, RawClient


def shard(step: int, *, weight: float = 1.0) -> Shard:
    """A weight that requires grad, and a tensor that always moves."""
    made = make_shard({"weight": np.full(4000, weight, dtype=np.float32), "moving": np.full(1000, step, dtype=np.float32)})
    leaves = (("weight", tree.Tensor("weight", requires_grad=True)), ("moving", tree.Tensor("moving")))
    return Shard(image=made.image, tensors=made.tensors, tree=tree.encode(tree.Dict("dict", leaves)))


async def save(client: RawClient, step: int, snapshot: Shard, **options: object) -> wire.Phase:
    """One save, in a slot of its own."""
    await client.slot(step, snapshot)
    await client.layout(step, snapshot)
    await client.whole_save(step, snapshot, slot=step, layout=step, **options)
    return await client.outcome(step)


async def holders(store: PosixStore, tag: str) -> set[str]:
    index = await read_index(store, await catalog.find(store, tag), 0)
    return {ref.held_by for ref in index.objects if ref.held_by}


async def test_saves_of_one_session_and_of_the_next_refer_to_the_first(daemon: Daemon, store: PosixStore, root: Path) -> None:
    for steps in ((1, 2), (3,)):
        client = await daemon.client()
        await client.join(root)
        await client.begin(1, on_stale="ignore")
        for step in steps:
            assert (await save(client, step, shard(step))).phase == "committed"
        client.close()
    assert await holders(store, "global_step1") == set()
    for step in (2, 3):
        assert await holders(store, f"global_step{step}") == {"global_step1/00000001-0"}
        found = await load_arrays(store, f"global_step{step}", 0)
        assert found["moving"] == np.full(1000, step, dtype=np.float32).tobytes()


async def test_without_dedup_nothing_is_referred_to(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, dedup=False)
    for step in (1, 2):
        await save(client, step, shard(step))
    assert await holders(store, "global_step2") == set()


async def test_retention_and_metrics_reach_the_coordinator(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, retention=wire.Rules(best=1, metric="loss"))
    for step, loss in ((1, 1.0), (2, float("nan")), (3, 3.0)):
        await save(client, step, shard(step, weight=step), metrics={"loss": loss})
    found = {c.tag: c.outcome.metrics for c in await catalog.checkpoints(store)}
    assert found["global_step1"] == {"loss": 1.0}
    assert found["global_step3"] == {"loss": 3.0}


async def test_rules_that_cannot_be_are_refused(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, retention=wire.Rules(keep_last=0))
    assert (await client.refused()).code == "UsageError"


async def test_a_stale_save_is_told_and_counted(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    for step in (1, 2):
        await save(client, step, shard(step))
    told = [message for message in client.heard if isinstance(message, wire.Progress) and message.stale]
    assert {message.save for message in told} == {2}
    [record] = daemon.hub.ranks_at(str(root))
    assert (record.committed, record.stale) == (2, 1)
