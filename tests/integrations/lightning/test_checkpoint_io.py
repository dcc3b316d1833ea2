"""CheckpointdIO by itself: what is saved at once, what is read and verified, and what is left to Lightning."""

from __future__ import annotations

import asyncio
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs lightning: make test-all installs it")

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from checkpointd.errors import DamagedError, StateError, WaitTimeoutError
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.integrations.lightning import CheckpointdIO, CheckpointdModelParallelStrategy, callbacks

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self, width: int = 2, name: str = "small") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, width)


def content(model: Model, step: int = 1) -> dict[str, Any]:
    return {
        "state_dict": model.state_dict(),
        "global_step": step,
        "hyper_parameters": dict(model.hparams),
        "pytorch-lightning_version": "2.6.6",
    }


def test_a_save_by_hand_is_there_when_the_call_returns_and_lightning_loads_it(tmp_path: Path) -> None:
    """LIGHTNING-2: also with hyperparameters, and after a change of the weights."""
    model, path = Model(3, "large"), tmp_path / "deep" / "a.ckpt"
    io = CheckpointdIO()
    io.save_checkpoint(content(model), path)
    assert io.handle is not None
    assert io.handle.phase == "committed"
    before = model.layer.weight.detach().clone()
    with torch.no_grad():
        model.layer.weight.zero_()
    loaded = Model.load_from_checkpoint(path)
    assert torch.equal(loaded.layer.weight, before)
    assert dict(loaded.hparams) == {"width": 3, "name": "large"}
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["layer.weight"], before)
    io.remove_checkpoint(path)
    assert not path.exists()


def test_fabric_saves_and_loads_with_it(tmp_path: Path) -> None:
    io, path = CheckpointdIO(), tmp_path / "run" / "a.ckpt"
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])

    def made() -> tuple[Any, Any]:
        layer = torch.nn.Linear(3, 2)
        return fabric.setup(layer, torch.optim.AdamW(layer.parameters()))

    model, optimizer = made()
    fabric.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 7})
    assert io.handle is not None
    assert io.handle.phase == "committed"
    other, moments = made()
    assert fabric.load(path, {"model": other, "optimizer": moments}) == {"step": 7}
    assert torch.equal(other.weight, model.weight)
    assert moments.state_dict()["state"][0]["step"] == 1


def test_an_object_that_cannot_be_pickled_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="'hook'"):
        CheckpointdIO().save_checkpoint({"global_step": 1, "hook": lambda: None}, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_damage_is_an_error_and_a_file_of_lightnings_own_is_loaded_as_ever(tmp_path: Path) -> None:
    io, path = CheckpointdIO(), tmp_path / "a.ckpt"
    io.save_checkpoint({"global_step": 1, "big": torch.rand(200_000)}, path)
    (stored,) = (one for one in (tmp_path / ".checkpointd" / "a.ckpt").rglob("*") if one.stat().st_size > 500_000)
    stored.chmod(0o600)
    with open(stored, "r+b") as file:
        file.seek(400_000)
        file.write(b"\0\0\0\0")
    with pytest.raises(DamagedError, match=r"a\.ckpt is damaged"):
        io.load_checkpoint(path)
    torch.save({"global_step": 7}, tmp_path / "theirs.ckpt")
    assert io.load_checkpoint(tmp_path / "theirs.ckpt")["global_step"] == 7
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "none.ckpt")


class Own:
    """A class that weights_only refuses."""


def test_weights_only_means_what_it_means_for_a_file(tmp_path: Path) -> None:
    io, path = CheckpointdIO(), tmp_path / "a.ckpt"
    io.save_checkpoint({"global_step": 1, "own": Own()}, path)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        io.load_checkpoint(path)
    assert isinstance(io.load_checkpoint(path, weights_only=False)["own"], Own)


def test_scratch_files_are_lightnings_own(tmp_path: Path) -> None:
    io, path = CheckpointdIO(), tmp_path / ".lr_find_1.ckpt"
    io.save_checkpoint({"global_step": 1}, path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    io.remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})


def test_it_can_be_copied_to_another_process_and_wrapped(tmp_path: Path) -> None:
    plugin = CheckpointdIO(commit_timeout_s=50.0)
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    buffer = io.BytesIO()
    torch.save(plugin, buffer)
    buffer.seek(0)
    copy = torch.load(buffer, weights_only=False)
    copy.save_checkpoint({"global_step": 2}, tmp_path / "b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "b.ckpt") == {"global_step": 2}
    wrapped = AsyncCheckpointIO(plugin)
    wrapped.save_checkpoint({"global_step": 3}, tmp_path / "c.ckpt")
    wrapped.teardown()
    assert torch.load(tmp_path / "c.ckpt") == {"global_step": 3}


def test_the_strategy_waits_for_the_saves_of_gathered_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, open_writer = threading.Event(), PosixStore.open_writer

    async def held(store: PosixStore, *args: Any, **kwargs: Any) -> Any:
        await asyncio.to_thread(go_on.wait, 60)
        return await open_writer(store, *args, **kwargs)

    monkeypatch.setattr(PosixStore, "open_writer", held)
    strategy = CheckpointdModelParallelStrategy(save_distributed_checkpoint=False)
    token = callbacks._IN_BACKGROUND.set(True)
    strategy.checkpoint_io.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    callbacks._IN_BACKGROUND.reset(token)
    with pytest.raises(WaitTimeoutError):
        strategy.wait(0)
    go_on.set()
    strategy.wait(60)
    assert (tmp_path / "a.ckpt").is_file()
    strategy.checkpoint_io.teardown()


def test_a_plugin_beside_shards_has_saves_of_its_own() -> None:
    strategy = CheckpointdModelParallelStrategy()
    strategy.checkpoint_io = CheckpointdIO()
    assert callbacks._pending_of(strategy) is not strategy.checkpoint_io.saves.pending


def test_the_callback_is_wrapped_once() -> None:
    CheckpointdIO()
    wrapped = ModelCheckpoint._save_checkpoint, ModelCheckpoint._link_checkpoint, ModelCheckpoint._find_last_checkpoints
    CheckpointdIO()
    assert wrapped == (
        ModelCheckpoint._save_checkpoint,
        ModelCheckpoint._link_checkpoint,
        ModelCheckpoint._find_last_checkpoints,
    )
