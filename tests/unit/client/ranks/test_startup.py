"""A start says whether its root is new, and a normal run says at INFO what it did."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointd.errors import NotFoundError
from checkpointd_client import Checkpointer
from checkpointd_client.integrations.directories.targets import SaveTarget
from checkpointd_client.ranks.neighbours import neighbours


def state(value: float) -> dict[str, object]:
    return {"w": torch.full((64,), value)}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    caplog.set_level(logging.INFO, "checkpointd")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelname == level and r.name == "checkpointd"]


def saved_at(root: Path) -> Path:
    with Checkpointer(root) as ckpt:
        ckpt.save(1, state(1.0)).wait()
    return root


def test_a_run_says_in_one_line_each_what_it_did(tmp_path: Path, said: Callable[[str], list[str]]) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, retention=1) as ckpt:
        ckpt.load(state(0.0))
        for step in (1, 2):
            ckpt.save(step, state(float(step))).wait()
    began, nothing, first, *rest = said("INFO")
    assert began == f"new root at {root}: no job has saved here before"
    assert nothing == f"nothing is loaded: there is no checkpoint at {root}, so training begins at its first step"
    assert first.startswith("committed global_step1 (step 1) ")
    assert any(line.startswith("committed global_step2 (step 2) ") for line in rest)
    before = len(said("INFO"))
    with Checkpointer(root) as ckpt:
        ckpt.load(state(0.0))
    over, loaded = said("INFO")[before:]
    assert over.startswith(f"this is start 2 at {root}. Start 1 (process ")
    assert over.endswith(") has ended")
    assert loaded.startswith(f"loaded global_step2 (step 2) from {root} in ")
    assert not said("WARNING")


@pytest.mark.parametrize("mistyped", ["runs/chkpt", "runs/ckpt/checkpoints", "runs/ckpt/global_step1x", "runs/x/../chkpt"])
def test_a_new_root_beside_or_below_another_is_a_warning(
    tmp_path: Path, said: Callable[[str], list[str]], mistyped: str
) -> None:
    used = saved_at(tmp_path / "runs" / "ckpt")
    (tmp_path / "runs" / "x").mkdir()
    before = len(said("WARNING"))
    saved_at(tmp_path / mistyped)
    [warning] = said("WARNING")[before:]
    assert f"is new, but jobs have saved at {used}. " in warning
    saved_at(tmp_path / mistyped)
    assert len(said("WARNING")) == before + 1, "it is not new any more"


def test_the_roots_of_libraries_are_named_by_the_directories_that_they_fill(
    tmp_path: Path, said: Callable[[str], list[str]]
) -> None:
    for run in ("out", "oot"):
        target = SaveTarget.of(str(tmp_path / run), "checkpoint-1", str(tmp_path / run))
        saved_at(Path(target.root) / ".checkpointd")
    [warning] = said("WARNING")
    assert f"jobs have saved at {tmp_path / 'out' / '.checkpointd'}. " in warning


def test_neighbours_that_are_no_roots_or_cannot_be_seen_cost_nothing(tmp_path: Path, said: Callable[[str], list[str]]) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "datasets")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("no root")
    saved_at(tmp_path / "run")
    assert not said("WARNING")


@pytest.mark.parametrize("kind", ["absent", "empty", "of others"])
def test_create_false_refuses_a_new_root_and_makes_nothing(tmp_path: Path, kind: str) -> None:
    used, root = saved_at(tmp_path / "ckpt"), tmp_path / "cpkt"
    if kind != "absent":
        root.mkdir()
    if kind == "of others":
        (root / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NotFoundError, match=f"there is no root at {root}, .* Jobs have saved at {used}"):
        Checkpointer(root, create=False)
    assert sorted(tmp_path.rglob("*")) == before
    with Checkpointer(used, create=False) as ckpt:
        assert ckpt.load(state(0.0)) is not None


def test_the_directory_above_the_roots_is_none_and_the_warning_names_them(
    tmp_path: Path, said: Callable[[str], list[str]]
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    used = saved_at(runs / "a")
    with pytest.raises(NotFoundError, match=f"there is no root at {runs}, .* Jobs have saved at {used}"):
        Checkpointer(runs, create=False)
    assert sorted(path.name for path in runs.iterdir()) == ["a"]
    Checkpointer(runs).close()
    assert [line for line in said("WARNING") if f"the root at {runs} is new, but jobs have saved at {used}." in line]


def test_what_is_below_a_link_hides_no_root_beside_it(tmp_path: Path) -> None:
    used = saved_at(tmp_path / "ckpt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cpkt").symlink_to(tmp_path / "elsewhere")
    assert asyncio.run(neighbours(str(tmp_path / "cpkt"))) == [str(used)]


def test_a_root_without_its_service_directory_is_not_new(tmp_path: Path, said: Callable[[str], list[str]]) -> None:
    shutil.rmtree(saved_at(tmp_path / "ckpt") / ".checkpointd")
    before = len(said("INFO"))
    with Checkpointer(tmp_path / "ckpt", create=False) as ckpt:
        assert ckpt.load(state(0.0)) is not None
    assert not any("new root" in line for line in said("INFO")[before:])
