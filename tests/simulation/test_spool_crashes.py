"""SPOOL-1 and SPOOL-4 at every crash point: the power of a node goes while a shard is taken in and uploaded.

The spool lies on the simulated disk. The root is a bucket elsewhere, which loses nothing.
"""

from __future__ import annotations

import asyncio

import pytest

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.config import CommitConfig, LoadConfig, SpoolConfig
from checkpointd.daemon.spool.places import name_of
from checkpointd.daemon.spool.record import SPOOLED
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing.crashpoints import Crash, Scenario, every_crash_point
from checkpointd.testing.simdisk import ProcessDisk, SimDisk, SimOpenFile
from tests.spooled_saves import AwayStore, MemoryPlace, Node, begun_root

SEEDS = range(3)
SAVED = (1, 2)
SAFE = (Phase.SPOOLED, Phase.UPLOADING, Phase.PREPARED, Phase.COMMITTED)


class SharedMemory(MemoryStore):
    """Outlives the processes that write to it. As in a bucket, the unfinished writer of a dead one is in nobody's way."""

    def forget_writers(self) -> None:
        self._open_writers.clear()


class Machine:
    """A node with a simulated disk; each process on it has a spool of its own view."""

    def __init__(self, bucket: Store) -> None:
        self.disk, self.bucket, self.nonce = SimDisk(), bucket, ""
        self.reported: set[int] = set()
        """The steps of saves of which it was said that they are durable in the spool, or committed."""

    async def node(self, view: ProcessDisk, writer: str) -> Node:
        """The node of the process that has this view of the disk; its spool lies there."""
        name = name_of(self.bucket.url, None)
        place = MemoryPlace(made=lambda root: PosixStore(f"/spool/{root}", view, writer=writer, is_alive=lambda _: False))
        place.open(name, None)  # as a directory that an earlier process has made
        commit = CommitConfig(timeout_s=600.0, read_back=False)
        return await Node(self.bucket, SpoolConfig(directory="/spool"), nonce=self.nonce, place=place, commit=commit).begin()

    async def saves(self, view: ProcessDisk) -> None:
        """Save twice, and note what is said to be safe."""
        node = await self.node(view, "a")
        for step in SAVED:
            node.save(step, nbytes=1 << 13)
        while not all(attempt.phase in FINAL for attempt in node.attempts):
            self.reported |= {attempt.info.step for attempt in node.attempts if attempt.phase in SAFE}
            await asyncio.sleep(0.001)

    async def recovers(self, view: ProcessDisk) -> list[str]:
        """Go on with what was left. Returns what stays in the spool afterwards, but for the name of the root."""
        node = await (await self.node(view, "b")).restarts()
        await node.over()
        await node.directory.sweep()
        (store,) = node.place.stores.values()
        found = [entry.name for entry in await store.list("") if entry.is_prefix and entry.name.startswith("global_step")]
        return found + [entry.name for entry in await store.list(SPOOLED) if not entry.name.endswith(".committed")]


def scenario_of(kind: type[ProcessDisk], *, away: bool) -> Scenario:
    """Two saves, whose uploads run or wait for the bucket when the power goes."""

    async def scenario(crash: Crash) -> bool:
        memory = SharedMemory()
        bucket = AwayStore(memory)
        machine = Machine(bucket)
        machine.nonce = await begun_root(bucket)
        bucket.away = away
        view = machine.disk.process("a", kind)
        work = view.process.spawn(machine.saves(view))
        over = asyncio.ensure_future(asyncio.wait({work}, timeout=20.0))
        struck = await crash.strikes(machine.disk, [over])
        bucket.away = False
        machine.disk.after = lambda *_: None  # one crash is enough
        if not struck:
            machine.disk.power_cut()
        memory.forget_writers()
        after = machine.disk.process("b")
        await after.process.spawn(machine.recovers(after))
        committed = await root_view.checkpoints(bucket)
        for checkpoint in committed:
            assert (await verify(bucket, checkpoint, LoadConfig())).whole
        assert machine.reported <= {one.commit.step for one in committed}, machine.disk.story()
        return struck

    return scenario


@pytest.mark.parametrize("away", [False, True])
def test_spool_1_no_power_cut_loses_what_is_in_the_spool(away: bool) -> None:
    assert every_crash_point(scenario_of(ProcessDisk, away=away), SEEDS, stride=4) > 10 * len(SEEDS)


class Unsynced(ProcessDisk):
    """A disk on which nothing that is written in place becomes durable."""

    async def create(self, path: str) -> SimOpenFile:
        file = await super().create(path)

        async def sync() -> None:
            return

        file.sync = sync  # type: ignore[method-assign]
        return file


def test_the_scenario_notices_objects_that_are_not_durable() -> None:
    with pytest.raises(AssertionError):
        every_crash_point(scenario_of(Unsynced, away=True), range(12), stride=4)
