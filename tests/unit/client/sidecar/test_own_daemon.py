"""The daemon that a trainer starts: where its socket lies, who starts it, and what a daemon that refuses means."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.config import SOCKET_PATH_BYTES_MAX, environment_of_daemon
from checkpointd.daemon.protocol import wire
from checkpointd.errors import UsageError
from checkpointd.layout.manifest import ErrorReport
from checkpointd_client import Checkpointer
from checkpointd_client.sidecar import own_daemon
from checkpointd_client.sidecar.own_daemon import OwnDaemon
from tests.unit.client.scripted_sidecar import LIMIT_S, ScriptedSidecar

OLD = wire.Refused(error=ErrorReport(code="WireError", message="this daemon speaks protocols 0 to 0: upgrade the older one"))


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Three directories for a socket, in this order. Their names are short."""
    with tempfile.TemporaryDirectory(prefix="own-") as folder:
        places = [Path(folder) / name for name in "abc"]
        monkeypatch.setattr(own_daemon, "scratch_directories", lambda: tuple(map(str, places)))
        yield places


def _place(root: str = "/root") -> Path:
    return Path(own_daemon._socket_for(root)[0])


def test_a_socket_lies_in_the_first_directory_that_only_this_user_may_use(scratch: list[Path], tmp_path: Path) -> None:
    missing, shared, good = scratch
    shared.mkdir()
    good.mkdir()
    (shared / f"checkpointd-{os.geteuid()}").mkdir(mode=0o755)
    path, fault = own_daemon._socket_for("/root")
    assert Path(path).is_relative_to(good)
    assert fault == ""
    assert not missing.exists()
    for directory in (Path(path).parent, Path(path).parents[1]):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (shared / f"checkpointd-{os.geteuid()}").rmdir()
    (shared / f"checkpointd-{os.geteuid()}").symlink_to(tmp_path)
    assert _place().is_relative_to(good)


def test_each_root_has_a_socket_of_its_own_and_every_rank_finds_it(scratch: list[Path]) -> None:
    scratch[0].mkdir()
    assert _place("/root") == _place("/root") != _place("/other")


def test_a_path_that_is_too_long_for_a_socket_is_not_taken(scratch: list[Path]) -> None:
    scratch[0] = scratch[0].parent / ("a" * SOCKET_PATH_BYTES_MAX)
    for place in scratch:
        place.mkdir()
    assert _place().is_relative_to(scratch[1])


async def test_without_such_a_directory_there_is_no_sidecar(scratch: list[Path], tmp_path: Path) -> None:
    with pytest.raises(own_daemon.LinkLost, match="cannot be a directory that only this user may use"):
        await OwnDaemon(str(tmp_path)).link()


def test_ranks_that_waited_for_a_start_that_failed_do_not_try_again(tmp_path: Path) -> None:
    path = str(tmp_path / "starting")
    first, waiting = own_daemon._StartLock(path), own_daemon._StartLock(path)
    assert first.taken()
    assert not waiting.taken()
    first.__exit__(ChildProcessError, ChildProcessError("no such Python"), None)
    with waiting, pytest.raises(ChildProcessError, match="no such Python"):
        waiting.taken()
    os.utime(path, (1.0, 1.0))
    with own_daemon._StartLock(path) as later:
        assert later.taken()


def test_a_daemon_of_another_release_leaves_the_saves_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedSidecar(tmp_path) as old:
        old.turned_away = OLD
        monkeypatch.setattr(own_daemon, "_socket_for", lambda _: (old.path, ""))
        (tmp_path / "root").mkdir()
        with (
            caplog.at_level(logging.WARNING, "checkpointd"),
            Checkpointer(tmp_path / "root", sidecar="auto") as ckpt,
        ):
            for step in range(3):
                assert ckpt.save(step, {"w": torch.ones(4)}).wait(LIMIT_S).phase == "committed"
            assert "upgrade the older one" in ckpt.status().sidecar_trouble
            assert ckpt.status().sidecar == old.path
        assert [message for message in caplog.messages if "persists its saves itself" in message] == [caplog.messages[0]]


def test_the_daemon_of_this_user_needs_no_other_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sidecar_uid is for a sidecar of another user"):
        Checkpointer(tmp_path, sidecar="auto", sidecar_uid=7)


def test_the_environment_of_the_daemon_is_what_finds_its_programs_and_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONSTARTUP", "NOTIFY_SOCKET", "CUDA_VISIBLE_DEVICES", "AWS_PROFILE"):
        monkeypatch.setenv(name, "x")
    found = environment_of_daemon("/lib/here")
    assert found["AWS_PROFILE"] == "x"
    assert found["PYTHONPATH"] == "/lib/here"
    assert not found.keys() & {"LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONSTARTUP", "NOTIFY_SOCKET", "CUDA_VISIBLE_DEVICES"}
    assert "PYTHONPATH" not in environment_of_daemon("")
