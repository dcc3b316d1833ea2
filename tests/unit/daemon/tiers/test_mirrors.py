"""Mirrors in a daemon: each in a task of its own, seen in the status and the metrics, and no trouble for anything else."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpointd.config import ServeConfig, ServedMirror, read_serve_file
from checkpointd.daemon.http import metrics
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.query import StatusClient
from checkpointd.daemon.tiers import followers
from checkpointd.daemon.tiers import mirrors as mirrors_module
from checkpointd.daemon.tiers.mirrors import Mirrors
from checkpointd.errors import UsageError
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Entry, Store
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from tests.unit.daemon.conftest import until
from tests.unit.mirror.origins import TAG, check_whole, mirrored, save, tags_of


async def saved(root: Path, *steps: int) -> None:
    async with PosixStore(root) as store:
        await save(store, *steps)


def setting(tmp_path: Path, name: str = "a", **others: object) -> ServedMirror:
    return ServedMirror(origin=str(tmp_path / name), mirror=str(tmp_path / f"{name}-mirror"), poll_s=0.02, **others)  # type: ignore[arg-type]


async def test_each_mirror_follows_its_origin(tmp_path: Path) -> None:
    await saved(tmp_path / "a", 1)
    await saved(tmp_path / "b", 5)
    mirrors = Mirrors([setting(tmp_path, "a", keep_last=1), setting(tmp_path, "b")])
    task = asyncio.create_task(mirrors.run())
    await until(lambda: all(one.state == "in step" for one in mirrors.progress))
    await saved(tmp_path / "a", 2)
    await until(lambda: mirrors.progress[0].newest_tag == "global_step2")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for name, tags in (("a", ["global_step2"]), ("b", ["global_step5"])):
        async with PosixStore(tmp_path / f"{name}-mirror") as mirror:
            assert await tags_of(mirror) == tags
            await check_whole(mirror)


async def test_the_log_tells_of_what_was_healed_and_calls_it_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await saved(tmp_path / "a", 1)
    async with PosixStore(tmp_path / "a") as origin, PosixStore(tmp_path / "a-mirror") as mirror:
        await mirrored(origin, mirror)
        await mirror.put(f"{TAG.format(1)}/00000-0.chunks", b"")
        assert not (await read_back(mirror, await root_view.find(mirror, "global_step1"))).whole
    caplog.clear()
    caplog.set_level(logging.INFO, "checkpointd")
    mirrors = Mirrors([setting(tmp_path)])
    task = asyncio.create_task(mirrors.run())
    await until(lambda: mirrors.progress[0].state == "in step")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert any(record.getMessage().startswith("global_step1 healed: ") for record in caplog.records)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_follower_1_one_that_cannot_go_on_ends_none_of_the_others(tmp_path: Path) -> None:
    await saved(tmp_path / "a", 1)
    await saved(tmp_path / "b", 1)
    await saved(tmp_path / "b-mirror", 7)  # another run's root
    bad = ServedMirror(origin="nothing://x", mirror=str(tmp_path / "c"))
    mirrors = Mirrors([setting(tmp_path, "b"), bad, setting(tmp_path, "a")])
    task = asyncio.create_task(mirrors.run())
    await until(lambda: mirrors.progress[2].state == "in step")
    await until(lambda: [one.state for one in mirrors.progress] == ["over", "over", "in step"])
    assert mirrors.progress[0].problem is not None
    assert "the root of another run" in mirrors.progress[0].problem.message
    await saved(tmp_path / "a", 2)
    await until(lambda: mirrors.progress[2].mirrored == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Hanging(PassingStore):
    """Answers nothing, and cannot be cancelled, as a file server that is gone."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.hangs = asyncio.Event()
        self.go = asyncio.Event()

    async def list(self, prefix: str) -> list[Entry]:
        self.hangs.set()
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                continue
        raise asyncio.CancelledError


async def test_follower_1_a_dead_destination_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "CLOSE_S", 0.1)
    await saved(tmp_path / "a", 1)
    dead: list[Hanging] = []

    def hanging(place: str, stores: AsyncExitStack, *, read_only: bool = False) -> Store:
        store = followers.opened(place, stores, read_only=read_only)
        if not read_only:
            dead.append(Hanging(store))
            return dead[0]
        return store

    monkeypatch.setattr(mirrors_module, "opened", hanging)
    mirrors = Mirrors([setting(tmp_path)])
    task = asyncio.create_task(mirrors.run())
    await until(lambda: bool(dead) and dead[0].hangs.is_set())
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(task, return_exceptions=True)
    dead[0].go.set()


def test_the_status_and_the_metrics_tell_of_mirrors(tmp_path: Path) -> None:
    one = setting(tmp_path)
    hub = Hub(ServeConfig(socket=str(tmp_path / "socket"), roots=(str(tmp_path),), mirrors=(one,)))
    shown = hub.mirrors.progress[0]
    shown.state, shown.behind, shown.mirrored, shown.copied_bytes = "copying", 3, 2, 1000
    shown.left, shown.newest_step, shown.in_step_at = {"damaged": 1}, 7, hub.started_at
    assert standing(hub).mirrors[0].behind == 3
    families = text_string_to_metric_families(metrics.exposition(metrics.registry(hub), "plain").decode())
    samples = {(s.name, s.labels.get("result", "")): s for f in families for s in f.samples if "_mirror_" in s.name}
    values = {key: sample.value for key, sample in samples.items()}
    assert values["checkpointd_mirror_behind", ""] == 3
    assert values["checkpointd_mirror_failing", ""] == 0
    assert values["checkpointd_mirror_newest_step", ""] == 7
    assert values["checkpointd_mirror_checkpoints_total", "mirrored"] == 2
    assert values["checkpointd_mirror_checkpoints_total", "damaged"] == 1
    assert values["checkpointd_mirror_copied_bytes_total", ""] == 1000
    assert values["checkpointd_mirror_in_step_age_seconds", ""] >= 0
    labels = samples["checkpointd_mirror_behind", ""].labels
    assert labels == {"origin": one.origin, "mirror": one.mirror}
    shown.state = "over"
    assert b"checkpointd_mirror_failing{" in metrics.exposition(metrics.registry(hub), "plain")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"origin": "a", "mirror": "/b"}, "must be an absolute path or a URL"),
        ({"origin": "/a", "mirror": "/a/"}, "its own mirror"),
        ({"origin": "/a", "mirror": "/b", "keep_last": 0}, "keep_last"),
        ({"origin": "/a", "mirror": "/b", "limit_bps": 0.0}, "limit_bps"),
        ({"origin": "/a", "mirror": "/b", "best": 3}, "best and metric"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ServedMirror(**given)  # type: ignore[arg-type]


def test_two_origins_for_one_mirror_are_refused(tmp_path: Path) -> None:
    both = (ServedMirror(origin="/a", mirror="/m"), ServedMirror(origin="/b", mirror="/m"))
    with pytest.raises(UsageError, match="two roots are to be mirrored to /m"):
        ServeConfig(socket="/s", roots=("/a",), mirrors=both)


def test_the_file_names_mirrors_with_their_rules(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[serve]\nroots = ["/a"]\n[[serve.mirrors]]\norigin = "/a"\nmirror = "/m"\nkeep_last = 3\n')
    assert read_serve_file(str(file))["mirrors"] == ({"origin": "/a", "mirror": "/m", "keep_last": 3},)
    file.write_text('[serve]\nroots = ["/a"]\n[[serve.mirrors]]\norigin = "/a"\nmirror = "/m"\nkeep = 3\n')
    with pytest.raises(UsageError, match="names keep in mirrors; there are best, every_steps, "):
        read_serve_file(str(file))


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_daemon_keeps_a_mirror_beside_its_saves(tmp_path: Path, sandbox: str) -> None:
    """The whole process, with its sandbox: the mirror lies outside of its roots."""
    roots, archive = tmp_path / "roots", tmp_path / "archive"
    roots.mkdir()
    asyncio.run(saved(roots / "a", 1))
    socket = tmp_path / "run" / "socket"
    pairs = f"{roots / 'a'}={archive / 'a'}"
    options = ["--root", str(roots), "--uid", str(os.geteuid()), "--mirror", pairs, "--sandbox", sandbox]
    process = subprocess.Popen(
        [sys.executable, "-m", "checkpointd", "serve", "--socket", str(socket), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready at")
        with StatusClient(str(socket), timeout_s=60.0) as client:
            while (found := client.status().mirrors[0]).state != "in step":
                assert process.poll() is None
            assert (found.newest_tag, found.mirrored) == ("global_step1", 1)
        shown = subprocess.run(
            [sys.executable, "-m", "checkpointd", "status", "--socket", str(socket)], capture_output=True, text=True, check=True
        )
        assert f"mirror: {roots}/a -> {archive}/a: in step, newest global_step1" in shown.stdout.splitlines()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "global_step1 mirrored: " in said
    finally:
        process.kill()
        process.communicate()

    async def look() -> None:
        async with PosixStore(archive / "a") as mirror:
            assert await tags_of(mirror) == ["global_step1"]
            await check_whole(mirror)
            assert await mirror.list(".checkpointd/leases") == []  # it let go of the mirror

    asyncio.run(look())
