"""Exports of a daemon: each rule in a task of its own, seen in the status and the metrics, and no trouble for anything else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpointd.config import ExportConfig, ServeConfig, ServedExport, read_serve_file
from checkpointd.daemon.http import metrics
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.query import StatusClient
from checkpointd.daemon.tiers import exports as exports_module
from checkpointd.daemon.tiers.exports import Exports
from checkpointd.errors import UsageError
from checkpointd.export.progress import ExportProgress
from checkpointd.store.posix.store import PosixStore
from tests.faults.daemons import Daemon
from tests.unit.daemon.conftest import until
from tests.unit.export.exported_roots import CONFIG, check_exported, save


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_bytes(CONFIG)
    return tmp_path / "files"


async def saved(root: Path, *steps: int, rows: int = 40) -> None:
    async with PosixStore(root) as store:
        await save(store, *steps, rows=rows)


async def check(to: Path, *steps: int) -> None:
    async with PosixStore(to) as store:
        for step in steps:
            await check_exported(store, step)


def rule(tmp_path: Path, files: Path, name: str = "a", **others: object) -> ServedExport:
    given = {"root": str(tmp_path / name), "to": str(tmp_path / f"{name}-models"), "files": str(files), "poll_s": 0.02}
    return ServedExport(**(given | others))  # type: ignore[arg-type]


def never() -> bool:
    return False


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_follower_1_one_that_cannot_go_on_ends_none_of_the_others(tmp_path: Path, files: Path) -> None:
    await saved(tmp_path / "a", 1)
    inside = rule(tmp_path, files, "b", to=str(tmp_path / "b" / "models"))
    exports = Exports([inside, rule(tmp_path, files), rule(tmp_path, files, "c", only="net")], never)
    task = asyncio.create_task(exports.run())
    await until(lambda: exports.progress[1].state == "up to date")
    assert exports.progress[0].state == "over"
    assert exports.progress[0].problem is not None
    assert "lies inside the root" in exports.progress[0].problem.message
    await saved(tmp_path / "a", 2)
    await until(lambda: exports.progress[1].exported == 2)
    await ended(task)
    await check(tmp_path / "a-models", 1, 2)


async def test_exporttask_1_an_export_rests_while_a_save_is_to_be_written(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports_module, "REST_S", 1000.0)
    await saved(tmp_path / "a", 1)
    asked = 0

    def is_saving() -> bool:
        nonlocal asked
        asked += 1
        return asked < 4

    exports = Exports([rule(tmp_path, files)], is_saving)
    task = asyncio.create_task(exports.run())
    await until(lambda: exports.progress[0].state == "up to date")
    await ended(task)
    assert asked >= 4


def test_the_status_and_the_metrics_tell_of_exports(tmp_path: Path, files: Path) -> None:
    one = rule(tmp_path, files)
    hub = Hub(ServeConfig(socket=str(tmp_path / "socket"), roots=(str(tmp_path),), exports=(one,)))
    shown = hub.exports.progress[0]
    shown.state, shown.due, shown.exported, shown.exported_bytes, shown.last_s = "exporting", 3, 2, 1000, 1.5
    shown.left, shown.newest_step, shown.up_to_date_at = {"damaged": 1}, 7, hub.started_at
    assert standing(hub).exports[0].due == 3
    families = text_string_to_metric_families(metrics.exposition(metrics.registry(hub), "plain").decode())
    samples = {(s.name, s.labels.get("result", "")): s for f in families for s in f.samples if "_export" in s.name}
    assert samples.pop(("checkpointd_export_up_to_date_age_seconds", "")).value >= 0
    assert {key: sample.value for key, sample in samples.items()} == {
        ("checkpointd_export_due", ""): 3,
        ("checkpointd_export_failing", ""): 0,
        ("checkpointd_export_newest_step", ""): 7,
        ("checkpointd_export_last_seconds", ""): 1.5,
        ("checkpointd_export_checkpoints_total", "exported"): 2,
        ("checkpointd_export_checkpoints_total", "damaged"): 1,
        ("checkpointd_exported_bytes_total", ""): 1000,
    }
    assert samples["checkpointd_export_due", ""].labels == {"origin": one.root, "to": one.to}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"root": "a"}, "'a' must be an absolute path, or the URL of a bucket"),
        ({"to": "b"}, "'b' must be an absolute path, or the URL of a bucket"),
        ({"to": "ftp://b"}, "must be an absolute path, or the URL of a bucket"),
        ({"files": "c"}, "files is 'c'; it must be an absolute path"),
        ({"every_steps": 0}, "every_steps"),
        ({"keep_last": 0}, "keep_last"),
        ({"only": ""}, "only is ''; it must name a part of the state"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"max_shard_size": "5XB"}, "max_shard_size is '5XB'"),
        ({"memory": "1MiB"}, "an export needs at least 16777216 bytes"),
        ({"limit_bps": 0.0}, "limit_bps"),
    ],
)
def test_rules_that_cannot_be_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ServedExport(**({"root": "/a", "to": "/b"} | given))  # type: ignore[arg-type]


def test_two_rules_for_one_place_are_refused() -> None:
    both = (ServedExport(root="/a", to="/m"), ServedExport(root="/b", to="/m"))
    with pytest.raises(UsageError, match="two rules export to /m"):
        ServeConfig(socket="/s", roots=("/a",), exports=both)


def test_the_file_names_exports_with_their_rules(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    text = '[serve]\nroots = ["/a"]\n[[serve.exports]]\nroot = "/a"\nto = "/m"\n'
    file.write_text(text + "every_steps = 3\n")
    assert read_serve_file(str(file))["exports"] == ({"root": "/a", "to": "/m", "every_steps": 3},)
    file.write_text(text + "every = 3\n")
    with pytest.raises(UsageError, match="names every in exports; there are dtype, every_steps, "):
        read_serve_file(str(file))
    file.write_text(text + 'dtype = "bfloat16"\n')
    with pytest.raises(UsageError, match="dtype is 'bfloat16'; choose one of keep, fp32, bf16"):
        read_serve_file(str(file))
    assert ExportConfig(to="models").to == "models"  # of a process, which has a working directory


def awaited(daemon: Daemon, is_so: Callable[[ExportProgress], bool]) -> ExportProgress:
    with StatusClient(str(daemon.socket), timeout_s=60.0) as client:
        while not is_so(found := client.status().exports[0]):
            assert daemon.process.poll() is None, daemon.said()
    return found


def test_a_killed_daemon_leaves_nothing_half_and_the_next_one_goes_on(tmp_path: Path, files: Path) -> None:
    """The whole process, with its sandbox: the place lies outside of its roots, and a trainer is not there any more."""
    roots, to = tmp_path / "roots", tmp_path / "models" / "a"
    roots.mkdir()
    asyncio.run(saved(roots / "a", 1, 2, 3, rows=20_000))
    config = tmp_path / "serve.toml"
    table = f'[serve]\n[[serve.exports]]\nroot = "{roots}/a"\nto = "{to}"\nfiles = "{files}"\nevery_steps = 2\n'
    config.write_text(f"{table}limit_bps = 1\n")
    with Daemon(tmp_path, "--config", str(config), root=str(roots)) as daemon:
        found = awaited(daemon, lambda one: one.total_bytes > 0)  # and goes on too slowly to end
        assert found.tag == "global_step2"
        daemon.kill()
        assert {name.split("-")[0] for name in os.listdir(to)} == {".checkpointd", ".global_step2.export"}
        config.write_text(table)
        daemon.start_again()
        found = awaited(daemon, lambda one: one.state == "up to date")
        assert (found.newest_tag, found.exported) == ("global_step2", 1)
        assert daemon.terminate() == 0
        assert "global_step2 exported to" in daemon.said()
        daemon.process = daemon._start()  # what __exit__ ends
    assert sorted(os.listdir(to)) == [".checkpointd", "global_step2"]
    asyncio.run(check(to, 2))
