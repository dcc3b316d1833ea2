"""CheckpointdManager with torchtitan's own containers and a small model, in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-all installs it")

from torchtitan.components.checkpointer import CheckpointManager

from checkpointd.errors import MismatchError, UsageError
from checkpointd_client import open_checkpoint
from checkpointd_client.integrations.torchtitan import CheckpointdManager
from tests.integrations.torchtitan.titan_job import Job, assert_equal
from tests.logged_roots import log_state

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.xdist_group("torchtitan"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_job_goes_on_from_the_newest_checkpoint(tmp_path: Path, async_mode: str) -> None:
    job = Job()
    manager = job.manager(tmp_path, async_mode=async_mode)
    assert manager.load() is False
    job.train(manager, 3)
    expected = job.everything()
    assert (manager.save_future is None) == (async_mode == "disabled")
    job.train()  # changes what was saved, right after the save
    manager.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path)
    random = torch.get_rng_state()
    assert manager.load() is True
    assert torch.equal(torch.get_rng_state(), random)
    assert_equal(other.everything(), expected)
    manager.close()


def test_the_names_are_those_of_torchtitan(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path, folder="here")
    job.train(manager, 2)
    manager.close()
    with open_checkpoint(tmp_path / "here", "step-2") as opened:
        assert opened.step == 2
        names = set(opened.tensors())
    assert {"0.weight", "head.bias", "optimizer.state.head.weight.exp_avg", "optimizer.state.0.bias.step"} <= names


def test_a_folder_may_end_with_a_slash(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path, folder="here/")
    assert manager.load() is False
    job.train(manager, 2)
    manager.close()
    assert (tmp_path / "here" / "latest").read_text().strip() == "step-2"


def test_as_many_checkpoints_stay_as_keep_latest_k_says(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path, keep_latest_k=2, async_mode="disabled")
    manager.load()
    job.train(manager, 5)
    manager.close()
    again = Job().manager(tmp_path, keep_latest_k=2)
    again.load()
    tags = [checkpoint.tag for checkpoint in again._begun(again.folder).checkpoints()]
    again.close()
    assert tags[:2] == ["step-5", "step-4"]
    assert not {"step-1", "step-2"} & set(tags)  # step-3 goes once a newer one was read back


def test_a_named_step_is_loaded(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path)
    job.train(manager, 2)
    expected = job.everything()
    job.train(manager, 2)
    manager.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path)
    assert manager.load(2) is True
    assert_equal(other.everything(), expected)
    with pytest.raises(FileNotFoundError, match="load_step=7"):
        manager.load(7)
    manager.close()


def test_load_only_reads_and_disturbs_nobody(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path)
    job.train(manager, 2)
    manager.maybe_wait_for_saving()
    begun = log_state(tmp_path / "checkpoint").begins
    reader = Job(seed=1)
    looking = reader.manager(tmp_path, load_only=True)
    assert looking.load() is True
    assert_equal(reader.everything(), job.everything())
    assert looking.save(3) is False
    looking.close()
    assert log_state(tmp_path / "checkpoint").begins == begun
    job.train(manager)  # it still saves
    manager.close()


def test_parts_are_excluded_from_loading(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path)
    job.train(manager, 2)
    manager.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path, exclude_from_loading=["dataloader", "lr_scheduler"])
    assert manager.load() is True
    assert (other.step, other.loader.position, other.schedulers.state_dict()["last_epoch"]) == (2, 0, 0)
    manager.close()


@pytest.mark.parametrize("model_only", [True, False])
def test_another_run_begins_from_initial_load_path(tmp_path: Path, *, model_only: bool) -> None:
    job = Job()
    manager = job.manager(tmp_path / "one")
    job.train(manager, 2)
    expected = job.everything()
    manager.close()
    other = Job(seed=1)
    path = str(tmp_path / "one" / "checkpoint" / "step-2")
    manager = other.manager(tmp_path / "two", initial_load_path=path, initial_load_model_only=model_only)
    assert manager.load() is True
    found = other.everything()
    if model_only:
        assert other.step == 0
        expected = {name: value for name, value in expected.items() if name.startswith(("0.", "head."))}
        found = {name: found[name] for name in expected}
    assert_equal(found, expected)
    other.train(manager)
    manager.close()
    assert (tmp_path / "two" / "checkpoint" / "latest").read_text().strip() == f"step-{other.step}"


def test_the_last_step_holds_the_model_alone_in_the_dtype_of_the_export(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path / "one", last_save_model_only=True, export_dtype="bfloat16")
    job.train(manager, 1, last=True)
    manager.close()
    with open_checkpoint(tmp_path / "one" / "checkpoint", "step-1") as opened:
        saved = dict(opened.tensors())
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert sorted(saved) == ["0.bias", "0.weight", "head.bias", "head.weight"]
    other = Job(seed=1)
    manager = other.manager(tmp_path / "two", initial_load_path=str(tmp_path / "one" / "checkpoint" / "step-1"))
    assert manager.load() is True
    assert torch.equal(other.parts[0][0].weight, saved["0.weight"].float())
    manager.close()
    manager = Job().manager(tmp_path / "one")
    with pytest.raises(MismatchError, match=r"step-1 holds the model alone.*load_step"):
        manager.load()
    manager.close()


def test_of_step_0_the_model_alone_is_loaded(tmp_path: Path) -> None:
    job = Job()
    seed = job.manager(tmp_path, last_save_model_only=True)
    seed.save(0, last_step=True)
    seed.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path)
    assert manager.load() is True
    assert torch.equal(other.parts[0][0].weight, job.parts[0][0].weight)
    assert other.step == 0
    other.train(manager)
    manager.close()


def test_a_run_goes_on_from_torchtitans_own_checkpoints(tmp_path: Path) -> None:
    job = Job()
    stock = job.manager(tmp_path, CheckpointManager, keep_latest_k=2)
    job.train(stock, 2)
    expected = job.everything()
    stock.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path, keep_latest_k=2, async_mode="disabled")
    assert manager._find_load_step() == 2
    assert manager.load() is True
    assert_equal(other.everything(), expected)
    other.train(manager)
    manager.close()
    folder = tmp_path / "checkpoint"
    assert not (folder / "step-1").exists()
    assert (folder / "step-2" / ".metadata").exists()
    newest = Job(seed=2)
    manager = newest.manager(tmp_path, keep_latest_k=2, async_mode="disabled")
    assert manager.load() is True
    assert_equal(newest.everything(), other.everything())
    newest.train(manager)
    manager.close()
    assert not (folder / "step-2").exists()


def test_torchtitans_own_checkpoint_is_an_initial_one(tmp_path: Path) -> None:
    job = Job()
    stock = job.manager(tmp_path / "one", CheckpointManager)
    job.train(stock, 1)
    stock.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path / "two", initial_load_path=str(tmp_path / "one" / "checkpoint" / "step-1"))
    assert manager.load() is True
    assert torch.equal(other.parts[0][0].weight, job.parts[0][0].weight)
    manager.close()


def test_a_run_does_not_go_on_from_an_export_for_hugging_face(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path)
    job.train(manager, 1)
    manager.close()
    (tmp_path / "checkpoint" / "step-2").mkdir()
    (tmp_path / "checkpoint" / "step-2" / "model.safetensors.index.json").write_text("{}")
    manager = job.manager(tmp_path)
    with pytest.raises(ValueError, match=r"step-2 holds the model alone.*load_step"):
        manager.load()
    assert manager.load(1) is True
    manager.close()


def test_a_save_that_has_not_committed_is_never_found(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path)
    job.train(manager, 1)
    manager.close()
    (tmp_path / "checkpoint" / "step-9" / "00000001-0").mkdir(parents=True)
    manager = job.manager(tmp_path)
    assert manager._find_load_step() == 1
    manager.close()


def test_bad_options_are_refused_in_the_config() -> None:
    with pytest.raises(UsageError, match="max_overhead"):
        CheckpointdManager.Config(max_overhead=0.0)
    with pytest.raises(ValueError, match="at least 2 checkpoint replicas"):
        CheckpointdManager.Config(keep_latest_k=1)


def test_hugging_faces_format_in_a_bucket_is_refused() -> None:
    """By torchtitan itself. A load would otherwise look there for a checkpoint of ours."""
    with pytest.raises(ValueError, match=r"initial_load_in_hf is not supported .*: s3://bucket/llama"):
        CheckpointdManager.Config(enable=True, initial_load_path="s3://bucket/llama", initial_load_in_hf=True)
    with pytest.raises(ValueError, match=r"last_save_in_hf is not supported .*: s3://bucket/run1"):
        CheckpointdManager.Config(enable=True, folder="s3://bucket/run1", last_save_in_hf=True)


def test_hugging_faces_format_in_a_bucket_is_refused_if_a_config_function_sets_it_later(tmp_path: Path) -> None:
    config = CheckpointdManager.Config(enable=True, initial_load_in_hf=True)
    config.initial_load_path = "s3://bucket/llama"
    with pytest.raises(ValueError, match=r"initial_load_in_hf is not supported .*: s3://bucket/llama"):
        CheckpointdManager(config, base_folder=str(tmp_path))


def test_it_is_chosen_by_its_config() -> None:
    config = CheckpointdManager.Config(enable=False)
    assert dataclasses.is_dataclass(config)
    assert isinstance(Job().manager(Path("unused"), enable=False), CheckpointdManager)
