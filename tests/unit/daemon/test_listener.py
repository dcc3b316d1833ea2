"""The daemon's socket: who may open it, what it replaces and what it does not, and that two daemons never share one."""

from __future__ import annotations

import grp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.daemon.listener import listening
from checkpointd.errors import SidecarError, UsageError


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def test_the_socket_is_its_owners_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run" / "socket"
    before = os.umask(0)
    try:
        with listening(str(path), None) as listener:
            assert (mode(path), mode(path.parent)) == (0o600, 0o700)
            assert not listener.getblocking()
            assert answers(path)
            assert os.umask(0) == 0, "the umask is as it was"
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with listening(str(tmp_path / "socket"), None):
        assert mode(tmp_path) == 0o755


@pytest.mark.root
def test_a_group_may_open_it(tmp_path: Path) -> None:
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in os.getgroups())
    path = tmp_path / "run" / "socket"
    with listening(str(path), group.gr_name):
        assert (mode(path), mode(path.parent)) == (0o660, 0o750)
        assert os.lstat(path).st_gid == os.lstat(path.parent).st_gid == group.gr_gid


def test_a_group_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with pytest.raises(UsageError, match="no group 'no-such-group'"), listening(str(path), "no-such-group"):
        pass
    assert not path.exists()


@pytest.mark.parametrize("perms", [0o777, 0o702])
def test_a_directory_in_which_anybody_could_replace_it(tmp_path: Path, perms: int) -> None:
    tmp_path.chmod(perms)
    with pytest.raises(UsageError, match="anybody may rename"), listening(str(tmp_path / "socket"), None):
        pass


def test_a_directory_like_tmp(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with listening(str(tmp_path / "socket"), None):
        assert answers(tmp_path / "socket")


def test_what_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert not answers(path)
    with listening(str(path), None):
        assert answers(path)


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("precious")
    with pytest.raises(UsageError, match="is no socket"), listening(str(path), None):
        pass
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    with listening(str(tmp_path / "other"), None):
        (tmp_path / "socket").symlink_to("other")
        with pytest.raises(UsageError, match="is no socket"), listening(str(tmp_path / "socket"), None):
            pass
        assert answers(tmp_path / "other")


SECOND = """
import sys
from checkpointd.daemon.listener import listening
from checkpointd.errors import UsageError
try:
    with listening(sys.argv[1], None):
        print("listens")
except UsageError as error:
    print(error)
"""


def second(path: Path) -> str:
    """What a second daemon says, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", SECOND, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_two_daemons_do_not_listen_at_one_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listening(str(path), None):
        assert second(path).startswith(f"another daemon listens at {path}")
        assert answers(path), "the first one is not disturbed"
    assert second(path) == "listens"


def test_the_lock_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "socket.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot open"), listening(str(tmp_path / "socket"), None):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be made"), listening(str(tmp_path / "a" / "b" / "socket"), None):
        pass


def test_a_name_that_the_system_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match=r"cannot listen at .* too long"), listening(f"{tmp_path}/{'x' * 110}", None):
        pass
