"""The spool with real processes: saves that are durable on the node, daemons that are killed, a bucket that is slow or away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.daemons import Daemon
from tests.faults.jobs import Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SLOW = "0.001"
"""So many MiB per second that no upload ends."""


def options(folder: Path, *others: str) -> tuple[str, ...]:
    return ("--spool", str(folder / "spool"), *others)


def latest(root: Path) -> str:
    try:
        return (root / "latest").read_text().strip()
    except FileNotFoundError:
        return ""


def killed(job: Job) -> None:
    for rank in job.ranks:
        rank.kill()


@pytest.fixture
def spooled(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon in whose spool two saves lie that it cannot upload. It is dead, and so are the trainers."""
    with Daemon(tmp_path, *options(tmp_path, "--spool-bandwidth-mib", SLOW)) as daemon:
        with Job(folder=tmp_path) as job:
            job.open(tmp_path / "root", sidecar=str(daemon.socket))
            for step in (1, 2):
                job.all("save", step=step)
                assert [end["phase"] for end in job.all("end", step=step, until="spooled")]
            killed(job)
        daemon.kill()  # and with it the memory tier
        assert latest(tmp_path / "root") == ""
        yield daemon


def test_spool_4_a_daemon_that_is_killed_goes_on_with_what_is_in_the_spool(tmp_path: Path, spooled: Daemon) -> None:
    root = tmp_path / "root"
    spooled.start_again(options(tmp_path))
    wait_until(lambda: latest(root) == "global_step2", f"the newest was committed\n{spooled.said()}")
    wait_until(
        lambda: (root / "global_step1").exists() and "global_step1/00000001-0: committed" in spooled.said(), "both are there"
    )
    with Job(folder=tmp_path) as job:
        job.open(root)
        job.must_load(2)


# --- where a restart loads from ----------------------------------------------------------------------------------


def test_near_3_a_restart_loads_the_newest_save_from_the_spools_although_it_is_not_uploaded(
    tmp_path: Path, spooled: Daemon
) -> None:
    root = tmp_path / "root"
    spooled.start_again()
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(spooled.socket))
        loaded = job.load()
        assert [(one.step, one.source, one.wrong) for one in loaded if one] == [(2, "spool", [])] * 2
        assert latest(root) == ""
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
