"""Each call to the disk that a rank makes for a save fails once, with EIO, before or after it has had its effect.

Whichever it is: the save ends at once, on all ranks alike; a commit is whole, an abort leaves nothing behind; what was
committed before stays; and the next start saves again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore
from tests.builders import begin_start, load_arrays, objects, plan_save, rank_arrays
from tests.faults.failing_disk import FailingDisk, When

NEVER_S = 600.0
RANKS = (0, 1)


@dataclass(frozen=True)
class Saved:
    """A save of two ranks, one of which met the failure."""

    attempts: list[Attempt]
    disk: FailingDisk

    @property
    def committed(self) -> bool:
        return self.attempts[0].phase is Phase.COMMITTED


async def save(root: Path, inner: OsDisk, *, rank: int, fails: int | None, when: When = "before") -> Saved:
    """Save step 2 on both ranks; call number `fails` of `rank` fails."""
    disk = FailingDisk(inner, fails=fails, when=when)
    sound = PosixStore(root, FailingDisk(inner))
    stores = {r: PosixStore(root, disk) if r == rank else sound for r in RANKS}
    planned = await plan_save(sound, tag="global_step2", timeout_s=NEVER_S)
    attempts = await asyncio.gather(*(replace(planned, store=stores[r]).run(r) for r in RANKS))
    return Saved(attempts, disk)


async def fresh(root: Path, inner: OsDisk) -> Store:
    """A root with the checkpoint of step 1."""
    store = PosixStore(root, FailingDisk(inner))
    await begin_start(store)
    await commit(store, 1)
    return store


async def commit(store: Store, step: int) -> None:
    planned = await plan_save(store, tag=f"global_step{step}")
    attempts = await asyncio.gather(*(planned.run(rank) for rank in RANKS))
    assert [attempt.phase for attempt in attempts] == [Phase.COMMITTED] * 2


async def check_whole(store: Store, step: int) -> None:
    found = await verify(store, await root_view.find(store, f"global_step{step}"), LoadConfig())
    assert found.damage == []
    for rank in RANKS:
        expected = {fqn: array.tobytes() for fqn, array in rank_arrays(rank).items()}
        assert await load_arrays(store, f"global_step{step}", rank) == expected


async def check_after(root: Path, store: Store, saved: Saved) -> None:
    """All that must hold, whatever failed."""
    phases = [attempt.phase for attempt in saved.attempts]
    assert all(attempt.outcome is not None for attempt in saved.attempts), phases
    assert len({phase is Phase.COMMITTED for phase in phases}) == 1, phases
    await check_whole(store, 1)
    before = await root_view.state_of(store)
    await begin_start(store)
    await recover(store, before)
    newest = (await root_view.checkpoints(store))[0].tag
    assert newest == ("global_step2" if saved.committed else "global_step1")
    assert await root_view.latest(store) == newest
    if saved.committed:
        await check_whole(store, 2)
    else:
        assert [path for suffix in (".chunks", ".index") for path in objects(root / "global_step2", suffix)] == []
    await commit(store, 3)
    await check_whole(store, 3)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rank", RANKS)
async def test_each_call_of_a_save_fails_once(request: pytest.FixtureRequest, tmp_path: Path, rank: int, when: When) -> None:
    """The night goes through all calls; the gate takes some, and which ones these are is up to how the two ranks take turns."""
    stride = int(request.config.getoption("--call-stride"))
    inner = OsDisk()
    ended: dict[bool, list[str]] = {True: [], False: []}
    for number in range((rank + (when == "after")) % stride, 1000, stride):
        root = tmp_path / str(number)
        store = await fresh(root, inner)
        saved = await save(root, inner, rank=rank, fails=number, when=when)
        if saved.disk.failed is None:
            break
        try:
            await check_after(root, store, saved)
        except Exception as error:
            error.add_note(f"call {number} of rank {rank} failed {when} its effect: {saved.disk.failed}")
            raise
        ended[saved.committed].append(saved.disk.failed)
    else:
        raise AssertionError("the save makes more calls than this test is ready for")
    await inner.close()
    if stride == 1:
        assert ended[False], "no failure aborted the save"
        assert ended[True], "no failure was survived"
