"""How long saves hold training: metrics and commits say what the trainer's handles say, whoever persists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpointd.daemon.hub import Hub
from checkpointd.daemon.protocol import wire
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.staging.stager import StagingMode
from tests.unit.daemon.conftest import Daemon, serving, shard_of, until

torch = pytest.importorskip("torch")


def stall_s(hub: Hub, root: Path) -> float:
    return hub.tallies[str(root)].stall_s


def trained(root: Path, socket: str, staging: StagingMode) -> list[float]:
    """Save three times, with a step after each; how long each save held training, as its handle says."""
    net = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(root, sidecar=socket, staging=staging) as ckpt:
        handles = []
        for step in range(3):
            handles.append(ckpt.save(step, {"net": net}))
            net(torch.ones(1, 512)).sum().backward()
            optimizer.step()
        return [handle.wait(timeout=60).timings.held_s for handle in handles]


async def told_by_commits(root: Path) -> list[float]:
    async with PosixStore(root) as store:
        found = sorted(await root_view.checkpoints(store), key=lambda checkpoint: checkpoint.commit.step)
    return [checkpoint.commit.cost.held_s for checkpoint in found if checkpoint.commit.cost is not None]


@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("options", [{}, {"memory_bytes_max": 4096}], ids=["by the sidecar", "inline"])
async def test_the_time_that_saves_hold_training(root: Path, staging: StagingMode, options: dict[str, int]) -> None:
    async with serving(root.parent, **options) as daemon:
        held = await asyncio.to_thread(trained, root, daemon.path, staging)
        await until(lambda: daemon.hub.tallies[str(root)].committed == 3)
        assert min(held) > 0
        assert stall_s(daemon.hub, root) == pytest.approx(sum(held), abs=1e-5)
    assert await told_by_commits(root) == pytest.approx(held, abs=1e-5)


async def test_a_save_that_is_spoiled_and_one_that_is_told_again_count_once(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, shard_of())
    await client.save(1)
    error = ErrorReport(code="SkippedError", message="two saves are still in flight")
    await client.send(wire.Spoiled(save=1, error=error, held_s=2.0))
    await client.outcome(1)
    assert stall_s(daemon.hub, root) == 2.0
    await client.save(2)
    for _ in range(2):
        await client.send(wire.Spoiled(save=2, error=error, held_s=3.0))
    await client.outcome(2)
    assert stall_s(daemon.hub, root) == 5.0


async def test_a_client_sets_the_pace_of_a_save(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, shard_of())
    await client.save(1)
    await client.send(wire.Paced(save=1, share=0.25, left_s=30.0))
    await until(daemon.hub.jobs.all)
    [job] = daemon.hub.jobs.all()
    await until(lambda: job.progress.pace.share == 0.25)
    assert job.status().pace == 0.25
    assert job.progress.pace.rest_after(0.01, None) == pytest.approx(0.03)
    job.progress.pace.rested_s = 2.0
    await client.send(wire.Spoiled(save=1, error=ErrorReport(code="SkippedError", message="it is skipped")))
    await client.outcome(1)
    assert daemon.hub.tallies[str(root)].rested_s == 2.0
    await client.send(wire.Paced(save=1, share=0.5, left_s=30.0))  # a save that is over has no pace


async def test_the_sidecar_follows_the_pace_of_the_trainer(root: Path) -> None:
    def train(socket: str) -> float:
        with Checkpointer(root, sidecar=socket, compression="none") as ckpt:
            core_of(ckpt)._saver.governor.share = 0.5
            handle = ckpt.save(1, {"w": torch.ones(1 << 16)})
            handle._wait(handle.done, 60)  # not wait(), which lifts the pace
            return handle.timings.rested_s

    async with serving(root.parent) as daemon:
        rested_s = await asyncio.to_thread(train, daemon.path)
        assert rested_s > 0
        assert daemon.hub.tallies[str(root)].rested_s == pytest.approx(rested_s)
