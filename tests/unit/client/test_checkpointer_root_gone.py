"""A root that is away for a moment: whoever asks hears that, and not that there is no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointd.pipeline.root import own_root
from checkpointd_client import Checkpointer
from checkpointd_client.errors import FencedError, RootGoneError


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.1)


def state() -> dict[str, object]:
    return {"a": torch.zeros(4)}


def five_saved(root: Path) -> None:
    with Checkpointer(root) as ckpt:
        for step in range(5):
            ckpt.save(step, state()).wait()


CALLS: dict[str, Callable[[Checkpointer], object]] = {
    "load": lambda ckpt: ckpt.load(state()),
    "load a tag": lambda ckpt: ckpt.load(state(), "global_step3"),
    "list": lambda ckpt: ckpt.list(),
    "latest": lambda ckpt: ckpt.latest(),
    "latest_step": lambda ckpt: ckpt.latest_step(),
    "delete": lambda ckpt: ckpt.delete("global_step1"),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_takes_another_directory_for_the_root(tmp_path: Path, call: str) -> None:
    root = tmp_path / "root"
    five_saved(root)
    with Checkpointer(root, absence_s=0.1) as ckpt:
        root.rename(tmp_path / "away")
        try:
            with pytest.raises(RootGoneError, match="no longer the directory in which this job began"):
                CALLS[call](ckpt)
        finally:
            (tmp_path / "away").rename(root)
        assert len(ckpt.list()) == 5


def test_a_load_that_found_no_root_lets_retention_remove_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    five_saved(root)
    with Checkpointer(root, retention=1) as ckpt:
        root.rename(tmp_path / "away")
        with pytest.raises(RootGoneError):
            ckpt.load(state())
        (tmp_path / "away").rename(root)
        for step in range(5, 8):
            ckpt.save(step, state()).wait()
    with Checkpointer(root) as ckpt:
        assert {f"global_step{step}" for step in range(5)} <= {found.tag for found in ckpt.list()}


def test_a_fenced_job_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    five_saved(tmp_path)
    old = Checkpointer(tmp_path)
    monkeypatch.setattr("checkpointd_client.lifetime._claimed", set())
    with Checkpointer(tmp_path, take_over=True) as new:
        with pytest.raises(FencedError):
            old.delete("global_step1")
        assert len(new.list()) == 5
    old.close()
