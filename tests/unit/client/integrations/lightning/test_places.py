"""Which root and tag a path of Lightning's has."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.layout.keys import SERVICE, shown_key
from checkpointd_client.integrations.lightning.places import CheckpointPlace, local_path, place_shown, place_to_save


def test_the_root_lies_beside_the_checkpoint_or_in_a_directory_above_that_is_in_use() -> None:
    path = "/runs/a/val/loss=0.1.ckpt"
    assert place_to_save(path, ()) == CheckpointPlace("/runs/a/val", "loss=0.1.ckpt")
    found = place_to_save(path, ("/runs", "/runs/a", "/runs/a/v", "/elsewhere"))
    assert found == CheckpointPlace("/runs/a", "val/loss=0.1.ckpt")
    assert (found.tag, found.name, found.root, found.path) == (
        "val--loss=0.1.ckpt",
        "loss=0.1.ckpt",
        "/runs/a/.checkpointd",
        path,
    )


def test_no_two_paths_have_one_tag() -> None:
    """PLACE-1"""
    paths = ["a/b.ckpt", "a--b.ckpt", "a-/-b.ckpt", "a/-b.ckpt", "a-/b.ckpt", "a---b.ckpt", "a----b.ckpt"]
    assert len({CheckpointPlace("/runs", at).tag for at in paths}) == len(paths)


@pytest.mark.parametrize(
    "path", ["s3://bucket/a.ckpt", "/runs/.lr_find_1.ckpt", "/runs/la\nst.ckpt", f"/runs/{'x' * 250}.ckpt"]
)
def test_lightning_itself_saves_scratch_files_and_names_that_no_tag_can_have(path: str) -> None:
    """PLACE-2"""
    assert place_to_save(path, ()) is None


def test_a_path_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "run" / "last.ckpt").symlink_to("best.ckpt")
    want = str(tmp_path / "run" / "last.ckpt")
    for given in (Path(want), f"file://{want}", f"{tmp_path}/link/../run/./last.ckpt", f"{tmp_path}/link/last.ckpt"):
        assert local_path(given) == want
    assert local_path("gs://bucket/last.ckpt") is None


def test_a_commit_is_found_by_its_record_in_a_directory_above(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.ckpt"
    assert place_shown(path) is None
    record = tmp_path / SERVICE / shown_key("deep/a.ckpt")
    record.parent.mkdir(parents=True)
    record.write_bytes(b"")
    assert place_shown(path) == CheckpointPlace(str(tmp_path), "deep/a.ckpt")
    assert place_shown(tmp_path / "a.ckpt") is None
    assert place_shown("s3://bucket/a.ckpt") is None
