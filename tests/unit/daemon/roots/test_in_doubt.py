"""INDOUBT-1 to INDOUBT-3: what a daemon that was restarted alone decides, and what it leaves. `latest` follows, unless another
program has written it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointd.config import LoadConfig
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.roots import in_doubt
from checkpointd.daemon.roots.in_doubt import InDoubtAttempts
from checkpointd.daemon.roots.root_monitor import MonitorPace, RootMonitor
from checkpointd.daemon.roots.root_scan import RootScanner
from checkpointd.layout.keys import attempt_lease_key
from checkpointd.layout.manifest import Lease, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome.recover import judge
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store import writers
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.builders import Save, attempts_at, leave_in_doubt, save_checkpoint
from tests.job_elsewhere import ELSEWHERE
from tests.unit.daemon.roots.conftest import AT_ONCE, NEVER_S, PREFIX, TAG, look, state


async def test_a_latest_that_another_program_has_written_stays() -> None:
    """Its save may be newer."""
    store = MemoryStore()
    await leave_in_doubt(store, tag=TAG)
    await store.put("global_step20/mp_rank_00_model_states.pt", b"of another program")
    await store.put("latest", b"global_step20")
    [view] = await attempts_at(store, TAG)
    assert (await in_doubt._decide(store, await judge(store, view.tag, view.id))).status == "checkpoint"
    assert await store.get("latest") == b"global_step20"


async def test_indoubt_1_votes_of_all_ranks_are_rolled_forward(
    hub: Hub, root: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the job lives: its coordinator was a daemon that is gone."""
    await leave_in_doubt(store, world_size=3, voting=(0, 1, 2))
    found = await look(hub, root)
    assert [c.tag for c in found.checkpoints] == [TAG]
    assert found.latest == TAG
    checkpoint = await root_view.find(store, TAG)
    assert (checkpoint.commit.decided_by, checkpoint.commit.order) == (-1, (1, 1))
    assert (await verify(store, checkpoint, LoadConfig())).whole
    assert f"{PREFIX} was left in doubt; committed: every rank had voted yes" in caplog.text


async def test_indoubt_1_latest_moves_only_where_the_save_asked_for_it(hub: Hub, root: Path, store: Store) -> None:
    await leave_in_doubt(store, save_latest=False)
    assert (await look(hub, root)).latest is None
    assert await state(store) == "committed"


async def test_indoubt_1_a_coordinator_that_lives_is_given_its_time(hub: Hub, root: Path, store: Store) -> None:
    await leave_in_doubt(store)
    await look(hub, root, MonitorPace(patience_s=NEVER_S, grace_s=0.0))
    assert await state(store) == "in-doubt"


@pytest.mark.usefixtures("dead_job")
@pytest.mark.parametrize(("voting", "after"), [((0, 1), "committed"), ((1,), "aborted")])
async def test_indoubt_1_a_surviving_attempt_is_decided_like_its_own(
    hub: Hub, root: Path, store: Store, voting: tuple[int, ...], after: str
) -> None:
    await leave_in_doubt(store, voting=voting)
    await starts.take(store, 2, [PREFIX])
    await look(hub, root)
    assert await state(store) == after


async def test_indoubt_1_nothing_that_a_new_job_may_be_loading_is_removed(hub: Hub, root: Path, store: Store) -> None:
    await save_checkpoint(store, n=1)
    await leave_in_doubt(store, k=1, n=2)
    await starts.take(store, 2, [f"{TAG}/00000001-1"])
    await look(hub, root)
    assert [one.status for one in await attempts_at(store, TAG)] == ["checkpoint", "checkpoint"]


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_a_vote_that_nobody_can_give_any_more_aborts_and_the_bulk_goes(
    hub: Hub, root: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await leave_in_doubt(store, voting=(0,))
    await look(hub, root)
    [view] = await attempts_at(store, TAG)
    assert view.abort is not None
    assert (view.abort.ranks, view.abort.decided_by) == ((1,), -1)
    assert view.swept
    assert not await root_view.objects_of(store, PREFIX)
    assert f"{PREFIX} was left in doubt; aborted: the job ended before the attempt was decided" in caplog.text


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_objects_without_any_vote_are_decided_too(hub: Hub, root: Path, store: Store) -> None:
    save = await leave_in_doubt(store, voting=())
    await store.put(save.info(0).key("00000-0.chunks"), b"begun")
    await look(hub, root)
    assert await state(store) == "aborted"


async def test_indoubt_2_while_the_job_lives_its_attempt_is_only_watched(
    hub: Hub, root: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await leave_in_doubt(store, voting=(0,))
    monitor = RootMonitor(hub, AT_ONCE)
    for _ in range(3):
        await monitor.look(str(root))
    assert await state(store) == "in-doubt"
    assert caplog.text.count(f"{PREFIX} is in doubt: its job (process ") == 1
    assert "lives, and decides it" in caplog.text


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_a_job_that_cannot_be_seen_from_here_is_not_taken_for_dead(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writers, "is_within_sight", lambda _: False)
    await leave_in_doubt(store, voting=(0,))
    await look(hub, root)
    assert await state(store) == "in-doubt"
    assert "cannot be seen from here" in caplog.text


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_until_the_grace_is_over_a_dead_jobs_attempt_is_watched(hub: Hub, root: Path, store: Store) -> None:
    await leave_in_doubt(store, voting=(0,))
    await look(hub, root, MonitorPace(patience_s=0.0, grace_s=NEVER_S))
    assert await state(store) == "in-doubt"


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_ranks_that_had_longer_to_vote_are_waited_for_longer(hub: Hub, root: Path, store: Store) -> None:
    for start, patience_s in ((1, NEVER_S), (2, 0.0)):
        assert (await starts.take(store, 2, commit_timeout_s=patience_s)).start == start
        await leave_in_doubt(store, voting=(0,), start=start)
        await look(hub, root)
    assert [one.status for one in await attempts_at(store, TAG)] == ["aborted", "aborted"]


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_what_another_daemon_works_at_is_left_to_it(store: Store) -> None:
    """A renewal of its lease is a change, and one that can be seen from here to have ended says nothing."""
    await leave_in_doubt(store, voting=(0,))
    doubts, key = InDoubtAttempts(grace_s=600.0, patience_s=5.0), attempt_lease_key(PREFIX)

    async def settled(now: float, process: str, count: int) -> list[str]:
        await store.put(key, encode(Lease(process=process, count=count, length_s=30.0, writer=writer())))
        found = await doubts.settle(store, await attempts_at(store, TAG), set(), now)
        return [one.status for one in found]

    for now, count in ((100.0, 1), (600.0, 2), (1100.0, 3), (1600.0, 3)):
        assert await settled(now, ELSEWHERE, count) == []
    assert await settled(1700.0, ELSEWHERE, 3) == ["aborted"]


async def test_indoubt_2_a_lease_that_this_process_could_not_remove_says_nothing(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave_in_doubt(store, voting=(0,))
    lease = Lease(process=writers.new_writer(), count=1, length_s=30.0, writer=writer())
    await store.put(attempt_lease_key(PREFIX), encode(lease))
    monkeypatch.setattr(writers, "is_alive", lambda process: process == lease.process)
    await look(hub, root)
    assert await state(store) == "aborted"


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_2_the_grace_begins_anew_with_every_change(store: Store) -> None:
    save, doubts = await leave_in_doubt(store, voting=(0,), world_size=3), InDoubtAttempts(grace_s=600.0, patience_s=5.0)

    async def settled(now: float) -> list[str]:
        found = await doubts.settle(store, await attempts_at(store, TAG), set(), now)
        return [one.status for one in found]

    assert await settled(100.0) == []
    assert await settled(699.0) == []
    await save.vote(1)
    assert await settled(701.0) == []
    assert await settled(1300.0) == []
    assert doubts.any
    assert await settled(1301.0) == ["aborted"]
    assert await doubts.settle(store, [], set(), 1302.0) == []
    assert not doubts.any


@pytest.mark.usefixtures("dead_job")
@pytest.mark.parametrize("voting", [(0, 1), (0,), ()])
async def test_indoubt_3_what_a_job_works_at_is_left_alone(
    hub: Hub, root: Path, store: Store, voting: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    save: Save = await leave_in_doubt(store, voting=voting)
    await store.put(save.info(0).key("00000-1.chunks"), b"being written")
    monkeypatch.setattr(hub.jobs.__class__, "at", lambda *_: [SimpleNamespace(info=save.info(1))])
    await look(hub, root)
    assert await state(store) == "in-doubt"


@pytest.mark.usefixtures("dead_job")
async def test_indoubt_3_an_attempt_whose_job_ends_during_a_look_is_left_to_the_next_one(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save: Save = await leave_in_doubt(store)
    working, scan = [SimpleNamespace(info=save.info(1))], RootScanner.look

    async def looking(*given: Any) -> Any:
        found = await scan(*given)
        working.clear()
        return found

    monkeypatch.setattr(hub.jobs.__class__, "at", lambda *_: list(working))
    monkeypatch.setattr(RootScanner, "look", looking)
    await look(hub, root)
    assert await state(store) == "in-doubt"
    assert "in doubt" not in caplog.text


@pytest.mark.usefixtures("dead_job")
async def test_a_daemon_that_leaves_decides_nothing(hub: Hub, root: Path, store: Store) -> None:
    await leave_in_doubt(store)
    hub.leaving = True
    await look(hub, root)
    assert await state(store) == "in-doubt"
