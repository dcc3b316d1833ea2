"""Saves that a trainer persists itself, although it uses a sidecar, are seen: the trainer tells them, or the store does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpointd.config import ServeConfig
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.roots.root_monitor import MonitorPace, RootMonitor
from checkpointd.daemon.status.model import RootStatus
from checkpointd.errors import UnreadableError
from checkpointd.layout.manifest import ErrorReport, Inline
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from tests.builders import plan_save
from tests.unit.daemon.conftest import Daemon, answered, serving, shard_of, until

torch = pytest.importorskip("torch")

LOST = Inline(reason="lost", why="no sidecar answers")


def told(**options: object) -> wire.Inlined:
    settings = {
        "tag": "global_step1",
        "attempt": "00000001-0",
        "step": 1,
        "phase": "committed",
        "inline": LOST,
        "raw_total": 800,
        "stored": 400,
        "began_s": 9.0,
        "ended_s": 2.0,
        "held_s": 0.5,
        "seconds": PhaseSeconds(disk=3.0),
        **options,
    }
    return wire.Inlined(**settings)  # type: ignore[arg-type]  # fields of Inlined, named by the test


def root_of(hub: Hub) -> RootStatus:
    [root] = standing(hub).roots
    return root


async def test_what_a_trainer_tells_counts_like_a_save_of_the_daemon(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    for message in (told(), told(), told(tag="global_step2", step=2, phase="failed")):  # twice the same counts once
        await client.send(message)
    await answered(client)
    tally = daemon.hub.tallies[str(root)]
    assert (tally.results["committed"], tally.results["failed"], tally.inline) == (1, 1, {"refused": 0, "lost": 2})
    assert (tally.bytes_persisted, tally.bytes_stored, tally.spent["disk"].total_s) == (800, 800, 6.0)
    assert tally.stall_s == 1.0
    assert list(tally.commits.cumulative())[-1] == (float("inf"), 1)
    seen = root_of(daemon.hub)
    assert [(save.tag, save.phase, save.inline) for save in seen.recent] == [
        ("global_step1", "committed", LOST),
        ("global_step2", "failed", LOST),
    ]
    assert seen.ranks[0].saves_inline == 2


async def test_of_an_error_that_a_trainer_tells_little_is_kept(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    await client.send(told(phase="failed", error=ErrorReport(code="x" * 9000, message="y" * 9000, phase="z" * 9000)))
    await answered(client)
    (save,) = root_of(daemon.hub).recent
    assert save.error is not None
    assert save.error.code == "CheckpointdError"
    assert len(save.error.message) + len(save.error.phase) < 700


async def test_the_log_tells_of_it_in_one_line(daemon: Daemon, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    error = ErrorReport(code="StoreFullError", message="no space left")
    for message in (told(), told(), told(tag="global_step2", step=2, phase="failed", error=error)):
        await client.send(message)
    await answered(client)
    done, failed = [record for record in caplog.records if "inline" in record.getMessage()]
    assert done.getMessage() == (
        "global_step1/00000001-0: committed inline, by its trainer (rank 0): 800 B, stored as 400 B, in 7.0 s "
        "(no sidecar answers)"
    )
    assert failed.getMessage().endswith("(no sidecar answers): no space left")
    assert vars(done)["fields"] | {"seconds": 7.0} == {
        "event": "committed",
        "bytes": 800,
        "stored_bytes": 400,
        "seconds": 7.0,
        "phase_seconds": {"disk": 3.0},
        "inline": "lost",
        "why": "no sidecar answers",
    }


@pytest.mark.parametrize("phase", ["committed", "failed"])
async def test_no_save_is_answered_by_what_somebody_told(daemon: Daemon, root: Path, phase: str) -> None:
    """The trainer was told that a save which nobody had written was committed."""
    teller, client, shard = await daemon.client(), await daemon.client(), shard_of()
    await teller.join(root)
    await teller.begin(1)
    await teller.send(told(phase=phase))
    await answered(teller)
    await client.ready(root, shard)
    await client.whole_save(1, shard)
    assert (await client.outcome(1)).phase == "committed"
    async with PosixStore(root) as store:
        assert [one.tag for one in await root_view.checkpoints(store)] == ["global_step1"]


@pytest.mark.parametrize("strange", [{"attempt": "x"}, {"phase": "persisting"}, {"tag": "../up"}])
async def test_what_cannot_be_is_refused(daemon: Daemon, root: Path, strange: dict[str, str]) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.send(told(**strange))
    await client.refused()
    assert daemon.hub.refusals["request"] == 1
    assert root_of(daemon.hub).recent == ()


async def test_the_store_tells_what_no_trainer_told(tmp_path: Path) -> None:
    """The commit of a trainer that died before it could say a word; once, however often the root is looked at."""
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),)))
    root = str(tmp_path / "job")
    monitor = RootMonitor(hub, MonitorPace(patience_s=0.0))
    try:
        async with PosixStore(root) as store:
            save = await plan_save(store, world_size=2, inline={1: LOST})
            for rank in range(2):
                record = hub.rank(root, rank, world_size=2, pid=7)
                hub.begun(record, 1, "nonce")
            await save.run_all()
            for _ in range(2):
                await monitor.look(root)
    finally:
        await hub.roots.close()
    assert hub.tallies[root].inline == {"refused": 0, "lost": 1}
    assert hub.tallies[root].committed == 1
    [seen] = root_of(hub).recent
    assert (seen.rank, seen.tag, seen.inline, seen.seconds.disk is not None) == (1, "global_step1", LOST, True)
    assert seen.voted_at is not None


@pytest.mark.parametrize(
    ("seconds", "phases"),
    [
        (PhaseSeconds(staging=1.5, persisting=4.0, waiting=1.5), (1.5, 1.5, 5.5)),
        (PhaseSeconds(staging=1.5), (1.5, 1.5, None)),
        (PhaseSeconds(disk=3.0), (None, None, None)),
        (PhaseSeconds(staging=1.5, persisting=400.0), (1.5, 1.5, 7.0)),
    ],
)
async def test_a_save_that_its_trainer_persisted_is_not_told_as_staging_from_end_to_end(
    daemon: Daemon, root: Path, seconds: PhaseSeconds, phases: tuple[float | None, ...]
) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1)
    await client.send(told(seconds=seconds))
    await answered(client)
    [seen] = root_of(daemon.hub).recent
    times = (seen.staged_at, seen.persisting_at, seen.voted_at)
    assert [None if time is None else round(time - seen.began_at, 3) for time in times] == list(phases)


async def test_a_save_is_counted_although_the_first_look_at_its_commit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look had seen the commit before it failed, so later looks took the commit for an old one."""
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),)))
    root = str(tmp_path / "job")
    monitor = RootMonitor(hub, MonitorPace(patience_s=0.0))

    async def fails(_: object) -> str | None:
        raise UnreadableError("the file server does not answer")

    try:
        async with PosixStore(root) as store:
            save = await plan_save(store, world_size=1, inline={0: LOST})
            hub.begun(hub.rank(root, 0, world_size=1, pid=7), 1, "nonce")
            await save.run_all()
            with monkeypatch.context() as patch:
                patch.setattr(root_view, "latest", fails)
                await monitor.look(root)
            await monitor.look(root)
    finally:
        await hub.roots.close()
    assert hub.tallies[root].inline == {"refused": 0, "lost": 1}


async def test_a_sidecar_without_room_shows_what_its_trainers_do_without_it(root: Path) -> None:
    """Nothing was counted at all: saves_total and commit_seconds stayed 0."""

    def train() -> None:
        with Checkpointer(root, sidecar=daemon.path) as ckpt:
            for step in (1, 2):
                ckpt.save(step, {"w": torch.full((64,), float(step))}).wait(60)

    async with serving(root.parent, memory_bytes_max=4096) as daemon:
        await asyncio.to_thread(train)
        await until(lambda: daemon.hub.tallies[str(root)].committed == 2)
        tally = daemon.hub.tallies[str(root)]
        assert tally.inline == {"refused": 2, "lost": 0}
        assert list(tally.commits.cumulative())[-1] == (float("inf"), 2)
        assert daemon.hub.refusals["full"] >= 2
        first = root_of(daemon.hub).recent[0]
        assert first.inline is not None
        assert "bytes" in first.inline.why
        assert first.seconds.disk is not None


async def test_what_was_persisted_while_the_sidecar_was_away_is_told_when_it_is_back(root: Path) -> None:
    loop = asyncio.get_running_loop()

    def save(step: int) -> None:
        ckpt.save(step, {"w": torch.full((64,), float(step))}).wait(60)

    with ThreadPoolExecutor(1) as trainer:  # a daemon that ends takes the loop's own threads with it
        async with serving(root.parent) as first:
            ckpt = await loop.run_in_executor(trainer, lambda: Checkpointer(root, sidecar=first.path))
            await loop.run_in_executor(trainer, save, 1)
        await loop.run_in_executor(trainer, save, 2)
        async with serving(root.parent) as second:
            await loop.run_in_executor(trainer, save, 3)
            await until(lambda: bool(second.hub.known_roots()) and len(root_of(second.hub).recent) == 2)
            assert second.hub.tallies[str(root)].inline == {"refused": 0, "lost": 1}
            by_tag = {save.tag: save.inline is not None for save in root_of(second.hub).recent}
            assert by_tag == {"global_step2": True, "global_step3": False}
            await loop.run_in_executor(trainer, ckpt.close)
