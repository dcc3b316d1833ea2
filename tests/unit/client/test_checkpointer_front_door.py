"""What a Checkpointer shows: its calls, its records, and that its options are those of `settings.Options`."""

from __future__ import annotations

import dataclasses
import inspect
import time
from pathlib import Path

import pytest
import torch

from checkpointd.errors import NotFoundError, UsageError
from checkpointd_client import Checkpointer
from checkpointd_client.settings import Options

CALLS = {
    *("save", "prepare", "load", "latest", "latest_step", "list", "delete"),
    *("status", "wait", "fence", "close", "preempted", "preempting"),
}


def state() -> dict[str, object]:
    return {"w": torch.arange(1000.0)}


def test_its_calls_are_these_and_no_others() -> None:
    assert {name for name in dir(Checkpointer) if not name.startswith("_")} == CALLS


def test_its_options_are_those_of_the_inside_with_the_same_defaults() -> None:
    shown = {
        name: parameter.default
        for name, parameter in inspect.signature(Checkpointer).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert shown == {field.name: field.default for field in dataclasses.fields(Options)}


def test_every_option_reaches_the_inside(tmp_path: Path) -> None:
    given = {"compression": "zstd", "staging": "eager", "when_busy": "skip", "dedup": False, "afresh": True, "read_back": False}
    with Checkpointer(tmp_path / "root", **given, job="mine", commit_timeout_s=7.0) as ckpt:  # type: ignore[arg-type]
        options = dataclasses.asdict(ckpt._core._options)
    assert options == dataclasses.asdict(Options(**given, job="mine", commit_timeout_s=7.0))  # type: ignore[arg-type]


def test_the_list_is_of_plain_records(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.list() == []
        assert ckpt.latest_step() is None
        before = time.time() - 1
        ckpt.save(3, state(), metrics={"loss": 0.5}).wait()
        ckpt.save(4, state(), tag="best").wait()
        newest, older = ckpt.list()
        assert (newest.tag, newest.step, newest.metrics) == ("best", 4, {})
        assert (older.tag, older.step, older.nbytes, older.metrics) == ("global_step3", 3, 4000, {"loss": 0.5})
        assert older.committed_at is not None
        assert before <= older.committed_at <= time.time()
        assert ckpt.latest_step() == 4


def test_a_checkpoint_that_was_read_back_is_verified(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state()).wait()
    with Checkpointer(tmp_path) as ckpt:  # closing has read it back
        assert [one.read_back for one in ckpt.list()] == [ckpt._core.checkpoints()[0].read_back]


def test_deleting_removes_what_is_named_and_refuses_the_newest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state()).wait()
        ckpt.delete("global_step1")
        assert [one.tag for one in ckpt.list()] == ["global_step2"]
        ckpt.delete("global_step1")  # as when every rank calls it
        with pytest.raises(UsageError, match="force=True in Python"):
            ckpt.delete("global_step2")
        with pytest.raises(NotFoundError, match="global_step9"):
            ckpt.delete("global_step9")
        ckpt.delete("global_step2", force=True)
        assert ckpt.latest() is None
        assert ckpt.status().latest is None
        assert "latest=None" in repr(ckpt)
        for step in (3, 4):
            ckpt.save(step, state()).wait()
        ckpt.delete("global_step4", force=True)
        assert ckpt.status().latest == ckpt.latest() == "global_step3"


def test_its_repr_says_where_it_is_and_how_it_stands(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state()).wait()
    said = f"Checkpointer({str(tmp_path)!r}, rank=0, world_size=1, start=1, latest='global_step1', in_flight=0"
    assert repr(ckpt) == f"{said})"
    ckpt.close()
    assert repr(ckpt) == f"{said}, closed)"


def test_one_that_could_not_be_made_has_a_repr() -> None:
    assert repr(object.__new__(Checkpointer)) == "Checkpointer(could not be made)"
