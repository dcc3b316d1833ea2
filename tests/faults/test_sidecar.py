"""Saves that outlive the trainer, and trainers that outlive the sidecar: real processes, killed, stopped and started again."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.bucket_urls import parse
from checkpointd.layout.keys import ATTEMPT_LEASES
from checkpointd_client import Checkpointer, SaveHandle
from checkpointd_client.checkpointer import core_of
from checkpointd_client.errors import LinkError, SidecarError, WaitTimeoutError
from tests.faults.daemons import Daemon
from tests.faults.jobs import MIB, NEVER_S, Job, wait_until
from tests.logged_roots import attempts
from tests.servers.fixtures import Place, root_at

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SLOW = ("--bandwidth-mib", "4")
"""A save of 8 MiB a rank then takes seconds, which leaves time to kill a process."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, *SLOW) as daemon:
        yield daemon


def _latest(root: Path) -> str:
    try:
        return (root / "latest").read_text().strip()
    except FileNotFoundError:
        return ""


def _wait_for_latest(root: Path, tag: str, *daemons: Daemon) -> None:
    said = "\n".join(daemon.said() for daemon in daemons)
    wait_until(lambda: _latest(root) == tag, f"{tag} was committed\n{said}")


def _wait_for_lease(root: Path) -> None:
    wait_until(lambda: list((root / ATTEMPT_LEASES).glob("global_step3/*")), "the daemon said that it works at it")


def _staged(job: Job, step: int) -> None:
    """Save on every rank and wait until each snapshot is the sidecar's; nothing more."""
    job.all("save", step=step)
    job.all("end", step=step, until="staged")


def _persisting(job: Job, root: Path, daemon: Daemon, step: int, **options: str) -> None:
    """Save on every rank and wait until the sidecar writes the snapshots."""
    job.open(root, sidecar=str(daemon.socket), **options)
    job.all("save", step=step)
    job.all("end", step=step, until="persisting")


def _committed_twice(job: Job, root: Path, daemon: Daemon) -> None:
    job.open(root, sidecar=str(daemon.socket))
    job.must_commit(1)
    job.must_commit(2)


def _killed(job: Job) -> None:
    for rank in job.ranks:
        rank.kill()


def _killed_while_writing(job: Job, root: Path, slow: Daemon, step: int) -> None:
    """The trainers are dead, and the sidecar still writes their last snapshots."""
    _persisting(job, root, slow, step)
    _killed(job)
    assert _latest(root) == ""


def _loaded_by_a_new_job(folder: Path, root: Path, step: int, **options: int) -> None:
    with Job(folder=folder, **options) as job:
        job.open(root)
        job.must_load(step)


def test_what_was_staged_is_committed_without_any_trainer(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        _staged(job, 7)
        _killed(job)
    _wait_for_latest(root, "global_step7", daemon)
    _loaded_by_a_new_job(tmp_path, root, 7)


@pytest.mark.nightly
def test_a_snapshot_whose_copy_was_cut_off_is_never_persisted(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        job.must_commit(1)
        job.ranks[1].do("hold_staging")
        job.all("save", step=2)
        job.ranks[0].do("end", step=2, until="prepared")
        job.ranks[1].kill()
        end = job.ranks[0].end(2)
        assert (end.phase, end.code, end.ranks) == ("aborted", "StagingError", [1])
        assert "ended, or lost its connection, while its snapshot was being taken" in end.message
    assert _latest(root) == "global_step1"
    wait_until(lambda: not list(root.glob("global_step2/*/*.chunks")), "the chunks of global_step2 go")


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
def test_recover_leaves_alone_what_a_daemon_still_writes(tmp_path: Path, slow: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path, nbytes=24 * MIB) as job:
        _killed_while_writing(job, root, slow, 3)
    _wait_for_lease(root)
    command = [sys.executable, "-m", "checkpointd", "recover", str(root), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["decided"] == []
    assert found["surviving"] == ["global_step3/00000001-0"]
    _wait_for_latest(root, "global_step3", slow)
    wait_until(lambda: not list((root / ATTEMPT_LEASES).glob("global_step3/*")), "the lease was removed after the commit")


@pytest.mark.nightly
@pytest.mark.parametrize("has_daemon", [True, False], ids=["another daemon", "no daemon"])
def test_a_start_that_cannot_ask_the_daemon_waits_for_what_it_still_writes(
    tmp_path: Path, slow: Daemon, *, has_daemon: bool
) -> None:
    root, nbytes = tmp_path / "root", 16 * MIB
    with (
        Daemon(tmp_path, name="node-1") as other,
        Job(folder=tmp_path, nbytes=nbytes) as job,
        Job(folder=tmp_path, nbytes=nbytes) as again,
    ):
        assert all(rank.pid for rank in again.ranks)  # it begins while the daemon still writes
        _killed_while_writing(job, root, slow, 3)
        _wait_for_lease(root)
        again.open(root, **({"sidecar": str(other.socket)} if has_daemon else {}))
        assert [one.tag for one in attempts(root, "undecided")] == ["global_step3"]
        again.must_load(3)
        again.must_commit(4)


@pytest.mark.nightly
def test_what_was_deleted_does_not_come_back_from_memory(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        _committed_twice(job, root, daemon)
        _killed(job)
    subprocess.run([sys.executable, "-m", "checkpointd", "delete", str(root), "global_step2", "--force", "--yes"], check=True)
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        assert [loaded.source for loaded in job.load() if loaded] == ["store", "store"]
        job.must_load(1)


@pytest.mark.nightly
def test_what_is_in_memory_may_be_newer_than_the_store_and_still_commits(tmp_path: Path) -> None:
    """The trainers come back while the sidecar still writes: they go on at once, and the save is committed behind them."""
    root, nbytes = tmp_path / "root", 5 * MIB
    with Daemon(tmp_path, "--bandwidth-mib", "1") as slowest, Job(folder=tmp_path, nbytes=nbytes) as job:
        job.open(root, sidecar=str(slowest.socket))
        _staged(job, 4)
        _killed(job)
        with Job(folder=tmp_path, nbytes=nbytes) as again:
            again.open(root, sidecar=str(slowest.socket))
            loaded = again.load()
            assert [(one.step, one.source, one.wrong) for one in loaded if one] == [(4, "memory", [])] * 2
            assert _latest(root) == ""
            _wait_for_latest(root, "global_step4", slowest)
            again.must_load(4, tag="global_step4")


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


@pytest.mark.nightly
def test_the_snapshot_of_a_root_that_was_removed_is_not_loaded(tmp_path: Path, daemon: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        job.must_commit(1)
        _killed(job)
    shutil.rmtree(root)
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar=str(daemon.socket))
        assert job.load() == [None, None]
        job.must_commit(1)  # the same step, tag and attempt as of the root that was removed
        assert _latest(root) == "global_step1"
        _killed(job)
    _loaded_by_a_new_job(tmp_path, root, 1)


def test_a_sidecar_killed_in_the_middle_of_a_save_costs_that_save_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Daemon(tmp_path, "--bandwidth-mib", "1") as slow, Job(folder=tmp_path, nbytes=32 * MIB) as job:
        _persisting(job, root, slow, 1)
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


@pytest.mark.nightly
def test_where_its_loss_is_an_error_saves_fail_until_the_sidecar_is_back(tmp_path: Path, slow: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path, nbytes=8 * MIB) as job:
        _persisting(job, root, slow, 1, on_sidecar_loss="raise")
        slow.kill()
        assert all("was lost while this save was persisting" in end.message for end in job.ends(1))
        assert all("does not take this save" in end.message for end in job.save(2))
        slow.start_again(())
        job.must_commit(3)


@pytest.mark.nightly
def test_a_sidecar_that_hangs_is_as_good_as_lost_and_may_wake_up(tmp_path: Path, slow: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path, nbytes=8 * MIB) as job:
        _persisting(job, root, slow, 1)
        slow.send(signal.SIGSTOP)
        assert all("has not answered for" in end.message for end in job.ends(1))
        job.must_commit(2)
        slow.send(signal.SIGCONT)
        wait_until(lambda: slow.said().count("global_step1/00000001-0") >= 2, "it woke up and saw the end")
        wait_until(lambda: not list(root.glob("global_step1/*/*.chunks")), "the chunks of global_step1 go")
        job.must_commit(3)
        job.must_load(3)


@pytest.mark.nightly
def test_a_sidecar_told_to_leave_finishes_what_is_in_flight(tmp_path: Path, slow: Daemon) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path, nbytes=8 * MIB) as job:
        _persisting(job, root, slow, 1)
        assert slow.terminate() == 0
        assert [end.phase for end in job.ends(1)] == ["committed", "committed"]
        assert _latest(root) == "global_step1"


@pytest.mark.nightly
def test_a_sidecar_that_does_not_serve_the_root_says_so_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with Daemon(tmp_path / "served") as daemon, Job(folder=tmp_path) as job:
        arguments = {**job.opening(tmp_path / "root"), "sidecar": str(daemon.socket)}
        for error in job.errors_of("open", **arguments):
            assert "does not serve" in error.message


def test_what_does_not_fit_into_the_sidecar_is_persisted_by_the_trainers(tmp_path: Path) -> None:
    with Daemon(tmp_path, "--memory-mib", "4") as small, Job(folder=tmp_path, nbytes=8 * MIB) as job:
        job.open(tmp_path / "root", sidecar=str(small.socket))
        for step in (1, 2, 3):
            job.must_commit(step)
        assert "no room for" in job.ranks[0].logged("WARNING")
        job.must_load(3)


@pytest.mark.nightly
def test_a_state_is_shown_as_an_empty_directory_at_the_commit(tmp_path: Path, slow: Daemon) -> None:
    def save(step: int, name: str) -> SaveHandle:
        state = {"weights": torch.full((2 * MIB,), float(step))}
        return core_of(ckpt).save(step, state, tag=name, shown_at=name)

    with Checkpointer(tmp_path / "run" / ".checkpointd", sidecar=slow.socket) as ckpt:
        handle = save(1, "one.ckpt")
        handle.wait("staged")
        assert not (tmp_path / "run" / "one.ckpt").exists()
        assert handle.wait().phase == "committed"
        assert list((tmp_path / "run" / "one.ckpt").iterdir()) == []
        lost = save(2, "two.ckpt")
        lost.wait("staged")
        slow.kill()
        with pytest.raises(SidecarError, match=r"two\.ckpt"):
            lost.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".checkpointd", "one.ckpt"]


@pytest.mark.nightly
def test_a_link_at_a_tag_fails_the_save_long_before_its_deadline(tmp_path: Path, daemon: Daemon) -> None:
    root, state = tmp_path / "root", {"model": torch.nn.Linear(4, 4)}
    with Checkpointer(root, sidecar=str(daemon.socket), commit_timeout_s=20) as checkpointer:
        checkpointer.save(1, state).wait()
        (root / "global_step1").rename(tmp_path / "elsewhere")
        (root / "global_step1").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(LinkError, match=r"root/global_step1 is a symbolic link.*Remove the link"):
            checkpointer.save(1, state).wait()
    assert daemon.said().count("cannot look for the outcome") == 1
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["00000001-0"]


@pytest.mark.nightly
def test_a_sidecar_with_a_wrong_endpoint_is_named_by_the_trainer_and_the_status_within_seconds(
    tmp_path: Path, seaweed_place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's URL has no endpoint, so the sidecar takes it with its own."""
    root = parse(root_at(seaweed_place, monkeypatch)).place
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed_place.server.endpoint)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        wrong = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with Daemon(tmp_path, root=f"s3://{seaweed_place.bucket}?endpoint={wrong}") as daemon:
            ckpt = Checkpointer(root, sidecar=daemon.socket)
            handle = ckpt.save(1, {"weight": torch.ones(9)})
            wait_until(lambda: wrong in handle.trouble, "the trainer hears of it")
            trouble = ckpt.status().sidecar_trouble
            with pytest.raises(WaitTimeoutError) as caught:
                handle.wait(timeout=0)
            asked = [sys.executable, "-m", "checkpointd", "status", "--socket", str(daemon.socket), "--json"]
            (seen,) = json.loads(subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout)["roots"]
            daemon.kill()
            with pytest.raises(SidecarError, match="was lost while this save was"):
                handle.wait()
            ckpt.close()
    words = rf"the sidecar does not reach the root: looking for .* \(Connection refused\): {wrong} was not reached"
    assert re.search(words, str(caught.value))
    assert re.search(words, caplog.text)
    assert wrong in trouble
    assert seen["verdict"]["state"] == "unreadable"
    assert "Connection refused" in seen["verdict"]["reason"]
