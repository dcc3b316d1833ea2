"""The roots of a training: which are opened, and what their end tells."""

from __future__ import annotations

import contextlib
import logging
import pickle
from pathlib import Path

import pytest
import torch

from checkpointd.config import Ranks
from checkpointd.errors import StoreError, UsageError
from checkpointd_client.integrations.lightning.places import CheckpointPlace
from checkpointd_client.integrations.lightning.roots import Roots


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(tmp_path, {"commit_timeout_s": 60.0}, Ranks())


def save(roots: Roots, tmp_path: Path, name: str) -> CheckpointPlace:
    place = roots.place(tmp_path / name)
    assert place is not None
    roots.core(place.folder).save_files(1, {place.name: {"a": torch.ones(3)}}, tag=place.tag, at=place.at).wait(60)
    return place


@pytest.mark.parametrize("option", ["retention", "pickle_client_state"])
def test_options_that_others_decide_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=option):
        Roots(None, {option: None})


def test_bad_options_are_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="staging"):
        Roots(tmp_path, {"staging": "sometimes"})
    assert list(tmp_path.iterdir()) == []


def test_one_root_serves_all_paths_below_it(roots: Roots, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    one, other = save(roots, tmp_path, "a.ckpt"), save(roots, tmp_path, "deep/b.ckpt")
    assert roots.is_open(one.folder)
    assert one.folder == other.folder
    assert not (tmp_path / "deep" / ".checkpointd").exists()
    roots.close()
    assert not roots.is_open(one.folder)


def test_a_checkpoint_goes_in_favour_of_another_and_the_last_one_when_it_is_told_to(roots: Roots, tmp_path: Path) -> None:
    one, other = save(roots, tmp_path, "a.ckpt"), save(roots, tmp_path, "b.ckpt")
    assert roots.remove(one)
    assert roots.remove(one)  # it is gone
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["b.ckpt"]
    assert roots.remove(other)
    assert [path.name for path in tmp_path.iterdir()] == [".checkpointd"]
    roots.close()


def test_nothing_goes_while_the_others_are_damaged(roots: Roots, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = save(roots, tmp_path, "a.ckpt")
    save(roots, tmp_path, "b.ckpt")
    for stored in (tmp_path / ".checkpointd" / "b.ckpt").rglob("*file*"):
        stored.chmod(0o600)
        stored.write_bytes(bytes(stored.stat().st_size))
    assert not roots.remove(one)
    assert "stays for now" in caplog.text
    assert (tmp_path / "a.ckpt").exists()
    roots.close()


def test_the_error_of_the_last_save_is_raised_at_the_end_and_hides_no_other_one(
    roots: Roots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        roots.core(str(tmp_path)).refuse(1, StoreError("the disk is full"), tag="a.ckpt").ended_within(60)

    fail()
    with pytest.raises(StoreError, match="the disk is full"):
        roots.close()
    fail()
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError), contextlib.closing(roots):
        _ = 1 / 0
    assert "the last save failed" in caplog.text


def test_a_copy_in_another_process_has_the_same_options_and_nothing_open(roots: Roots, tmp_path: Path) -> None:
    place = save(roots, tmp_path, "a.ckpt")
    copy = pickle.loads(pickle.dumps(roots))
    assert copy.options == roots.options
    assert copy.place(tmp_path / "a.ckpt") == place
    assert not copy.is_open(place.folder)
    roots.close()


def test_a_wrong_option_is_named_with_what_was_meant() -> None:
    with pytest.raises(UsageError, match="no option 'rooot': did you mean root"):
        Roots(None, {"rooot": "/mnt"})
