"""The arguments of a Checkpointer's calls: each that cannot be is named as the user wrote it, and nothing begins."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointd.commit.retention import Retention, rules_of
from checkpointd.errors import StagingError, StateError, UsageError, WaitTimeoutError
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.builders import HeldPersist

STATE: dict[str, object] = {"w": torch.ones(3)}
NO_NUMBERS = [True, math.nan, math.inf, -math.inf, -1, -0.5, "5", None, [1], 10**400]
NO_FLAGS = [1, 0, None, "yes"]
NO_CHOICES = ["", "other", None, True, 3, ["lazy"]]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("compression", NO_CHOICES),
        ("staging", NO_CHOICES),
        ("when_busy", NO_CHOICES),
        ("commit_timeout_s", [0, 0.0, 1e9, *NO_NUMBERS]),
        ("chunk_bytes", [0, 4096.0, 1, 1 << 31, *NO_NUMBERS]),
        ("budget_bytes", [0, 1.5, 4096, *NO_NUMBERS]),
        ("pinned_bytes", [-1, 1.5, *NO_NUMBERS]),
        (
            "preempt_signals",
            [
                0,
                9,
                19,
                4096,
                True,
                "SIGTERM",
                signal.SIGKILL,
                [0],
                1.5,
                {signal.SIGTERM: 0},
                {signal.SIGTERM: math.nan},
                torch.tensor(15),
                {signal.SIGTERM: 10**400},
            ],
        ),
        ("grace_s", [1e9, *NO_NUMBERS]),
        ("sidecar", ["", 3, b"path", True]),
        ("sidecar_uid", [-1, 1.0, "1000", True]),
        ("on_sidecar_loss", NO_CHOICES),
        ("dedup", NO_FLAGS),
        ("full_every", [1, 0, -3, True, 2.5, "3"]),
        ("retention", [0, -1, True, 2.5, "3", {"keep_last": 3}]),
        ("on_no_progress", NO_CHOICES),
        ("pickle_client_state", NO_FLAGS),
        ("absence_s", [1e9, *NO_NUMBERS]),
        ("job", [3, True, "", b"name"]),
        ("afresh", NO_FLAGS),
        ("take_over", NO_FLAGS),
        ("read_back", NO_FLAGS),
        ("device_checksums", NO_FLAGS),
        ("spool", [3, True, "", b"path", "a\0b"]),
        ("max_overhead", [0, 0.0, 11, *[value for value in NO_NUMBERS if value is not None]]),
        ("export", [3, True, "/models/run1", {}, []]),
        ("tensor_classes", [3, True, None, "MyTensor", torch.Tensor]),
        ("create", NO_FLAGS),
        ("process_group", ["learners", 3, b"group"]),
    ],
)
def test_each_argument_of_a_checkpointer_is_checked_by_name(name: str, values: list[Any], tmp_path: Path) -> None:
    root = tmp_path / "root"
    for value in values:
        with pytest.raises(UsageError, match=rf"^{name} is "):
            Checkpointer(root, **{name: value})
    assert not root.exists()


@pytest.mark.parametrize("root", [None, 3, b"path", "", ["a"], "a\0b", "\ud800"])
def test_a_root_is_a_path(root: Any) -> None:
    with pytest.raises(UsageError, match=r"^root is .*; it must be a path"):
        Checkpointer(root)


def test_times_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, commit_timeout_s=np.float64(30), grace_s=np.float64(5)) as ckpt:
        ckpt.save(1, STATE).wait(np.float64(60))


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)])
def test_a_step_may_be_a_number_of_numpy_or_torch(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as ckpt:
        assert not ckpt.preempted(step)
        ckpt.save(step, STATE).wait()
        assert [(found.tag, found.step) for found in ckpt.list()] == [("global_step3", 3)]
        assert type(ckpt.list()[0].step) is int


def test_latest_is_a_tag_that_loads_the_newest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"w": torch.zeros(1)}, "latest") is None
        for step in range(2):
            ckpt.save(step, {"w": torch.full((1,), float(step))}).wait()
        loaded = ckpt.load(into := {"w": torch.zeros(1)}, tag="latest")
        assert (loaded and loaded.step, into["w"].item()) == (1, 1.0)


def test_the_largest_step_can_be_saved_and_loaded(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(2**64 - 1, STATE).wait()
        loaded = ckpt.load(dict(STATE))
    assert loaded is not None
    assert loaded.step == 2**64 - 1


def test_every_argument_has_its_check() -> None:
    """One that is added must be added above, too."""
    checked = next(mark for mark in test_each_argument_of_a_checkpointer_is_checked_by_name.pytestmark).args[1]
    options = Checkpointer.__init__.__kwdefaults__
    assert options is not None
    assert {name for name, _ in checked} == options.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"step": value}, "step is ") for value in (True, -1, 1.0, "1", None, 2**64, np.bool_(True), np.float64(3), np.int64(-3))]
    + [({"step": value}, "step is ") for value in (torch.tensor(True), torch.tensor(1.0), torch.tensor([1, 2]))]
    + [({"step": {"model": "x" * 1000}}, r"^step is \{'model': 'x{69}; it must be a whole number, 0 or more")]
    + [({"tag": value}, "tag") for value in ("", "a/b", 3, b"x")]
    + [({"save_latest": value}, "save_latest is ") for value in NO_FLAGS]
    + [({"exclude_frozen_parameters": value}, "exclude_frozen_parameters is ") for value in NO_FLAGS]
    + [({"metrics": value}, "metrics is ") for value in (3, ["loss"], "loss", True)]
    + [({"metrics": {"loss": value}}, "metric 'loss' is ") for value in (True, "0.5", None, [1], torch.ones(2))]
    + [({"metrics": {name: 1.0}}, "cannot name a metric") for name in ("", 3, "x" * 201, "\udc80")]
    + [({"metrics": {np.str_("loss"): 1.0}}, r"\(a numpy\.str_\) cannot name a metric")]
    + [({"state": value}, "state must map names to objects") for value in (None, 3, [1], torch.nn.Linear(1, 1))]
    + [({"client_state": value}, "client_state must be a dict") for value in (3, [1], "x")],
)
def test_each_argument_of_save_is_checked_by_name(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(UsageError, match=words):
            ckpt.save(**{"step": 1, "state": STATE, **arguments})
        assert ckpt.save(1, STATE).wait().phase == "committed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({name: value}, f"{name} is ") for name in ("strict", "fallback", "cast", "verify_first") for value in NO_FLAGS]
    + [({"tag": value}, "tag") for value in ("", "a/b", 3)]
    + [({"state": value}, "the state to load into must map names") for value in (None, 3, [1], torch.nn.Linear(1, 1))],
)
def test_each_argument_of_load_is_checked_by_name(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE).wait()
        with pytest.raises(UsageError, match=words):
            ckpt.load(**{"state": dict(STATE), **arguments})
        assert ckpt.load(dict(STATE)) is not None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("keep_last", [0, True, 1.5, "3", -2]),
        ("every_steps", [0, True, 1.5, "3", -2]),
        ("best", [0, True, 1.5, "3", -2]),
        ("younger_than_s", [0, True, math.nan, math.inf, "3", -2]),
        ("mode", ["", "least", None, 3]),
        ("metric", ["", 3, True]),
    ],
)
def test_each_argument_of_retention_is_checked_by_name(name: str, values: list[Any]) -> None:
    both = {"best": 1, "metric": "loss"} if name in ("best", "metric") else {}
    for value in values:
        with pytest.raises(UsageError, match=rf"^{name} is "):
            Retention(**{**both, name: value})


# --- retention ---


def test_a_number_for_retention_keeps_the_last_so_many(tmp_path: Path) -> None:
    assert rules_of(3) == Retention(keep_last=3)
    assert rules_of(None) == Retention()
    assert rules_of(Retention(every_steps=5)) == Retention(every_steps=5)
    with Checkpointer(tmp_path, retention=2) as ckpt:
        for step in range(4):
            ckpt.save(step, {"w": torch.full((3,), float(step))}).wait()
    with Checkpointer(tmp_path) as ckpt:
        assert [checkpoint.step for checkpoint in ckpt.list()] == [3, 2]


# --- handle.wait ---


def test_wait_takes_the_phase_first_and_a_number_alone_as_the_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, STATE)
        assert handle.wait("staged") is handle
        assert handle.wait("persisting", 60.0).phase == "persisting"
        assert handle.wait(until="staged", timeout=60) is handle
        for wait in (lambda: handle.wait(0.01), lambda: handle.wait(timeout=0.01), lambda: handle.wait("prepared", 0.01)):
            with pytest.raises(WaitTimeoutError, match=r"still persisting after 0\.01 s"):
                wait()
        held.go.set()
        assert handle.wait(60).phase == handle.wait(None).phase == handle.wait().phase == "committed"
        assert handle.wait(None, 60.0) is handle


@pytest.mark.parametrize("timeout", [True, math.nan, math.inf, -1, "5", 1e9, 10**400])
def test_a_time_out_that_cannot_be_is_refused_by_name(timeout: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, STATE)
        for wait in (ckpt.wait, handle.wait, lambda timeout: handle.wait("staged", timeout)):
            with pytest.raises(UsageError, match=r"^timeout is "):
                wait(timeout=timeout)


def test_phases_and_times_that_are_mixed_up_are_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, STATE)
        with pytest.raises(UsageError, match=r"has two time-outs: name the phase, as in wait\('staged', 5\.0\)"):
            handle.wait(5.0, 6.0)
        with pytest.raises(
            UsageError, match=r"^until is 'done'; choose one of staged, persisting, spooled, uploading, prepared, com"
        ):
            handle.wait("done")  # type: ignore[arg-type]  # that is the test


# --- errors are told once ---


def test_an_error_that_save_raised_is_not_raised_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE).wait()
        with pytest.raises(StateError):
            ckpt.save(2, {"bad": object()})
        assert ckpt.status().saves_failed <= 1
    again = Checkpointer(tmp_path)
    with pytest.raises(StateError):
        again.save(3, {"bad": object()})
    core_of(again).settle()
    assert again.status().saves_failed == 1
    again.close()


def test_a_failed_save_that_nobody_looked_at_is_still_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpointer(tmp_path)
    monkeypatch.setattr(ckpt._core._saver._stager, "begin", _no_memory)
    ckpt.save(1, STATE)
    with pytest.raises(StagingError, match="no memory"):
        ckpt.close()


def _no_memory(*_: object) -> None:
    raise MemoryError("no memory")
