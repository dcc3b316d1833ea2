"""What became of a root over time, and how long its space lasts (HISTORY-1 to HISTORY-3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.daemon.roots.root_scan import RootScanner
from checkpointd.daemon.status.history import (
    DAY_S,
    METRICS_MAX,
    SAMPLE_S,
    SAMPLES_MAX,
    SAVES_MAX,
    RootHistory,
    SpaceSample,
    past_of,
)
from checkpointd.layout.log_records import AbortRecord, CommitRecord, LoggedAttempt, RemoveRecord
from checkpointd.layout.manifest import NO_REASON, BallotRef, WriterIdentity
from checkpointd.layout.save_timings import Cost
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.posix.store import PosixStore
from tests.builders import rank_arrays
from tests.unit.daemon.conftest import Daemon, shard_of

GIB = 1 << 30
BYTES = sum(array.nbytes for array in rank_arrays(0).values())


def decided(
    n: int, *, cost: Cost | None = None, time: str | None = None, aborted: bool = False, **metrics: float
) -> LoggedAttempt:
    name, at = f"t{n}/00000001-0", time or f"2026-01-{1 + n // 1440:02d}T{n // 60 % 24:02d}:{n % 60:02d}:00+00:00"
    by = WriterIdentity(host="h", pid=1, time=at)
    if aborted:
        abort = AbortRecord(attempt=name, error=NO_REASON, decided_by=0, writer=by)
        return LoggedAttempt(prefix=name, n=n, step=n, status="aborted", abort=abort)
    commit = CommitRecord(
        attempt=name,
        n=n,
        step=n,
        world_size=1,
        ballot=BallotRef(digest="0" * 32, size=1),
        metrics=metrics,
        cost=cost,
        decided_by=0,
        writer=by,
    )
    return LoggedAttempt.of(commit)


# --- saves ---------------------------------------------------------------------------------------------------


def test_what_a_commit_says_of_its_save() -> None:
    cost = Cost(took_s=7.2, held_s=0.01, raw_bytes=16 * GIB, stored_bytes=10 * GIB, written_bytes=GIB)
    found = past_of(decided(5, cost=cost, loss=1.5))
    assert found is not None
    assert (found.took_s, found.held_s, found.raw_bytes, found.stored_bytes) == (7.2, 0.01, 16 * GIB, 10 * GIB)
    assert found.metrics == {"loss": 1.5}


@pytest.mark.parametrize("cost", [None, Cost()])
def test_what_it_does_not_say_is_unknown_and_not_zero(cost: Cost | None) -> None:
    found = past_of(decided(5, cost=cost))
    assert found is not None
    assert (found.took_s, found.held_s, found.raw_bytes, found.stored_bytes) == (None, None, None, None)


def test_an_abort_is_told_and_what_is_undecided_is_not() -> None:
    found = past_of(decided(5, aborted=True))
    assert found is not None
    assert (found.tag, found.step, found.committed) == ("t5", 5, False)
    assert past_of(LoggedAttempt(prefix="t5/00000001-0", status="undecided")) is None


def test_a_save_without_a_time_is_left_out() -> None:
    assert past_of(decided(5, time="yesterday")) is None


def test_a_few_metrics_are_told() -> None:
    found = past_of(decided(5, **{f"m{k}": 1.0 for k in range(9)}))
    assert found is not None
    assert list(found.metrics) == [f"m{k}" for k in range(METRICS_MAX)]


def test_saves_stand_in_the_order_of_time_and_the_oldest_go() -> None:
    history = RootHistory()
    history.decided(decided(n) for n in range(SAVES_MAX + 10, 0, -1))
    history.decided([decided(7), decided(SAVES_MAX + 11)])
    steps = [one.step for one in history.saves()]
    assert steps == list(range(12, SAVES_MAX + 12))


def test_each_save_is_told_so_that_counts_and_medians_over_them_are_true() -> None:
    history = RootHistory()
    costs = [9.0 if n % 10 == 3 else 1.0 for n in range(100)]
    history.decided(decided(n, cost=Cost(took_s=took_s)) for n, took_s in enumerate(costs))
    assert [one.took_s for one in history.saves()] == costs


async def test_a_daemon_that_starts_again_reads_the_history_from_the_store(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    clients = [await daemon.client() for _ in range(2)]
    for rank, client in enumerate(clients):
        await client.ready(root, shard_of(rank), rank=rank, world_size=2)
    for n in (1, 2, 3):
        for rank, client in enumerate(clients):
            await client.whole_save(n, shard_of(rank))
        for client in clients:
            await client.outcome(n)
    look, _ = await RootScanner().look(store)
    assert [(one.tag, one.committed) for one in look.history] == [(f"global_step{n}", True) for n in (1, 2, 3)]
    for one in look.history:
        assert one.raw_bytes == 2 * BYTES
        assert one.took_s is not None
        assert one.took_s > 0
        assert one.stored_bytes is not None


async def test_what_was_removed_since_stays_in_the_history(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, shard_of(0))
    for n in (1, 2):
        await client.whole_save(n, shard_of(0))
        await client.outcome(n)
    looker = RootScanner()
    await looker.look(store)
    await _remove(store, "global_step1")
    look, _ = await looker.look(store)
    assert [one.tag for one in look.history] == ["global_step1", "global_step2"]
    assert [one.tag for one in look.checkpoints] == ["global_step2"]


async def _remove(store: PosixStore, tag: str) -> None:
    prefix = (await root_view.find(store, tag)).prefix
    record = RemoveRecord(attempts=(prefix,), reason="by hand", user="alice", writer=writer())
    assert not await RootLog.of(store).add(record)


# --- space ---------------------------------------------------------------------------------------------------


def measured(*rooms: tuple[float, float], total: int = 1000 * GIB) -> RootHistory:
    history = RootHistory()
    for hours, free in rooms:
        history.measured(SpaceSample(hours * 3600, int(free * GIB), total))
    return history


def test_days_left_come_from_how_the_free_space_shrinks() -> None:
    space = measured(*((hour, 500 - 2 * hour) for hour in range(5))).space()
    assert space is not None
    assert space.growth_bytes_per_day == pytest.approx(48 * GIB)
    assert space.days_left == pytest.approx(492 / 48)


def test_what_is_removed_counts_against_what_is_saved() -> None:
    saw = [(minutes / 60, 500 - minutes % 20) for minutes in range(0, 24 * 60, 5)]
    space = measured(*saw).space()
    assert space is not None
    assert space.growth_bytes_per_day is not None
    assert abs(space.growth_bytes_per_day) < 2 * GIB
    assert space.days_left is None or space.days_left > 200


def test_before_an_hour_nothing_is_said_of_days() -> None:
    space = measured((0, 500), (0.9, 400)).space()
    assert space is not None
    assert (space.free_bytes, space.growth_bytes_per_day, space.days_left) == (400 * GIB, None, None)
    assert RootHistory().space() is None


def test_space_that_comes_free_lasts_for_ever() -> None:
    space = measured((0, 400), (1, 450), (2, 500)).space()
    assert space is not None
    assert space.growth_bytes_per_day is not None
    assert space.growth_bytes_per_day < 0
    assert space.days_left is None


def test_another_file_system_at_the_root_begins_anew() -> None:
    history = measured((0, 500), (2, 400))
    history.measured(SpaceSample(3 * 3600.0, 90 * GIB, 100 * GIB))
    space = history.space()
    assert space is not None
    assert (space.total_bytes, space.growth_bytes_per_day) == (100 * GIB, None)


def test_looks_that_come_often_are_not_all_kept() -> None:
    history = RootHistory()
    for second in range(0, 4 * int(DAY_S), 60):
        history.measured(SpaceSample(float(second), GIB, 2 * GIB))
    assert len(history._rooms) == SAMPLES_MAX
    gaps = {b.at - a.at for a, b in zip(history._rooms, list(history._rooms)[1:], strict=False)}
    assert min(gaps) >= 60
    assert max(gaps) <= SAMPLE_S + 60
