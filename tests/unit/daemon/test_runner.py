"""The daemon as a process: systemd's readiness and watchdog, signals, and its configuration file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointd.config import ServeConfig, Watched, environment_watched, read_serve_file
from checkpointd.errors import UsageError

SERVE = [sys.executable, "-m", "checkpointd", "serve"]
OWN = ["--uid", str(os.geteuid())]  # root has to be named


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """What listens at NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(tmp_path / "notify"))
        inbox.settimeout(60)
        yield inbox


def _started(tmp_path: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [
        *SERVE,
        "--socket",
        str(tmp_path / "run" / "socket"),
        "--root",
        str(tmp_path),
        *OWN,
        *options,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def _told(inbox: socket.socket, word: str) -> str:
    """The next message that says `word`."""
    while word not in (said := inbox.recv(4096).decode()):
        pass
    return said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_systemd_hears_when_it_is_ready_that_it_lives_and_that_it_stops(
    tmp_path: Path, systemd: socket.socket, number: signal.Signals
) -> None:
    process = _started(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="100000")
    assert "listening at" in _told(systemd, "READY=1")
    assert (tmp_path / "run" / "socket").is_socket()
    _told(systemd, "WATCHDOG=1")
    _told(systemd, "WATCHDOG=1")
    process.send_signal(number)
    _told(systemd, "STOPPING=1")
    systemd.close()  # a daemon that takes long to leave would fill it, and wait for somebody to read
    process.communicate()
    assert process.returncode == 0
    assert not (tmp_path / "run" / "socket").exists()


HANGING = """
import asyncio, sys
from checkpointd.config import ServeConfig
from checkpointd.daemon import runner
from checkpointd.daemon.service import Service
from checkpointd.waits import to_the_end

async def hang(self):
    await to_the_end(asyncio.sleep(1000))

Service._finish_saves = hang
runner.OVERDUE_S = 0.5
runner.serve(ServeConfig(socket=sys.argv[1], roots=(sys.argv[2],), grace_s=0.5), on_ready=lambda _: print("ready", flush=True))
"""


def test_a_daemon_that_leaves_does_not_wait_for_a_storage_that_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path / "socket"), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the storage has not answered" in said


def test_a_watchdog_of_another_process_is_not_fed(tmp_path: Path, systemd: socket.socket) -> None:
    process = _started(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="20000", WATCHDOG_PID="1")
    _told(systemd, "READY=1")
    process.terminate()
    assert "WATCHDOG" not in _told(systemd, "STOPPING=1")
    process.communicate()
    systemd.setblocking(False)
    with pytest.raises(BlockingIOError):
        systemd.recv(4096)


def test_an_abstract_notify_socket(tmp_path: Path) -> None:
    name = f"checkpointd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(f"\0{name}")
        inbox.settimeout(60)
        process = _started(tmp_path, NOTIFY_SOCKET=f"@{name}")
        _told(inbox, "READY=1")
        process.terminate()
        process.communicate()


def test_a_second_daemon_at_one_socket_is_refused_in_words(tmp_path: Path) -> None:
    first = _started(tmp_path)
    assert first.stdout is not None
    first.stdout.readline()
    second = _started(tmp_path)
    out, err = second.communicate()
    assert (second.returncode, out) == (2, "")
    assert "another daemon listens at" in err
    first.terminate()
    first.communicate()
    assert first.returncode == 0


def test_the_environment_is_read_once_and_nonsense_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", "12")
    assert environment_watched() == Watched(notify_socket="/run/notify", watchdog_s=3.0, watchdog_pid=12)
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    monkeypatch.setenv("WATCHDOG_PID", "-1")
    assert environment_watched() == Watched()


def test_a_configuration_file_sets_what_options_do_not(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[serve]\nsocket = "{tmp_path}/run/socket"\nroots = ["{tmp_path}"]\ngrace_s = 3.5\n')
    assert read_serve_file(str(file)) == {"socket": f"{tmp_path}/run/socket", "roots": (str(tmp_path),), "grace_s": 3.5}
    process = subprocess.Popen([*SERVE, "--config", str(file), *OWN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"ready at {tmp_path}/run/socket\n"
    process.terminate()
    process.communicate()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve", "is not TOML"),
        ("[other]\n", "must have one table, [serve]"),
        ("[serve]\nsokcet = 1\n", "names sokcet; there are"),
        (None, "cannot be read"),
    ],
)
def test_a_configuration_file_that_is_wrong_says_what(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_serve_file(str(file))
    assert words in str(caught.value)


def test_settings_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[serve]\nsocket = "{tmp_path}/socket"\nroots = ["{tmp_path}"]\nclients_max = "many"\n')
    done = subprocess.run([*SERVE, "--config", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "clients_max" in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"roots": ()}, "at least one root"),
        ({"roots": ("here",)}, "must be an absolute path"),
        ({"socket": "/" + "x" * 200}, "Linux takes up to 107"),
        ({"bandwidth_bps": 10.0}, "choose 1 MiB/s or more"),
        ({"niceness": 40}, "choose -20 to 19"),
        ({"held_bytes_max": -1}, "cannot be negative"),
        ({"clients_max": 0}, "must be greater than 0"),
        ({"names": {"/nowhere": "x"}}, "the name 'x' is for /nowhere, which lies below no --root (/mnt)"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(settings: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"socket": "/run/checkpointd/socket", "roots": ("/mnt",)}
    with pytest.raises(UsageError) as caught:
        ServeConfig(**{**good, **settings})  # type: ignore[arg-type]  # the test names fields
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("nothing", "it does not exist; make it as the user that trains: `mkdir -p '{root}'`"),
        ("file", "it is not a directory"),
        ("below a file", "cannot look at it ([ENOTDIR] Not a directory)"),
    ],
)
def test_a_root_that_cannot_be_served_is_refused_with_what_to_do(tmp_path: Path, made: str, words: str) -> None:
    root = tmp_path / "my runs"
    if made == "file":
        root.touch()
    elif made == "below a file":
        root.touch()
        root /= "run1"
    command = [*SERVE, "--socket", str(tmp_path / "run" / "socket"), "--root", str(tmp_path), "--root", str(root), *OWN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline()
    process.terminate()  # one that serves all the same
    _, err = process.communicate()
    assert (ready, process.returncode) == ("", 2)
    assert f"the daemon cannot serve the root {root}: " in err
    assert words.format(root=root) in err
    assert not (tmp_path / "run" / "socket").exists()
