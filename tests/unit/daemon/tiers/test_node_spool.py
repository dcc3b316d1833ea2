"""The spool of a daemon: what an earlier one has left."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from checkpointd.commit.machine import IN_SPOOL
from checkpointd.config import ServeConfig
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.served_roots import ServedRoots
from checkpointd.daemon.spool.places import DiskPlace, Room, name_of
from checkpointd.daemon.tiers import node_spool
from checkpointd.daemon.tiers.node_spool import NodeSpool
from checkpointd.store.memory import MemoryStore
from tests.servers.s3_server import free_ports
from tests.spooled_saves import AwayStore, Node, begun_root, until


async def test_what_was_left_at_a_bucket_goes_on_after_options_of_its_url_have_changed(tmp_path: Path) -> None:
    bucket = f"anonymous=true&endpoint=http://127.0.0.1:{free_ports(1)[0]}"
    config = ServeConfig(
        socket="s", roots=(f"s3://bucket?{bucket}&retry_s=0.1",), uids=(os.geteuid(),), spool=str(tmp_path / "spool")
    )
    assert config.spool_config is not None
    root, place = AwayStore(MemoryStore()), DiskPlace(str(tmp_path / "spool"))
    node = await Node(root, config.spool_config, nonce=await begun_root(root), place=place).begin()  # type: ignore[arg-type]
    node.own.root = await node.directory.at(f"s3://bucket/run1?{bucket}&retry_s=0.2")
    root.away = True
    node.save(1)
    await until(lambda: node.attempts[0].phase in IN_SPOOL)
    for task in node.tasks:
        task.cancel()
    await asyncio.wait(node.tasks)
    hub = Hub(config)
    spool = NodeSpool(hub, config.spool_config)
    await spool.take_up()
    (job,) = hub.jobs.all()
    assert job.root == hub.roots.check("s3://bucket/run1"), "so a trainer hears of it"
    job.task.cancel()
    await asyncio.wait([job.task])
    await spool.close()


async def test_the_room_is_measured_while_nobody_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_spool, "MEASURE_S", 0.01)
    config = ServeConfig(socket="s", roots=(str(tmp_path),), uids=(os.geteuid(),), spool=str(tmp_path / "spool"))
    assert config.spool_config is not None
    spool = NodeSpool(Hub(config), config.spool_config)
    await spool.take_up()
    await until(lambda: spool.status().used_bytes == 0)
    left = DiskPlace(str(tmp_path / "spool")).open(name_of("/mnt/root", None), None)
    await left.put("one", bytes(5000))
    await until(lambda: (spool.status().used_bytes or 0) >= 5000)
    await left.delete("one")
    await until(lambda: (spool.status().used_bytes or 0) < 5000)

    def fails(_: DiskPlace) -> Room:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DiskPlace, "_room", fails)
    await until(lambda: spool.status().used_bytes is None)
    await spool.close()


def test_another_server_is_another_place() -> None:
    roots = ServedRoots(["s3://bucket?endpoint=http://one:1&retry_s=9"])
    for root in ("s3://bucket/run1?endpoint=http://two:1", "s3://other/run1", "/mnt/run1"):
        assert roots.as_served(root) == root
