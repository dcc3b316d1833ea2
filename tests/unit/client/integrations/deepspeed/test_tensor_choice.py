"""Directories in which checkpointd and DeepSpeed itself have saved by turns: the newest of both counts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd.layout.log_records import CommitRecord
from checkpointd.pipeline.root import tag_directories
from checkpointd_client import Checkpointer
from checkpointd_client.integrations.deepspeed import tensor_adapter
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.integrations.deepspeed.tensor_adapter import TensorAdapter
from checkpointd_client.restore.target_chooser import LoadTargets
from tests.logged_roots import entry_of
from tests.unit.client.integrations.deepspeed.deepspeed_engine import FILE, Engine, saved_by_deepspeed


@contextmanager
def attached(kind: type[FilesAdapter] = FilesAdapter, step: int = 1, **settings: Any) -> Iterator[FilesAdapter]:
    """A new engine, attached until the body ends."""
    plug = kind(Engine(), settings)
    plug.engine.global_steps = step
    Adapter.connect(plug)
    try:
        yield plug
    finally:
        plug.detach()


def save(root: Path, tag: str, step: int = 1) -> None:
    with attached(step=step) as plug:
        plug.save_checkpoint(str(root), tag=tag)
        plug.wait(60)


def loaded(root: Path, tag: str | None = None) -> str | None:
    """The tag that an attached engine has DeepSpeed load."""
    with attached() as plug:
        found: str | None = plug.load_checkpoint(str(root), tag)[1]
        return found


# --- layout "deepspeed" ----------------------------------------------------------------------------------------------


def test_what_deepspeed_saved_last_is_loaded_and_latest_stays(tmp_path: Path) -> None:
    save(tmp_path, "ours")
    saved_by_deepspeed(tmp_path, "theirs", 2)
    assert loaded(tmp_path) == "theirs"
    assert (tmp_path / "latest").read_text() == "theirs"
    save(tmp_path, "newer", 3)
    assert loaded(tmp_path) == "newer"
    assert loaded(tmp_path, "theirs") == "theirs"


def test_a_commit_that_a_start_shows_late_leaves_what_deepspeed_saved_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all ranks died between the commit and the showing."""

    async def nothing(*_: Any, **__: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(tag_directories, "_show", nothing)
        patch.setattr(tag_directories, "_is_shown", always)
        save(tmp_path, "ours")
    assert not (tmp_path / "ours").exists()
    saved_by_deepspeed(tmp_path, "theirs", 2)
    os.utime(tmp_path / "latest", ns=(1 << 62, 1 << 62))  # file systems tell times apart that are some milliseconds apart
    assert loaded(tmp_path) == "theirs"
    assert (tmp_path / "ours" / FILE).exists(), "shown by the start"
    assert (tmp_path / "latest").read_text() == "theirs"


async def always(*_: Any) -> bool:
    return True


def test_a_tag_that_deepspeed_has_saved_over_is_refused_and_no_older_one_is_taken(tmp_path: Path) -> None:
    for step, tag in enumerate(("before", "last")):
        save(tmp_path, tag, step)
    (tmp_path / "last" / FILE).unlink()
    saved_by_deepspeed(tmp_path, "last", 2)
    os.utime(tmp_path / "last" / FILE, ns=(1 << 62, 1 << 62))
    with pytest.raises(DamagedError, match=r"written after it was committed.*name an older tag"):
        loaded(tmp_path)
    assert loaded(tmp_path, "before") == "before"


@pytest.mark.parametrize("tag", [None, "only"])
def test_a_checkpoint_whose_record_is_damaged_is_not_loaded_unverified(tmp_path: Path, tag: str | None) -> None:
    save(tmp_path, "only")
    root = tmp_path / ".checkpointd"
    [vote], [ballot] = root.glob("only/*/*.vote"), root.glob("only/*/ballot-*")
    for record in (vote, ballot, entry_of(root, CommitRecord)):
        record.write_bytes(b"no record")
    with pytest.raises(DamagedError, match=r"the record of .*only is damaged"):
        loaded(tmp_path, tag)


# --- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FilesAdapter, TensorAdapter])
@pytest.mark.parametrize("ours", [False, True])
def test_a_tag_that_is_not_there_is_told_with_what_there_is(
    tmp_path: Path, kind: type[FilesAdapter], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_adapter, "EngineTargets", Nowhere)
    if ours:
        save(tmp_path, "one") if kind is FilesAdapter else save_boxes(tmp_path, "one", 1)
    else:
        saved_by_deepspeed(tmp_path, "one", 1)
    with attached(kind) as plug, pytest.raises(NotFoundError, match=r"(?s)'?other'?.*checkpoints.* are:? one"):
        plug.load_checkpoint(str(tmp_path), "other")


def test_a_pointer_to_a_directory_that_somebody_removed_is_told(tmp_path: Path) -> None:
    saved_by_deepspeed(tmp_path, "one", 1)
    saved_by_deepspeed(tmp_path, "two", 2)
    shutil.rmtree(tmp_path / "two")
    with pytest.raises(NotFoundError, match=r"there is no directory .*two, which .*latest names; checkpoints there are one"):
        loaded(tmp_path)


# --- layout "checkpointd" --------------------------------------------------------------------------------------------


class Nowhere:
    """Takes nothing of a checkpoint."""

    def __init__(self, *_: Any) -> None: ...

    def places(self, _: Any) -> LoadTargets:
        return LoadTargets({"model": {"weight": torch.zeros(9)}})

    def settle(self) -> None: ...


def save_boxes(root: Path, tag: str, step: int, name: str | None = None) -> None:
    with Checkpointer(root) as ckpt:
        ckpt.save(step, {"model": {"weight": torch.full((9,), float(step))}}, tag=name or tag).wait(timeout=60)


def loaded_boxes(load_dir: Path, tag: str | None = None, **settings: Any) -> str:
    """The tag that is loaded, and by whom."""
    with pytest.MonkeyPatch.context() as patch, attached(TensorAdapter, **settings) as plug:
        patch.setattr(tensor_adapter, "EngineTargets", Nowhere)
        path, found = plug.load_checkpoint(str(load_dir), tag)
        return f"DeepSpeed's {found}" if path == str(load_dir) else f"ours: {os.path.basename(path)}"


def test_the_newest_of_boxes_and_files_is_loaded_and_latest_stays(tmp_path: Path) -> None:
    save_boxes(tmp_path, "one", 1)
    saved_by_deepspeed(tmp_path, "two", 2)
    assert loaded_boxes(tmp_path) == "DeepSpeed's two"
    assert loaded_boxes(tmp_path, "one") == "ours: one"
    assert (tmp_path / "latest").read_text() == "two", "an attached start leaves what DeepSpeed has written"
    save_boxes(tmp_path, "three", 3)
    assert (tmp_path / "latest").read_text() == "three\n"
    assert loaded_boxes(tmp_path) == "ours: three"
    assert loaded_boxes(tmp_path, "two") == "DeepSpeed's two"


def test_under_one_tag_the_newer_of_both_is_loaded(tmp_path: Path) -> None:
    save_boxes(tmp_path, "last", 1)
    saved_by_deepspeed(tmp_path, "last", 2)
    assert [loaded_boxes(tmp_path), loaded_boxes(tmp_path, "last")] == ["DeepSpeed's last"] * 2
    save_boxes(tmp_path, "last", 3)
    assert [loaded_boxes(tmp_path), loaded_boxes(tmp_path, "last")] == ["ours: last"] * 2


def test_where_it_cannot_be_told_which_is_newer_the_load_is_refused(tmp_path: Path) -> None:
    """A root above has a `latest` of its own, and a copy has other times: there the steps say something else than these."""
    run = tmp_path / "run"
    run.mkdir()
    with attached(TensorAdapter, root=str(tmp_path)) as plug:
        name = plug._place(str(run), "ours").tag  # type: ignore[attr-defined]  # a BoxPlug's
    save_boxes(tmp_path, "ours", 5, name)
    saved_by_deepspeed(run, "theirs", 6)
    os.utime(run / "theirs" / FILE, ns=(0, 0))
    with pytest.raises(UsageError, match=r"it is unclear which of the two is newer. Name the tag"):
        loaded_boxes(run, root=str(tmp_path))
    assert loaded_boxes(run, "theirs", root=str(tmp_path)) == "DeepSpeed's theirs"
    os.utime(run / "theirs" / FILE, ns=(1 << 62, 1 << 62))
    assert loaded_boxes(run, root=str(tmp_path)) == "DeepSpeed's theirs"


def test_a_pointer_of_deepspeeds_changes_no_report(tmp_path: Path) -> None:
    save_boxes(tmp_path, "one", 1)
    saved_by_deepspeed(tmp_path, "two", 2)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == "one", "the newest of this project, whatever the file says"
        assert (tmp_path / "latest").read_text() == "two"
        assert [found.tag for found in ckpt.list()] == ["one"]
