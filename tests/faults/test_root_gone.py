"""A root that is not the job's any more between two saves, such as one that is unmounted. Nothing is committed in its place,
and saves go on by themselves once it is back.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from checkpointd.pipeline.root import own_root
from checkpointd_client import Checkpointer
from checkpointd_client.errors import RootGoneError
from tests.faults.daemons import Daemon
from tests.faults.jobs import wait_until
from tests.faults.mounts import MIB, bound, mount, overlay, remount, tmpfs, unmount
from tests.logged_roots import attempts

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.1)


def _below(root: Path) -> set[str]:
    """The objects that lie at `root`."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def _is_recorded(root: Path, tag: str) -> bool:
    """Whether the log has the commit of `tag`, and nothing is being written at the root."""
    return tag in {one.tag for one in attempts(root, "checkpoint")} and not any((root / ".checkpointd/tmp").iterdir())


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
@pytest.mark.parametrize("has_sidecar", [False, True])
def test_unmounted_and_mounted_again(tmp_path: Path, *, has_sidecar: bool) -> None:
    disk, point = tmp_path / "disk", tmp_path / "point"
    (disk / "root").mkdir(parents=True)
    (point / "root").mkdir(parents=True)
    root, state = point / "root", {"model": torch.nn.Linear(4, 4)}
    with ExitStack() as stack:
        sidecar = stack.enter_context(Daemon(tmp_path)).socket if has_sidecar else None
        stack.enter_context(bound(disk, point))
        ckpt = stack.enter_context(Checkpointer(root, sidecar=sidecar, compression="none", commit_timeout_s=60))
        ckpt.save(1, state).wait()
        wait_until(lambda: _is_recorded(root, "global_step1"), "the save is in the log")
        unmount(point)
        before = _below(root)
        with pytest.raises(RootGoneError, match=r"no longer the directory in which this job began.*unmounted"):
            ckpt.save(2, state).wait()
        assert _below(root) == before
        mount(disk, point, "--bind")
        ckpt.save(3, state).wait()
        assert (root / "latest").read_text() == "global_step3\n"
        assert not (root / "global_step2").exists()


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
