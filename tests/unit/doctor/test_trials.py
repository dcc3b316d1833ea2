"""What the trials make of a file system that does not keep its word: played here, as nothing at hand is so bad."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from checkpointd.doctor import space, trials
from checkpointd.doctor.examine import TRIALS
from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.doctor.space import FreeSpace

STATE = StateSize(total_bytes=1 << 20, node_bytes=1 << 20, source="as you say", share_known=True)


def test_each_trial_finds_nothing_here(tmp_path: Path) -> None:
    findings = [trial(str(tmp_path)) for _, trial in TRIALS]
    assert [finding.check for finding in findings] == [check for check, _ in TRIALS]
    assert {finding.level for finding in findings} <= {"ok", "note"}


def test_links_that_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", shutil.copyfile)
    found = trials.hard_links(str(tmp_path))
    assert found.level == "fail"
    assert "replaced the first" in found.seen


def test_a_first_link_that_fails_for_lack_of_space_is_not_a_lack_of_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device", target)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space"):
        trials.hard_links(str(tmp_path))


def test_a_rename_that_tears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_read", lambda _: b"half of the old and half of the new")
    found = trials.rename(str(tmp_path))
    assert found.level == "fail"
    assert "torn" in found.seen


def test_locks_that_exclude_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    found = trials.locks(str(tmp_path))
    assert found.level == "fail"
    assert "two holders" in found.seen


def test_names_of_which_case_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = trials._write
    monkeypatch.setattr(trials, "_write", lambda path, data: write(f"{tmp_path}/{Path(path).name.lower()}", data))
    assert "upper and lower" in trials.names(str(tmp_path)).seen


def test_names_that_come_back_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["name", "NAME", "?"])
    assert "changed" in trials.names(str(tmp_path)).seen


@pytest.mark.parametrize(("ahead_s", "level"), [(0, "ok"), (-30, "note"), (30, "note"), (3600, "warn"), (-3600, "warn")])
def test_clocks_that_differ(tmp_path: Path, ahead_s: float, level: str) -> None:
    assert trials.clock(str(tmp_path), now=lambda: time.time() + ahead_s).level == level


def test_an_fsync_that_takes_long_is_worth_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.01, 0.0, 1.0])
    monkeypatch.setattr("checkpointd.doctor.trials.time.perf_counter", lambda: next(times))
    assert trials.sync_file(str(tmp_path)).level == "ok"
    found = trials.sync_file(str(tmp_path))
    assert found.level == "note"
    assert "1000.0 ms" in found.seen


# --- reserving ---------------------------------------------------------------------------------------------------


def reserved(place: Path, free: int, *, state: StateSize | None = STATE, volatile: bool = False) -> Finding:
    return space.reservation(str(place), FreeSpace(free, 1 << 30, 1000, 1000), state, volatile=volatile)


def test_a_reservation_is_given_back(tmp_path: Path) -> None:
    assert reserved(tmp_path, 2 << 20).level in ("ok", "note")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "state", "volatile"), [((2 << 20) - 1, STATE, False), (2 << 20, None, False), (2 << 20, STATE, True)]
)
def test_a_reservation_that_could_hurt_is_not_tried(tmp_path: Path, free: int, state: StateSize | None, volatile: bool) -> None:
    found = reserved(tmp_path / "not there", free, state=state, volatile=volatile)
    assert found.seen.startswith("not tried")
