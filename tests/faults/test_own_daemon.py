"""`sidecar="auto"`: real ranks that start the daemon of their node, and what becomes of it when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.daemons import OwnDaemons
from tests.faults.jobs import Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

KILLED_STARTER = """
import os, signal, sys
from checkpointd_client.sidecar.own_daemon import OwnDaemon
own = OwnDaemon(sys.argv[1])
lock = os.open(f"{own.path}.starting", os.O_RDWR | os.O_CREAT)
__import__("fcntl").flock(lock, __import__("fcntl").LOCK_EX)
own._begun()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A rank that dies as soon as it has started the daemon, which does not listen yet."""

STRANGE_TRAINER = """
import os, signal, sys, asyncio
from checkpointd_client.sidecar.own_daemon import OwnDaemon
open_for_ever = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.set_inheritable(open_for_ever, True)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.chdir(sys.argv[1])
asyncio.run(OwnDaemon(sys.argv[1]).link())
"""
"""A trainer with a descriptor that its children get, signals of its own, one core and another directory."""


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnDaemons]:
    with OwnDaemons(monkeypatch) as daemons:
        yield daemons


def _latest(root: Path) -> str:
    try:
        return (root / "latest").read_text().strip()
    except FileNotFoundError:
        return ""


def _killed(job: Job) -> None:
    for rank in job.ranks:
        rank.kill()


def test_ranks_that_start_at_once_start_one_daemon_which_finishes_their_save_and_gives_it_back(
    tmp_path: Path, daemons: OwnDaemons
) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar="auto")
        first = daemons.the_one()
        job.must_commit(1)
        job.all("save", step=2)
        job.all("end", step=2, until="staged")
        _killed(job)
    wait_until(lambda: _latest(root) == "global_step2", "the daemon finished the save")
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar="auto")
        assert daemons.the_one() == first
        assert [(one.step, one.source, one.wrong) for one in job.load() if one] == [(2, "memory", [])] * 2
        job.must_commit(3)


def test_a_daemon_that_dies_beside_the_training_is_started_again(tmp_path: Path, daemons: OwnDaemons) -> None:
    root = tmp_path / "root"
    with Job(folder=tmp_path) as job:
        job.all("start_daemons_again_at_once")
        job.open(root, sidecar="auto")
        job.must_commit(1)
        first = daemons.the_one()
        daemons.kill()
        job.must_commit(2)
        wait_until(lambda: len(daemons.pids()) == 1, "a daemon was started again")
        assert daemons.the_one() != first


@pytest.mark.nightly
def test_a_starter_that_is_killed_leaves_the_start_to_the_others(tmp_path: Path, daemons: OwnDaemons) -> None:
    root = tmp_path / "root"
    root.mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED_STARTER, str(root)], check=False)
    assert done.returncode == -signal.SIGKILL
    with Job(folder=tmp_path) as job:
        job.open(root, sidecar="auto")
        wait_until(lambda: len(daemons.pids()) == 1, "one daemon is left")
        job.must_commit(1)
        assert "does not answer" not in job.ranks[0].logged("WARNING")


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def _signals(mask: str) -> set[int]:
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_the_daemon_has_nothing_of_the_trainer_that_started_it(
    tmp_path: Path, daemons: OwnDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    trainer = subprocess.Popen([sys.executable, "-c", STRANGE_TRAINER, str(tmp_path)], cwd="/usr")
    assert trainer.wait() == 0
    pid = daemons.the_one()
    place = Path(f"/proc/{pid}")
    opened = {os.readlink(path) for path in (place / "fd").iterdir()}
    assert str(tmp_path) not in opened
    log = str(next(daemons.folder.glob("*/*/log")))
    assert [os.readlink(place / "fd" / name) for name in "012"] == ["/dev/null", log, log]
    assert (place / "cwd").readlink() == Path("/")
    environment = {line.partition("=")[0] for line in (place / "environ").read_text().split("\0") if line}
    assert environment <= {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH"} | {
        name
        for name in environment
        if name.lower().endswith("_proxy") or name.startswith(("AWS_", "GOOGLE_", "AZURE_", "SSL_"))
    }
    assert _signals(_status(pid, "SigBlk")) == set()
    # As every Python; and the two that the C library keeps for itself, which nobody can set.
    assert _signals(_status(pid, "SigIgn")) <= {signal.SIGPIPE, signal.SIGXFSZ, 32, 33}
    assert os.sched_getaffinity(pid) >= os.sched_getaffinity(0)
    _, _, group, session, terminal = (place / "stat").read_text().rpartition(")")[2].split()[:5]
    assert terminal == "0"
    assert session not in {str(os.getsid(0)), str(os.getsid(os.getppid()))}
    assert os.getpgid(pid) == int(group) != os.getpgid(0)
    assert int(_status(pid, "PPid")) != os.getpid()


def test_a_daemon_that_cannot_be_started_costs_a_warning(
    tmp_path: Path, daemons: OwnDaemons, broken_python: Callable[[], str]
) -> None:
    with Job(folder=tmp_path) as job:
        job.all("start_daemons_with", executable=broken_python())
        job.open(tmp_path / "root", sidecar="auto")
        job.must_commit(1)
        job.must_commit(2)
        warned = job.ranks[0].logged("WARNING")
        assert warned.count("this process persists its saves itself") == 1
        assert "/log" in warned
        assert job.ranks[0].do("trouble") in warned
        assert not daemons.pids()


@pytest.fixture
def broken_python(tmp_path: Path) -> Callable[[], str]:
    def made() -> str:
        path = tmp_path / "python"
        path.write_text("#!/bin/sh\necho 'no Python lies here' >&2\nexit 1\n")
        path.chmod(0o755)
        return str(path)

    return made
