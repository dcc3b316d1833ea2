"""Niceness and I/O class, read back from the kernel for every thread of a process of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointd.config import ServeConfig
from checkpointd.daemon.process import priority
from checkpointd.errors import UsageError

CHILD = """
import json, os, sys, threading
import psutil
from checkpointd.config import ServeConfig
from checkpointd.daemon.process import priority
from checkpointd.errors import UsageError

settings, user = json.loads(sys.argv[1]), int(sys.argv[2])
if user:
    os.setuid(user)
end = threading.Event()
def start():
    thread = threading.Thread(target=end.wait)
    thread.start()
    return thread.native_id
early = start()
answer = {}
try:
    priority.apply(ServeConfig(socket="/run/a.sock", roots=("/a",), **settings))
except UsageError as error:
    answer["error"] = str(error)
for name, number in (("main", os.getpid()), ("early", early), ("late", start())):
    process = psutil.Process(number)
    answer[name] = [process.nice(), int(process.ionice().ioclass), process.ionice().value]
end.set()
print(json.dumps(answer))
"""

NONE, BEST_EFFORT, IDLE = 0, 2, 3


def in_a_process(user: int = 0, **settings: object) -> Any:
    command = [sys.executable, "-c", CHILD, json.dumps(settings), str(user)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("io_class", "expected"),
    [("none", [NONE, 0]), ("best-effort", [BEST_EFFORT, priority.BEST_EFFORT_LEVEL]), ("idle", [IDLE, 0])],
)
def test_every_thread_gets_them_started_before_or_after(io_class: str, expected: list[int]) -> None:
    answer = in_a_process(niceness=19, io_class=io_class)
    assert answer == {thread: [19, *expected] for thread in ("main", "early", "late")}


def test_nothing_is_touched_that_was_not_asked_for() -> None:
    [before, _, _] = in_a_process()["main"]
    answer = in_a_process(niceness=0, io_class="idle")
    assert answer == {thread: [before, IDLE, 0] for thread in ("main", "early", "late")}


@pytest.mark.root
def test_what_the_system_does_not_permit_is_a_usage_error() -> None:
    answer = in_a_process(user=65534, niceness=-20)
    assert "does not permit niceness -20" in answer["error"]
    assert "CAP_SYS_NICE" in answer["error"]
    assert answer["late"][0] > -20


def config(**settings: Any) -> ServeConfig:
    return ServeConfig(socket="/run/a.sock", roots=("/a",), **settings)


@pytest.mark.parametrize("settings", [{"niceness": 5}, {"io_class": "idle"}], ids=["niceness", "io class"])
def test_without_psutil_asking_for_it_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[serve\]' in a clone"):
        priority.apply(config(**settings))


def test_without_psutil_a_daemon_that_asks_for_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    priority.apply(config())


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group processes by session")
@pytest.mark.parametrize(("own", "expected"), [(True, "nice 7"), (False, "nice 0")])
def test_a_session_of_its_own_is_niced_as_a_whole_and_one_that_others_are_in_is_left_alone(own: bool, expected: str) -> None:
    settings = "ServeConfig(socket='/run/a.sock', roots=('/a',), niceness=7)"
    apply = (
        f"from checkpointd.config import ServeConfig; from checkpointd.daemon.process.priority import apply; apply({settings})"
    )
    show = "print(open('/proc/self/autogroup').read())"
    daemon = f"{apply}; {show}"
    child = daemon if own else f"import subprocess, sys; subprocess.run([sys.executable, '-c', {daemon!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout.strip().endswith(expected)
