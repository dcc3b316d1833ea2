"""One real save through a real daemon, seen on every way there is: the socket, HTTP, the metrics and the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpointd.cli.commands.daemon_status import page
from checkpointd.cli.render import plain
from checkpointd.daemon.http import server
from checkpointd.daemon.http.server import serving as serving_http
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.status.model import DaemonStatus, RootStatus
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.root import starts
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.query import AsyncStatusClient
from tests.builders import HeldPersist, rank_arrays
from tests.unit.daemon.conftest import Daemon, RawClient, answered, shard_of
from tests.unit.daemon.example_statuses import daemon_status

BYTES = sum(array.nbytes for array in rank_arrays(0).values())


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FRESH_S", -1.0)


async def seen(daemon: Daemon, root: Path) -> RootStatus:
    """What the daemon says of `root` on its socket, at the newest."""
    async with AsyncStatusClient(daemon.path, timeout_s=60.0) as client:
        found = await client.status()
    return next(one for one in found.roots if one.root == str(root))


async def until_seen(daemon: Daemon, root: Path, phase: str) -> RootStatus:
    while True:
        found = await seen(daemon, root)
        if any(save.phase == phase for save in (*found.in_flight, *found.recent)):
            return found
        await asyncio.sleep(0.002)


async def fetched(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


async def metrics(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and the labels' values, without those of the root."""
    families = text_string_to_metric_families(await fetched(f"{url}metrics"))
    return {
        (s.name, tuple(v for k, v in sorted(s.labels.items()) if k not in ("root", "name"))): s.value
        for family in families
        for s in family.samples
    }


async def two_ranks(daemon: Daemon, root: Path) -> list[RawClient]:
    clients = [await daemon.client() for _ in range(2)]
    for rank, client in enumerate(clients):
        await client.ready(root, shard_of(rank), rank=rank, world_size=2)
        await answered(client)  # messages are taken in order: the daemon has begun the start
    return clients


async def test_a_save_from_its_begin_to_its_commit(daemon: Daemon, store: PosixStore, root: Path) -> None:
    first, second = await two_ranks(daemon, root)
    async with serving_http(daemon.hub, "127.0.0.1:0") as url:
        await first.whole_save(1, shard_of(0))
        while not (flight := (await seen(daemon, root)).in_flight) or flight[0].votes_missing != (1,):
            await asyncio.sleep(0.002)
        [flying] = flight
        assert (flying.tag, flying.step, flying.phase, flying.raw_done) == ("global_step1", 1, "prepared", BYTES)
        assert flying.began_at <= (flying.staged_at or 0) <= (flying.persisting_at or 0) <= (flying.voted_at or 0)
        counted = await metrics(url)
        assert counted["checkpointd_in_flight", ("prepared",)] == 1
        assert counted["checkpointd_votes_missing", ()] == 1
        assert counted["checkpointd_memory_mapped_bytes", ()] > 0

        await second.whole_save(1, shard_of(1))
        assert [(await client.outcome(1)).phase for client in (first, second)] == ["committed", "committed"]
        await ended(daemon)
        status = msgspec.json.decode(await fetched(f"{url}api/status"), type=DaemonStatus)
        [at_root] = [one for one in status.roots if one.root == str(root)]
        assert at_root.in_flight == ()
        assert [(s.rank, s.phase, s.raw_done, s.error) for s in sorted(at_root.recent, key=lambda s: s.rank)] == [
            (0, "committed", BYTES, None),
            (1, "committed", BYTES, None),
        ]
        assert all(s.ended_at is not None and s.voted_at is not None and s.ended_at >= s.voted_at for s in at_root.recent)
        assert [(h.tag, h.rank, h.phase) for h in at_root.held] == [
            ("global_step1", 0, "committed"),
            ("global_step1", 1, "committed"),
        ]
        counted = await metrics(url)
    assert counted["checkpointd_saves_total", ("committed",)] == 2
    assert counted["checkpointd_persist_bytes_total", ()] == 2 * BYTES
    assert counted["checkpointd_stored_bytes_total", ()] > 0
    assert counted["checkpointd_commit_seconds_count", ()] == 1
    assert counted["checkpointd_commit_seconds_bucket", ("+Inf",)] == 1
    assert counted["checkpointd_in_flight", ("prepared",)] == 0
    assert "global_step1  00000001-0  2 committed" in plain(page(status))


async def ended(daemon: Daemon) -> None:
    """Return when no job is left: a rank hears of the commit a moment before."""
    while daemon.hub.jobs.all():
        await asyncio.sleep(0.002)


async def test_a_save_that_fails_is_told_with_what_to_do(daemon: Daemon, store: PosixStore, root: Path) -> None:
    first, second = await two_ranks(daemon, root)
    await first.whole_save(1, shard_of(0))
    await second.save(1)
    await second.send(wire.Spoiled(save=1, error=ErrorReport(code="StagingError", message="boom")))
    assert (await first.outcome(1)).phase == "aborted"
    assert (await second.outcome(1)).phase == "failed"
    await ended(daemon)
    found = await seen_ended(daemon, root)
    by_rank = {save.rank: save for save in found.recent}
    assert [by_rank[rank].phase for rank in (0, 1)] == ["aborted", "failed"]
    assert by_rank[1].error is not None
    assert "boom" in by_rank[1].error.message
    assert by_rank[1].advice.startswith("See the log of rank 1 for the snapshot that failed.")
    assert "rank 1" in by_rank[0].advice
    async with serving_http(daemon.hub, "127.0.0.1:0") as url:
        counted = await metrics(url)
    assert counted["checkpointd_saves_total", ("aborted",)] == 1
    assert counted["checkpointd_saves_total", ("failed",)] == 1
    assert counted["checkpointd_commit_seconds_count", ()] == 0


async def test_a_save_of_a_job_that_another_one_has_taken_over_is_fenced_at_once_on_every_rank(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    first, second = await two_ranks(daemon, root)
    await starts.take(store, 2)
    await first.whole_save(1, shard_of(0))
    await second.whole_save(1, shard_of(1))
    for client in (first, second):
        message = await client.outcome(1)
        assert (message.phase, message.error.code if message.error else "") == ("failed", "FencedError")
    await ended(daemon)
    found = await seen_ended(daemon, root)
    assert {save.phase for save in found.recent} == {"fenced"}
    assert all("all later ones of its job cannot commit" in save.advice for save in found.recent)
    status = daemon_status(found)
    assert "2 fenced" in plain(page(status))
    async with serving_http(daemon.hub, "127.0.0.1:0") as url:
        counted = await metrics(url)
    assert counted["checkpointd_saves_total", ("fenced",)] == 2
    assert all(counted["checkpointd_saves_total", (result,)] == 0 for result in ("aborted", "failed", "committed"))


async def seen_ended(daemon: Daemon, root: Path) -> RootStatus:
    while len((found := await seen(daemon, root)).recent) < 2:
        await asyncio.sleep(0.002)
    return found


async def test_persisting_shows_how_far_it_is(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldPersist(monkeypatch)
    client = await daemon.client()
    await client.ready(root, shard_of())
    await client.whole_save(1, shard_of())
    found = await until_seen(daemon, root, "persisting")
    assert found.in_flight[0].persisting_at is not None
    lines = plain(page(daemon_status(found))).splitlines()
    assert lines[-2:] == ["all       0%  1 persisting", "rank 0    0%  persisting"]
    held.go.set()
    assert (await client.outcome(1)).phase == "committed"
