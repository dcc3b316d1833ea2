"""Saves that outlive the trainer, and trainers that outlive the sidecar: real processes, killed, stopped and started again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.daemons import Daemon
from tests.faults.jobs import MIB, NEVER_S, Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def _latest(root: Path) -> str:
    try:
        return (root / "latest").read_text().strip()
    except FileNotFoundError:
        return ""


def _committed_twice(job: Job, root: Path, daemon: Daemon) -> None:
    job.open(root, sidecar=str(daemon.socket))
    job.must_commit(1)
    job.must_commit(2)


def _killed(job: Job) -> None:
    for rank in job.ranks:
        rank.kill()


def test_what_was_staged_is_committed_without_any_trainer(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        job.all("save", step=7)
        job.all("end", step=7, until="staged")
        _killed(job)
    wait_until(lambda: _latest(root) == "global_step7", f"it was committed\n{daemon.said()}")
    with Job(folder=tmp_path) as job:
        job.open(root)
        job.must_load(7)


def test_a_restart_loads_from_memory(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        _committed_twice(job, root, daemon)
        _killed(job)
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        assert [loaded.source for loaded in job.load() if loaded] == ["memory", "memory"]
        job.must_load(2)
        job.must_commit(3)
        job.must_load(3)


@pytest.mark.nightly
def test_a_node_that_is_gone_with_its_sidecar_does_not_hold_up_the_restart(tmp_path: Path) -> None:
    """Its vote will never come: after a while the restart loads what is committed."""
    root = tmp_path / "root"
    with Daemon(tmp_path, name="node-0") as one, Daemon(tmp_path, name="node-1") as two, Job(folder=tmp_path) as job:
        for rank, daemon in zip(job.ranks, (one, two), strict=True):
            rank.tell("open", **job.opening(root), commit_timeout_s=NEVER_S, sidecar=str(daemon.socket))
        for rank in job.ranks:
            rank.answer()
        job.must_commit(1)
        job.ranks[1].do("hold_staging")
        job.all("save", step=2)
        job.ranks[0].do("end", step=2, until="prepared")
        two.kill()
        _killed(job)
        with Job(folder=tmp_path) as again:
            again.open(root, sidecar=str(one.socket))
            assert [(found.step, found.source, found.wrong) for found in again.load() if found] == [(1, "store", [])] * 2
            assert "still undecided" in again.ranks[0].logged("WARNING")
            again.must_commit(3)


@pytest.mark.nightly
def test_memory_that_changed_is_found_and_the_store_is_loaded(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        _committed_twice(job, root, daemon)
        job.ranks[1].do("scribble_over_snapshots")
        _killed(job)
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        loaded = job.load()
        assert [(one.step, one.source, one.wrong) for one in loaded if one] == [(2, "store", [])] * 2
        assert "changed in memory (rank 1)" in job.ranks[0].logged("ERROR")


def test_a_sidecar_killed_in_the_middle_of_a_save_costs_that_save_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Daemon(tmp_path, "--bandwidth-mib", "1") as slow, Job(folder=tmp_path, nbytes=32 * MIB) as job:
        job.open(root, sidecar=str(slow.socket))
        job.all("save", step=1)
        job.all("end", step=1, until="persisting")
        slow.kill()
        for end in job.ends(1):
            assert (end.phase, end.code) in (("failed", "SidecarError"), ("aborted", "SidecarError"))
            assert re.search(rf"rank \d failed while persisting: the sidecar at {slow.socket} was lost", end.message)
            assert "persists its next saves itself until the sidecar is back" in end.message
        assert "this process persists its saves itself" in job.ranks[0].logged("WARNING")
        job.must_commit(2)  # nobody is there, and it works all the same
        slow.start_again(())
        job.must_commit(3)
        wait_until(lambda: "global_step3/00000001-0: committed" in slow.said(), "the new sidecar did it")
        job.must_load(3)
    wait_until(lambda: not list(root.glob("global_step1/*/*.chunks")), "the chunks of global_step1 go")
