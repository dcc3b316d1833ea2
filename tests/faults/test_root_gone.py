"""A root that is not the job's any more between two saves: unmounted, covered, or renamed. Nothing is committed in its place,
and saves go on by themselves once it is back.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.pipeline.root import own_root
from checkpointd_client import Checkpointer
from checkpointd_client.errors import RootGoneError
from tests.faults.daemons import Daemon
from tests.faults.jobs import wait_until
from tests.faults.mounts import MIB, bound, is_mounted, mount, overlay, remount, tmpfs, unmount
from tests.logged_roots import attempts

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.1)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[str]:
    with Daemon(tmp_path) as daemon:
        yield str(daemon.socket)


def _below(root: Path) -> set[str]:
    """The objects that lie at `root`."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def _is_recorded(root: Path, tag: str) -> bool:
    """Whether the log has the commit of `tag`, and nothing is being written at the root."""
    return tag in {one.tag for one in attempts(root, "checkpoint")} and not any((root / ".checkpointd/tmp").iterdir())


def _goes_and_comes_back(
    root: Path, leave: Callable[[], None], come_back: Callable[[], None], sidecar: str | None = None
) -> None:
    state = {"model": torch.nn.Linear(4, 4)}
    with Checkpointer(root, sidecar=sidecar, compression="none", commit_timeout_s=60) as checkpointer:
        checkpointer.save(1, state).wait()
        wait_until(lambda: _is_recorded(root, "global_step1"), "the save is in the log")
        leave()
        before = _below(root)
        with pytest.raises(RootGoneError, match=r"no longer the directory in which this job began.*unmounted"):
            checkpointer.save(2, state).wait()
        assert _below(root) == before
        come_back()
        checkpointer.save(3, state).wait()
    assert (root / "latest").read_text() == "global_step3\n"
    assert not (root / "global_step2").exists()


def test_renamed_away_and_made_anew(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"

    def leave() -> None:
        root.rename(away)
        root.mkdir()

    def come_back() -> None:
        root.rmdir()
        away.rename(root)

    _goes_and_comes_back(root, leave, come_back)


def test_a_copy_in_its_place(tmp_path: Path) -> None:
    """The record of the start is there, with the nonce."""
    root, away = tmp_path / "root", tmp_path / "away"

    def leave() -> None:
        root.rename(away)
        subprocess.run(["cp", "-a", str(away), str(root)], check=True)

    def come_back() -> None:
        shutil.rmtree(root)
        away.rename(root)

    _goes_and_comes_back(root, leave, come_back)


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_unmounted_and_mounted_again(tmp_path: Path) -> None:
    disk, point = tmp_path / "disk", tmp_path / "point"
    (disk / "root").mkdir(parents=True)
    (point / "root").mkdir(parents=True)
    with bound(disk, point):
        _goes_and_comes_back(point / "root", lambda: unmount(point), lambda: mount(disk, point, "--bind"))


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_unmounted_under_a_sidecar(tmp_path: Path, sidecar: str) -> None:
    disk, point = tmp_path / "disk", tmp_path / "point"
    (disk / "root").mkdir(parents=True)
    (point / "root").mkdir(parents=True)
    with bound(disk, point):
        _goes_and_comes_back(point / "root", lambda: unmount(point), lambda: mount(disk, point, "--bind"), sidecar)


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_covered_by_another_file_system(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    try:
        _goes_and_comes_back(root, lambda: mount("none", root, "-t", "tmpfs"), lambda: unmount(root))
    finally:
        while is_mounted(root):
            unmount(root)


def test_a_lease_goes_on_when_the_root_is_back(tmp_path: Path) -> None:
    """A lease that is renewed no more would let another job begin beside this one."""
    root, away = tmp_path / "root", tmp_path / "away"
    with Checkpointer(root, compression="none", commit_timeout_s=60) as checkpointer:
        assert checkpointer._core._started is not None
        lease = checkpointer._core._started.lease
        root.rename(away)
        with pytest.raises(RootGoneError):
            checkpointer._core._writer.call(lease._counts(), 10)
        away.rename(root)
        assert checkpointer._core._writer.call(lease._counts(), 10)


def _is_numbered_anew(merged: Path, root: Path, before: int) -> bool:
    remount(merged, "rw")  # drops the cached directory entries of this file system alone, but for those in use
    return root.stat().st_ino != before


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_an_overlay_that_numbers_its_directories_anew(tmp_path: Path) -> None:
    """With layers on two file systems a directory's inode number is not kept; what tells is the start's record."""
    state = {"model": torch.nn.Linear(4, 4)}
    with tmpfs(16 * MIB) as lower, tmpfs(64 * MIB) as upper, overlay(upper, "xino=off", lower=lower) as merged:
        root = merged / "root"
        (lower / "lower" / "root").mkdir()
        with Checkpointer(root, compression="none", commit_timeout_s=60) as checkpointer:
            checkpointer.save(1, state).wait()
            before = root.stat().st_ino
            wait_until(lambda: _is_numbered_anew(merged, root, before), "the directory has another number")
            checkpointer.save(2, state).wait()


def test_made_again_while_a_sidecar_persists_the_job_before(tmp_path: Path) -> None:
    """What the sidecar still works at is of another root: nobody waits for it, and it is no part of the new one."""
    root, state = tmp_path / "root", {"model": torch.nn.Linear(4, 4)}
    with Daemon(tmp_path, "--bandwidth-mib", "2") as daemon:
        code = f"""
import os, torch
from checkpointd_client import Checkpointer
job = Checkpointer({str(root)!r}, sidecar={str(daemon.socket)!r}, compression="none")
job.save(7, {{"model": {{"w": torch.randn(32 << 20)}}}}).wait("staged")
os.kill(os.getpid(), 9)
"""
        subprocess.run([sys.executable, "-c", code], check=False)
        while root.exists():  # the daemon may be making a file there
            shutil.rmtree(root, ignore_errors=True)
        with Checkpointer(root, sidecar=daemon.socket, compression="none", commit_timeout_s=60) as checkpointer:
            assert checkpointer._core._started is not None
            assert checkpointer._core._started.surviving == ()
            assert checkpointer.load(state) is None
            checkpointer.save(7, state).wait()
        assert (root / "latest").read_text() == "global_step7\n"
        daemon.kill()


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_a_sidecar_with_another_file_system_at_the_root_is_handed_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's own root is there: its saves are committed, by the trainer, until the sidecar sees the root, too."""
    root, state = tmp_path / "root", {"model": torch.nn.Linear(4, 4)}
    root.mkdir()
    elsewhere = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(root))
    with (
        Daemon(tmp_path, within=elsewhere) as daemon,
        Checkpointer(root, sidecar=daemon.socket, compression="none", commit_timeout_s=60) as checkpointer,
    ):
        assert "does not see that the job began there" in caplog.text
        checkpointer.save(1, state).wait()
        assert "committed" not in daemon.said()
        subprocess.run(["nsenter", "--mount", f"--target={daemon.process.pid}", "umount", "--lazy", str(root)], check=True)
        wait_until(lambda: checkpointer.status().sidecar_connected, "the sidecar is asked again")
        checkpointer.save(2, state).wait()
        assert re.search(r"global_step2/\S+: committed", daemon.said())
