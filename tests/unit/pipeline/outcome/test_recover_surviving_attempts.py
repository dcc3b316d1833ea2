"""RECOVER-2 of recover.py: attempts whose writers outlive their trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig
from checkpointd.layout.log_records import AbortRecord, CommitRecord
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.names import TEMPORARY
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, restart

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"
ELSEWHERE = "another-node.0123456789ab.4026531836.77.123456.0a0b0c0d.0"
"""A temporary file of a process that cannot be seen from here."""


async def objects(store: Store, prefix: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in await store.list(prefix)}


# --- recovery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("voting", [(), (1,), (0, 1)])
async def test_recover_2_a_surviving_attempt_is_left_alone_and_the_next_start_decides_it(voting: tuple[int, ...]) -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=voting)
    await store.put(save.info(0).key("00000-2.chunks"), b"being written")
    before = await objects(store, PREFIX)
    done = await restart(store, PREFIX)
    assert (done.decided, done.swept, done.strays) == ([], 0, 0)
    assert await objects(store, PREFIX) == before
    [decided] = (await restart(store)).decided
    assert type(decided) is (CommitRecord if voting == (0, 1) else AbortRecord)


async def test_recover_2_others_are_decided_as_ever() -> None:
    store = MemoryStore()
    await leave_in_doubt(store)
    await leave_in_doubt(store, tag="global_step2", voting=(1,))
    await leave_in_doubt(store, tag="global_step3", voting=(0, 1))
    done = await restart(store, PREFIX)
    assert {o.attempt.partition("/")[0]: type(o) for o in done.decided} == {
        "global_step2": AbortRecord,
        "global_step3": CommitRecord,
    }
    assert await root_view.latest(store) == "global_step3"


async def test_recover_2_temporary_files_stay_while_somebody_out_of_sight_may_write(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        await leave_in_doubt(store, voting=(0,))
        stray = tmp_path / TEMPORARY / ELSEWHERE
        stray.write_bytes(b"a vote on its way")
        await restart(store, PREFIX)
        assert stray.exists()
        assert (await restart(store)).strays == 1
        assert not stray.exists()


# --- the old coordinator goes on ---------------------------------------------------------------------------------------


async def test_commit_2_a_surviving_attempt_is_committed_by_its_own_coordinator_after_the_restart() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=(1,))
    await restart(store, PREFIX)
    attempt = await save.run(0)
    assert attempt.phase is Phase.COMMITTED
    assert attempt.outcome is not None
    assert attempt.outcome.committed
    assert attempt.outcome.commit.decided_by == 0
    assert await root_view.latest(store) == TAG
    assert (await verify(store, await root_view.find(store, TAG), LoadConfig())).whole


async def test_a_surviving_abort_drops_the_coordinators_own_objects() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=(), failing={1: RuntimeError("no")})
    await save.vote(1)
    await restart(store, PREFIX)
    assert (await save.run(0)).phase is Phase.ABORTED
    assert sorted(await objects(store, PREFIX)) == ["00001.vote"]
