"""START-1 of starts.py and RECOVER-2 of recover.py: attempts whose writers outlive their trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import LoadConfig
from checkpointd.errors import FencedError
from checkpointd.layout.log_records import AbortRecord, CommitRecord
from checkpointd.pipeline.gc.retire import retire
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.names import TEMPORARY
from checkpointd.store.posix.store import PosixStore
from tests.builders import begin_start, leave_in_doubt, phases, restart, save_checkpoint

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"
ELSEWHERE = "another-node.0123456789ab.4026531836.77.123456.0a0b0c0d.0"
"""A temporary file of a process that cannot be seen from here."""


async def objects(store: Store, prefix: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in await store.list(prefix)}


# --- the record, and the fence -----------------------------------------------------------------------------------------


async def test_the_record_of_a_start_names_the_surviving_attempts() -> None:
    store = MemoryStore()
    assert (await starts.take(store, 2)).spared == ()
    taken = await starts.take(store, 2, [PREFIX])
    assert (await starts.read(store, 2)) == taken
    assert taken.spared == (PREFIX,)


async def test_start_1_the_newest_start_alone_says_who_survives() -> None:
    store = MemoryStore()
    await begin_start(store)
    await starts.check_fence(store, 1, PREFIX)
    await starts.take(store, 2, [PREFIX])
    await starts.check_fence(store, 1, PREFIX)
    for attempt in (None, f"{TAG}/00000001-1", "global_step10/00000001-0", TAG):
        with pytest.raises(FencedError, match=r"taken over memory://memory: start 2, by .* This job is start 1,"):
            await starts.check_fence(store, 1, attempt)
    await starts.take(store, 2)
    with pytest.raises(FencedError, match="start 3, by"):
        await starts.check_fence(store, 1, PREFIX)
    await starts.take(store, 2, [PREFIX])  # too late, since start 3 did not spare it (LOG-7)
    with pytest.raises(FencedError, match="start 4, by"):
        await starts.check_fence(store, 1, PREFIX)


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
    assert attempt.outcome.commit is not None
    assert attempt.outcome.commit.decided_by == 0
    assert await root_view.latest(store) == TAG
    assert (await verify(store, await root_view.find(store, TAG), LoadConfig())).whole


async def test_latest_does_not_go_back_to_a_surviving_attempt_that_commits_late() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, tag="global_step5", voting=(1,))
    await restart(store, "global_step5/00000001-0")
    assert phases(await save_checkpoint(store, tag="global_step2")) == [Phase.COMMITTED] * 2
    assert (await save.run(0)).phase is Phase.COMMITTED
    assert await root_view.latest(store) == "global_step2"
    assert (await restart(store)).latest_moved_to is None


async def test_a_surviving_attempt_of_a_tag_that_was_saved_again_replaces_nothing() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=(1,))
    await restart(store, PREFIX)
    await save_checkpoint(store)
    assert (await save.run(0)).phase is Phase.COMMITTED
    found = await root_view.find(store, TAG)
    assert str(found.attempt) == "00000002-0"
    assert (await read_back(store, found)).whole
    await restart(store)
    await retire(store, await root_view.scan(store), Retention())  # what the new job does, once it has loaded
    assert {str(view.attempt): view.state for view in await root_view.attempts_of(store, TAG)} == {
        "00000001-0": "deleted",
        "00000002-0": "committed",
    }


async def test_collect_5_a_surviving_commit_removes_nothing_that_the_new_job_may_be_loading() -> None:
    store = MemoryStore()
    await save_checkpoint(store, n=1)
    save = await leave_in_doubt(store, k=1, n=2, voting=(1,))
    await restart(store, f"{TAG}/00000001-1")
    loading = await root_view.find(store, TAG)
    assert (await save.run(0)).phase is Phase.COMMITTED
    assert str(loading.attempt) == "00000001-0"
    assert (await verify(store, loading, LoadConfig())).whole
    assert str((await root_view.find(store, TAG)).attempt) == "00000001-1"
    assert (await read_back(store, await root_view.find(store, TAG))).whole
    await restart(store)
    await retire(store, await root_view.scan(store), Retention())  # what the new job does, once it has loaded
    assert await objects(store, PREFIX) == {}


async def test_collect_5_a_surviving_abort_drops_the_coordinators_own_objects() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=(), failing={1: RuntimeError("no")})
    await save.vote(1)
    await restart(store, PREFIX)
    assert (await save.run(0)).phase is Phase.ABORTED
    assert sorted(await objects(store, PREFIX)) == ["00001.vote"]


async def test_a_start_in_which_it_does_not_survive_fences_it() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=(1,))
    await restart(store, PREFIX)
    await starts.take(store, 2)
    attempt = await save.run(0)
    assert (attempt.phase, type(attempt.error)) == (Phase.ABORTED, FencedError)
