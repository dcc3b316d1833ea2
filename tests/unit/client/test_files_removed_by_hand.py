"""Somebody removed the directory of a checkpoint of files: it counts nowhere, and every command names it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointd.cli import run
from checkpointd.commit.retention import Retention
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.unit.client.shown_files import ABSENCE_S, beside, example, save

pytestmark = pytest.mark.usefixtures("short_looks")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The root of two checkpoints of files, of which somebody has removed the newest."""
    at = tmp_path / "run" / ".checkpointd"
    with Checkpointer(at, absence_s=ABSENCE_S) as ckpt:
        for tag in ("one", "two"):
            save(ckpt, example(), tag=tag)
        newest = beside(ckpt) / "two"
    shutil.rmtree(newest)
    return at


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    code = run([*map(str, arguments), "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


def test_every_command_names_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["tag"]: row["state"] for row in answer(capsys, "list", root)["rows"]}
    assert rows == {"two": "removed", "one": "committed"}
    status = answer(capsys, "status", root)
    assert (status["checkpoints"], [one["things"] for one in status["missing"].values()]) == (1, [["two"]])
    [explained] = answer(capsys, "explain", root, "two")["attempts"]
    assert explained["state"] == "removed"
    assert "somebody removed its directory two" in explained["why"]
    run(["verify", str(root)])
    verified = capsys.readouterr().out
    assert "two: somebody removed its directory two" in verified


def test_gc_counts_only_what_is_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "gc", root, "--keep-last", "1", "--dry-run")["retired"] == ["two"]
    found = answer(capsys, "gc", root, "--keep-last", "1")
    assert found["retired"] == ["two"]
    assert found["freed_bytes"] > 0
    listed = answer(capsys, "list", root)
    assert [(row["tag"], row["state"], row["latest"]) for row in listed["rows"]] == [("one", "committed", True)]
    assert (root.parent / "one").is_dir()


def test_gc_without_rules_frees_its_space(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["tag"] for one in answer(capsys, "gc", root)["removed"]] == ["two"]
    assert not list(root.glob("two/*/*.file"))


def test_what_is_left_needs_force_and_the_removed_does_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["delete", str(root), "one", "--yes"]) == 2
    assert "one is the newest checkpoint that can be loaded" in capsys.readouterr().err
    assert run(["delete", str(root), "two", "--yes"]) == 0
    capsys.readouterr()
    assert answer(capsys, "list", root)["latest"]["tag"] == "one"


def test_a_job_counts_only_what_is_left(root: Path) -> None:
    """Its rule keeps two: the new one, and the only old one that is left."""
    with Checkpointer(root, absence_s=ABSENCE_S, retention=Retention(keep_last=2), afresh=True) as ckpt:
        save(ckpt, example(), tag="three")
        core_of(ckpt)._writer.call(core_of(ckpt)._saver._state.tidier.finish(), 60)
    assert sorted(path.name for path in root.parent.iterdir() if path.is_dir()) == [".checkpointd", "one", "three"]


def test_the_next_start_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "checkpointd"), Checkpointer(root, absence_s=ABSENCE_S):
        pass
    assert "somebody removed its directory two" in caplog.text
