"""The daemon's socket: who may open it, what it replaces and what it does not, and that two daemons never share one."""

from __future__ import annotations

import asyncio
import grp
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointd.daemon.protocol import listener
from checkpointd.daemon.protocol.listener import door_at, make_directory
from checkpointd.errors import SidecarError, UsageError
from tests.unit.other_user import STRANGER


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
        with door_at(str(path), None) as door:
            assert (mode(path), mode(path.parent)) == (0o600, 0o700)
            assert not door.listener.getblocking()
            assert answers(path)
            assert os.umask(0) == 0, "the umask is as it was"
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with door_at(str(tmp_path / "socket"), None):
        assert mode(tmp_path) == 0o755


@pytest.mark.root
def test_a_group_may_open_it(tmp_path: Path) -> None:
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in os.getgroups())
    path = tmp_path / "run" / "socket"
    with door_at(str(path), group.gr_name):
        assert (mode(path), mode(path.parent)) == (0o660, 0o750)
        assert os.lstat(path).st_gid == os.lstat(path.parent).st_gid == group.gr_gid


def test_a_group_by_its_number(tmp_path: Path) -> None:
    gid = os.getegid()
    with door_at(str(tmp_path / "s"), str(gid)):
        assert (tmp_path / "s").stat().st_gid == gid
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660


@pytest.mark.root
def test_a_group_without_a_name(tmp_path: Path) -> None:
    with door_at(str(tmp_path / "s"), "54321"):
        assert (tmp_path / "s").stat().st_gid == 54321


AS_STRANGER = """
import os, sys
from checkpointd.daemon.protocol.listener import door_at
from checkpointd.errors import UsageError
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
try:
    with door_at(*sys.argv[1:]):
        pass
except UsageError as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.parametrize("made", ["directory", "socket"])
def test_a_group_of_others_cannot_be_given(made: str) -> None:
    group = grp.getgrgid(0).gr_name
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, STRANGER, STRANGER)
        path = f"{folder}/run/socket" if made == "directory" else f"{folder}/socket"
        program = [sys.executable, "-c", AS_STRANGER.format(uid=STRANGER), path, group]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        assert done.stdout == f"user {STRANGER} is not in group {group}: choose one of this user's groups\n"
        assert "run" not in os.listdir(folder)


@pytest.mark.parametrize(("perms", "said"), [(0o700, True), (0o750, False), (0o755, False)])
def test_a_group_that_cannot_enter_the_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, perms: int, said: bool
) -> None:
    tmp_path.chmod(perms)
    with door_at(str(tmp_path / "socket"), grp.getgrgid(tmp_path.stat().st_gid).gr_name):
        pass
    assert (f"not enter its directory {tmp_path}" in caplog.text) == said


def test_a_group_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with pytest.raises(UsageError, match="no group 'no-such-group'"), door_at(str(path), "no-such-group"):
        pass
    assert not path.exists()


@pytest.mark.parametrize("perms", [0o777, 0o702, 0o770, 0o720, 0o1777])
def test_a_directory_in_which_others_may_write(tmp_path: Path, perms: int) -> None:
    """In one like /tmp, too: others cannot replace the socket there, but take its name before the daemon comes."""
    tmp_path.chmod(perms)
    with pytest.raises(UsageError, match=r"others may write.*directory of its own") as caught:
        make_directory(str(tmp_path), None)
    assert (f"chmod go-w {tmp_path}" in str(caught.value)) == (perms != 0o1777), "what is meant for all stays so"
    assert not os.listdir(tmp_path)


@pytest.mark.root
@pytest.mark.parametrize("way", ["itself", "a link to it"])
def test_a_directory_of_somebody_else(tmp_path: Path, way: str) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, STRANGER, STRANGER)
    link.symlink_to(theirs)
    path = (theirs if way == "itself" else link) / "socket"
    with pytest.raises(UsageError, match=f"belongs to user {STRANGER}.*run the daemon as that user") as caught:
        make_directory(str(path.parent), None)
    assert "sidecar_uid" not in str(caught.value), "the daemon has no such option"
    assert not os.listdir(theirs)


def test_what_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert not answers(path)
    with door_at(str(path), None):
        assert answers(path)


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("precious")
    with pytest.raises(UsageError, match="is not a socket"), door_at(str(path), None):
        pass
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    with door_at(str(tmp_path / "other"), None):
        (tmp_path / "socket").symlink_to("other")
        with pytest.raises(UsageError, match="is not a socket"), door_at(str(tmp_path / "socket"), None):
            pass
        assert answers(tmp_path / "other")


SECOND = """
import sys
from checkpointd.daemon.protocol.listener import door_at
from checkpointd.errors import UsageError
try:
    with door_at(sys.argv[1], None):
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
    with door_at(str(path), None):
        assert second(path).startswith(f"another daemon listens at {path}")
        assert answers(path), "the first one is not disturbed"
    assert second(path) == "listens"


def test_the_lock_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "socket.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot open"), door_at(str(tmp_path / "socket"), None):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be made"), door_at(str(tmp_path / "a" / "b" / "socket"), None):
        pass


def test_a_name_that_the_system_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match=r"cannot listen at .* too long"), door_at(f"{tmp_path}/{'x' * 110}", None):
        pass


# --- a socket that somebody removes --------------------------------------------------------------------------------


def take_away(path: Path) -> None:
    path.unlink()


def take_the_directory_away(path: Path) -> None:
    shutil.rmtree(path.parent)


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize("how", [take_away, take_the_directory_away, rename])
async def test_a_socket_that_was_removed_is_bound_anew(
    tmp_path: Path, how: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.01)
    path = tmp_path / "run" / "socket"
    with door_at(str(path), None) as door:
        sockets = door.sockets()
        first = await anext(sockets)
        how(path)
        second_one = await anext(sockets)
        assert second_one is not first
        assert answers(path)
        assert (mode(path), mode(path.parent)) == (0o600, 0o700)
        assert second(path).startswith(f"another daemon listens at {path}"), "the lock is this one's again"
        await sockets.aclose()
    assert not path.exists()
    assert f"the socket {path} was removed" in caplog.text
    assert f"listening at {path} again" in caplog.text


async def test_a_name_that_something_else_has_taken_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once a minute, not at each look, and what lies there is not touched."""
    monkeypatch.setattr(listener, "LOOK_S", 0.001)
    path, looks = tmp_path / "socket", 0
    with door_at(str(path), None) as door:
        sockets = door.sockets()
        await anext(sockets)
        path.unlink()
        path.write_text("precious")
        anew = asyncio.create_task(anext(sockets))
        while looks < 20:
            looks += 1
            await asyncio.sleep(0.001)
        assert path.read_text() == "precious"
        assert caplog.text.count(f"something else lies at {path}") == 1
        assert "was replaced by something else" in caplog.text
        path.unlink()
        await anew
        assert answers(path)
        await sockets.aclose()


def test_at_the_end_only_the_own_socket_goes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with door_at(str(path), None):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"
