"""Files of torch.save through the whole of a save: what is shown is what torch would have written, bit for bit where it counts."""

from __future__ import annotations

import collections
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.errors import AbortedError, StateError, UsageError
from checkpointd_client import Checkpointer

Files = dict[str, Any]


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "run" / ".checkpointd") as made:
        yield made


def example() -> Files:
    flat = torch.arange(5000.0, dtype=torch.bfloat16)
    return {
        "mp_rank_00_model_states.pt": {
            "module": collections.OrderedDict(weight=flat[:513].view(27, 19), bias=flat[600:700]),
            "empty": torch.empty(0),
            "shapes": [torch.Size([27, 19]), torch.Size([])],
            "lr": 0.1,
        },
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {
            "optimizer_state_dict": {"fp32": torch.randn(3_000_000), "step": torch.tensor(7.0), "flags": torch.tensor([True])},
            "ds_version": "0.19.8",
        },
    }


def save(ckpt: Checkpointer, files: Files, tag: str = "global_step7", **options: Any) -> Path:
    ckpt.save_files(7, files, tag=tag, **options).wait(60)
    return Path(ckpt.status().root).parent / tag


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_is_shown(ckpt: Checkpointer, mmap: bool) -> None:
    files = example()
    shown = save(ckpt, files)
    assert sorted(path.name for path in shown.iterdir()) == sorted(files)
    for name, content in files.items():
        assert equal(content, torch.load(shown / name, mmap=mmap, weights_only=True)), name
    assert (shown.parent / "latest").read_text() == "global_step7"


def test_every_zip_reader_finds_its_sums_right(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    for path in shown.iterdir():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_storages_that_are_shared_stay_shared(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    module = torch.load(shown / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert module["weight"].untyped_storage().data_ptr() == module["bias"].untyped_storage().data_ptr()
    assert (shown / "mp_rank_00_model_states.pt").stat().st_size < 16_000  # one storage of 10,000 bytes, not two


def test_what_changes_after_the_call_is_not_in_it(ckpt: Checkpointer) -> None:
    tensor, counter = torch.ones(1_000_000), {"step": 1}
    handle = ckpt.save_files(1, {"a.pt": {"tensor": tensor, "counter": counter}})
    tensor.zero_()
    counter["step"] = 2
    handle.wait(60)
    found = torch.load(Path(ckpt.status().root).parent / "global_step1" / "a.pt", weights_only=True)
    assert bool((found["tensor"] == 1).all())
    assert found["counter"] == {"step": 1}


def test_saving_a_tag_again_replaces_all_of_it_and_leaves_what_is_not_its_own(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    (shown / "tokenizer.json").write_text("{}")
    (shown / "zero_pp_rank_5_mp_rank_00_optim_states.pt").write_bytes(b"of a larger job")
    (shown / "notes").mkdir()
    (shown / "notes" / "run.txt").write_text("mine")
    save(ckpt, {"mp_rank_00_model_states.pt": {"new": torch.ones(3)}})
    assert sorted(path.name for path in shown.iterdir()) == ["mp_rank_00_model_states.pt", "notes", "tokenizer.json"]
    assert (shown / "notes" / "run.txt").read_text() == "mine"
    assert list(torch.load(shown / "mp_rank_00_model_states.pt")) == ["new"]


def test_save_latest_off_leaves_latest_where_it_was(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    save(ckpt, example(), tag="best", save_latest=False)
    assert (shown.parent / "latest").read_text() == "global_step7"
    assert (shown.parent / "best").is_dir()


def test_what_cannot_be_pickled_is_refused_by_name_and_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(AbortedError, match="failed while staging"), Checkpointer(tmp_path / ".checkpointd") as ckpt:
        with pytest.raises(StateError, match=r"a\.pt cannot be saved"):
            ckpt.save_files(1, {"a.pt": {"function": lambda: None}})
    assert os.listdir(tmp_path) == [".checkpointd"]


@pytest.mark.parametrize("name", ["../a.pt", "a/b.pt", ".hidden", ""])
def test_no_name_leads_out_of_the_directory(ckpt: Checkpointer, name: str) -> None:
    handle = ckpt.save_files(1, {name: {"a": 1}})
    with pytest.raises(Exception, match="cannot be the name of a file"):
        handle.wait(60)
    assert os.listdir(Path(ckpt.status().root).parent) == [".checkpointd"]


def test_a_root_of_another_name_says_what_is_wrong(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as ckpt, pytest.raises(UsageError, match=r"a directory named \.checkpointd"):
        ckpt.save_files(1, {"a.pt": {}})
