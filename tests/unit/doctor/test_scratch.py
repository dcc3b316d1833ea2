"""The doctor's directory at the root: new, and gone afterwards, however the examination ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.doctor.scratch import PLACE, scratch
from checkpointd.store.writers import new_writer

LIMIT_S = 60.0
"""Only a test that fails waits so long."""
CHILD = """
import signal, sys
from checkpointd.doctor.scratch import scratch
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background has it ignored
with scratch(sys.argv[1]) as place:
    open(f"{place}/file", "w").close()
    print(place, flush=True)
    signal.pause()
"""


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_root_that_was_not_there_is_not_there_afterwards(tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet"
    with scratch(str(root)) as place:
        assert os.path.isdir(place)
        assert place.startswith(f"{root}/{PLACE}/")
        Path(place, "deep").mkdir()
        Path(place, "deep", "file").write_text("x")
    assert everything(tmp_path) == set()


def test_what_lies_at_the_root_stays(tmp_path: Path) -> None:
    (tmp_path / ".checkpointd").mkdir()
    (tmp_path / "latest").write_text("tag")
    before = everything(tmp_path)
    with scratch(str(tmp_path)):
        assert before < everything(tmp_path)
    assert everything(tmp_path) == before


def test_an_error_within_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch(str(tmp_path)):
        raise ZeroDivisionError
    assert everything(tmp_path) == set()


def test_two_doctors_do_not_disturb_each_other(tmp_path: Path) -> None:
    with scratch(str(tmp_path)) as first:
        with scratch(str(tmp_path)) as second:
            assert first != second
            assert os.path.isdir(first)
        assert os.path.isdir(first)
        assert not os.path.exists(second)
    assert everything(tmp_path) == set()


def in_a_child(root: Path) -> tuple[subprocess.Popen[str], str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupted_doctor_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    child, place = in_a_child(tmp_path / "root")
    with child:
        assert os.path.isfile(f"{place}/file")
        child.send_signal(number)
        try:
            assert child.wait(LIMIT_S) in (128 + number, -number)
        finally:
            child.kill()
    assert everything(tmp_path) == set()


def test_what_a_killed_doctor_left_goes_with_the_next_one(tmp_path: Path) -> None:
    child, place = in_a_child(tmp_path)
    with child:
        child.kill()
    assert os.path.isfile(f"{place}/file")
    with scratch(str(tmp_path)):
        assert not os.path.exists(place)
    assert everything(tmp_path) == {".checkpointd"}


def test_what_a_doctor_of_another_machine_has_there_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / PLACE / ("another-host." + new_writer().partition(".")[2])
    elsewhere.mkdir(parents=True)
    with scratch(str(tmp_path)):
        pass
    assert elsewhere.is_dir()


def test_the_signals_are_as_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with scratch(str(tmp_path)):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
