"""A job without a sidecar exports its own checkpoints, and no save and no end of it depends on that."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpointd.config import ExportConfig
from checkpointd.errors import NotFoundError, UsageError
from checkpointd_client import Checkpointer
from checkpointd_client.saves.exports import OwnExports


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Another state of the model, as of the next step."""
    with torch.no_grad():
        model.weight.add_(1.0)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def exported(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "model.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_ownexport_2_what_is_due_is_there_when_the_job_has_ended(tmp_path: Path, model: nn.Module) -> None:
    rule, wanted = ExportConfig(to=str(tmp_path / "models"), every_steps=2), {}
    with Checkpointer(tmp_path / "root", export=rule) as checkpoints:
        for step in (1, 2, 3, 4):
            wanted[step] = trained(model)
            checkpoints.save(step, {"model": model}).wait(60)
        shown = checkpoints.status().export
        assert shown is not None
        assert shown.to == str(tmp_path / "models")
    assert sorted(os.listdir(tmp_path / "models")) == [".checkpointd", "global_step2", "global_step4"]
    for step in (2, 4):
        assert equal(exported(tmp_path / "models" / f"global_step{step}"), wanted[step])
    assert os.listdir(tmp_path / "models" / ".checkpointd" / "exports") == []  # it let go of the place


def test_a_checkpoint_that_the_rule_wants_is_exported_although_the_job_keeps_only_the_newest(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export begins, and rests until retention has removed a later checkpoint."""
    begun, goes_on = threading.Event(), threading.Event()
    rest = OwnExports._rest

    async def rests(self: OwnExports, nbytes: int) -> None:
        begun.set()
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        await rest(self, nbytes)

    monkeypatch.setattr(OwnExports, "_rest", rests)
    rule = ExportConfig(to=str(tmp_path / "models"), every_steps=100)
    with Checkpointer(tmp_path / "root", export=rule, retention=1) as checkpoints:
        checkpoints.save(100, {"model": model}).wait(60)
        assert begun.wait(60)
        for step in range(101, 200):
            trained(model)
            checkpoints.save(step, {"model": model}).wait(60)
            if step > 101 and all(found.step != 101 for found in checkpoints.list()):
                break
        goes_on.set()
    assert sorted(os.listdir(tmp_path / "models")) == [".checkpointd", "global_step100"]


def test_ownexport_2_a_job_that_fails_does_not_wait(tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    close = OwnExports.close
    monkeypatch.setattr(OwnExports, "close", lambda self, *, finishes: (asked.append(finishes), close(self, finishes=finishes)))
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path / "root", export=ExportConfig(to=str(tmp_path / "m"))):
        _ = 1 / 0
    with Checkpointer(tmp_path / "root", export=ExportConfig(to=str(tmp_path / "m"))):
        pass
    assert asked == [False, True]


def test_ownexport_1_a_place_that_fails_fails_no_save_and_is_named_at_the_end(
    tmp_path: Path, model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models").write_text("a file")
    with Checkpointer(tmp_path / "root", export=ExportConfig(to=str(tmp_path / "models"))) as checkpoints:
        checkpoints.save(1, {"model": model}).wait(60)
    assert any(f"cannot be exported to {tmp_path}/models" in record.getMessage() for record in caplog.records)


def test_rules_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it must be an ExportConfig, as in export=ExportConfig\(to="):
        Checkpointer(tmp_path / "root", export="/models")  # type: ignore[arg-type]
    rule = ExportConfig(to=str(tmp_path / "models"))
    with pytest.raises(UsageError, match="with a sidecar, exports are the sidecar's"):
        Checkpointer(tmp_path / "root", export=rule, sidecar=tmp_path / "socket")
    with pytest.raises(UsageError, match="lies inside the root"):
        Checkpointer(tmp_path / "root", export=ExportConfig(to=str(tmp_path / "root" / "models")))
    with pytest.raises(NotFoundError, match=f"there is no directory {tmp_path}/base to copy configuration and tokenizer from"):
        Checkpointer(tmp_path / "root", export=ExportConfig(to=str(tmp_path / "models"), files=str(tmp_path / "base")))
    with Checkpointer(tmp_path / "root"):
        pass  # the one that was refused has let go of the root


class Holder(nn.Module):
    """A model with one child, which is called as DistributedDataParallel calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)


def test_a_module_keeps_its_own_names_and_a_state_dict_loses_those_of_its_wrapper(tmp_path: Path) -> None:
    bare = Holder()
    for name, state in (("module", bare), ("state_dict", nn.ModuleDict({"module": bare.module}).state_dict())):
        with Checkpointer(tmp_path / name, export=ExportConfig(to=str(tmp_path / f"{name}-models"))) as checkpoints:
            checkpoints.save(1, {"model": state}).wait(60)
    assert exported(tmp_path / "module-models" / "global_step1").keys() == {"module.weight", "module.bias"}
    assert exported(tmp_path / "state_dict-models" / "global_step1").keys() == {"weight", "bias"}
