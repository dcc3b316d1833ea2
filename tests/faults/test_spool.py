"""The spool with real processes: saves that are durable on the node, daemons that are killed, a bucket that is slow or away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd_client import Checkpointer
from tests.faults.daemons import Daemon
from tests.faults.jobs import MIB, Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SLOW = "0.001"
"""So many MiB per second that no upload ends."""


def options(folder: Path, *others: str) -> tuple[str, ...]:
    return ("--spool", str(folder / "spool"), *others)


def held(folder: Path) -> tuple[str, ...]:
    """Uploads that wait for ever: what is saved stays in the spool."""
    return options(folder, "--spool-bandwidth-mib", SLOW)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "roots").mkdir()
    with Daemon(tmp_path, *options(tmp_path)) as daemon:
        yield daemon


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, *held(tmp_path)) as daemon:
        yield daemon


def latest(root: Path) -> str:
    try:
        return (root / "latest").read_text().strip()
    except FileNotFoundError:
        return ""


def wait_for_latest(root: Path, tag: str, *daemons: Daemon) -> None:
    said = "\n".join(daemon.said() for daemon in daemons)
    wait_until(lambda: latest(root) == tag, f"{tag} was committed\n{said}")


def status_of(daemon: Daemon) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, "-m", "checkpointd", "status", "--json", "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(found.stdout))


def spooled(job: Job, step: int) -> None:
    """Save on every rank and wait until each shard is in the spool."""
    job.all("save", step=step)
    assert [end["phase"] for end in job.all("end", step=step, until="spooled")]


def killed(job: Job) -> None:
    for rank in job.ranks:
        rank.kill()


def loaded_by_a_new_job(folder: Path, root: Path, step: int, **options: int) -> None:
    with Job(folder=folder, **options) as job:
        job.open(root)
        job.must_load(step)


def test_a_save_through_the_spool_commits_and_loads(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        for step in (1, 2, 3):
            job.must_commit(step)
        found = status_of(daemon)["spool"]
        assert (found["spooled"], found["uploaded"], found["direct_full"], found["direct_failed"]) == (6, 6, 0, 0)
        killed(job)
    loaded_by_a_new_job(tmp_path, root, 3)


def test_spool_4_a_daemon_that_is_killed_goes_on_with_what_is_in_the_spool(tmp_path: Path, slow: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(slow.socket))
        spooled(job, 1)
        spooled(job, 2)
        killed(job)
    slow.kill()
    assert latest(root) == ""
    slow.start_again(options(tmp_path))
    wait_for_latest(root, "global_step2", slow)
    wait_until(
        lambda: (root / "global_step1").exists() and "global_step1/00000001-0: committed" in slow.said(), "both are there"
    )
    loaded_by_a_new_job(tmp_path, root, 2)


@pytest.mark.nightly
def test_a_trainer_that_closes_says_that_the_sidecar_uploads_the_rest(
    tmp_path: Path, slow: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "root", sidecar=slow.socket) as ckpt:
        ckpt.save(1, {"weight": torch.ones(100)}).wait("spooled")
    assert "global_step1 is in the spool of this node: the sidecar uploads it" in caplog.text
    assert "persists its saves itself" not in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["spooled", "uploading", "prepared"])
def test_a_daemon_that_is_killed_loses_no_save_that_is_in_its_spool(tmp_path: Path, phase: str) -> None:
    root, slow = tmp_path / "root", ("--bandwidth-mib", "4") if phase in ("uploading", "prepared") else ()
    with Daemon(tmp_path, *options(tmp_path, *slow)) as daemon, Job(folder=tmp_path, nbytes=8 * MIB) as job:
        job.open(root, sidecar=str(daemon.socket))
        job.all("save", step=1)
        job.all("end", step=1, until=phase)
        daemon.kill()
        daemon.start_again(options(tmp_path))
        assert [end["phase"] for end in job.all("end", step=1)] == ["committed", "committed"], daemon.said()
        killed(job)
    loaded_by_a_new_job(tmp_path, root, 1, nbytes=8 * MIB)


# --- where a restart loads from ----------------------------------------------------------------------------------


def test_near_3_a_restart_loads_the_newest_save_from_the_spools_although_it_is_not_uploaded(
    tmp_path: Path, slow: Daemon
) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(slow.socket))
        spooled(job, 1)
        spooled(job, 2)
        killed(job)
    slow.kill()  # and with it the memory tier
    slow.start_again()
    assert latest(root) == ""
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(slow.socket))
        loaded = job.load()
        assert [(one.step, one.source, one.wrong) for one in loaded if one] == [(2, "spool", [])] * 2
        killed(job)


@pytest.mark.nightly
def test_near_2_a_committed_save_is_read_from_the_spool_and_damage_there_is_read_at_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Daemon(tmp_path, *options(tmp_path), "--held-mib", "0") as daemon:
        with Job(folder=tmp_path) as job:
            job.open(root, sidecar=str(daemon.socket))
            job.must_commit(1)
            killed(job)
        with Job(folder=tmp_path) as job:
            job.open(root, sidecar=str(daemon.socket))
            assert [(one.step, one.source, one.wrong) for one in job.load() if one] == [(1, "spool", [])] * 2
            killed(job)
        chunks = sorted((tmp_path / "spool").rglob("*.chunks"), key=lambda path: -path.stat().st_size)
        data = bytearray(chunks[0].read_bytes())
        data[5000] ^= 1
        chunks[0].chmod(0o600)
        chunks[0].write_bytes(data)
        with Job(folder=tmp_path) as job:
            job.open(root, sidecar=str(daemon.socket))
            assert [(one.step, one.source, one.wrong) for one in job.load() if one] == [(1, "store", [])] * 2
            killed(job)
        for path in chunks:
            path.unlink()
        with Job(folder=tmp_path) as job:
            job.open(root, sidecar=str(daemon.socket))
            assert [(one.step, one.wrong) for one in job.load() if one] == [(1, [])] * 2
            killed(job)


@pytest.mark.nightly
def test_a_replaced_node_reads_at_the_root_what_the_other_one_has_in_memory(tmp_path: Path) -> None:
    """Two nodes, two ranks each. The second one is lost and replaced by a new one, with a new daemon."""
    root = tmp_path / "root"
    spools = [("--spool", str(tmp_path / name)) for name in ("spool-0", "spool-1", "spool-2")]
    with (
        Daemon(tmp_path, *spools[0], name="node-0") as one,
        Daemon(tmp_path, *spools[1], name="node-1") as two,
        Daemon(tmp_path, *spools[2], name="node-2") as new,
    ):
        with Job(folder=tmp_path, world_size=4) as job:
            for rank in job.ranks:
                rank.tell("open", **job.opening(root), sidecar=str((one, two)[rank.rank // 2].socket))
            assert all(rank.answer() is None for rank in job.ranks)
            job.must_commit(1)
            killed(job)
        with Job(folder=tmp_path, world_size=4) as job:
            for rank in job.ranks:
                rank.tell("open", **job.opening(root), sidecar=str((one, new)[rank.rank // 2].socket))
            assert all(rank.answer() is None for rank in job.ranks)
            loaded = [one for one in job.load() if one]
            assert [(found.step, found.wrong) for found in loaded] == [(1, [])] * 4
            assert [found.source for found in loaded] == ["memory", "memory", "store", "store"]
            job.must_commit(2)
            killed(job)
