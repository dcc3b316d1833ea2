"""A checkpoint that was saved without DeepSpeed, as files for its load_checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.errors import UsageError
from checkpointd_client import Checkpointer
from checkpointd_client.integrations.deepspeed import get_fp32_state_dict_from_zero_checkpoint
from checkpointd_client.integrations.deepspeed.offline.exporting import export_deepspeed
from tests.unit.client.capture_and_fill import same


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    with Checkpointer(tmp_path / "root") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model, "optimizer": torch.optim.SGD(model.parameters())}).wait()
    export_deepspeed(tmp_path / "root", out, "global_step1")
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        export_deepspeed(tmp_path / "root", out)
    export_deepspeed(tmp_path / "root", out, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["global_step2", "latest"]
    out.rename(theirs)
    [path] = theirs.glob("*/*_model_states.pt")
    torch.save(torch.load(path, weights_only=False) | {"ds_config": {"train_batch_size": 8}}, path)
    with pytest.raises(UsageError, match="holds 'global_step2', which no export made"):
        export_deepspeed(tmp_path / "root", theirs, force=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_that_was_stepped_less_often_does_not_set_back_its_group(
    tmp_path: Path, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for trained in ([model.bias], [model.weight, model.bias]):
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [1.0, 2.0]
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(2, {"model": model, "optimizer": optimizer}).wait()
    with caplog.at_level(logging.WARNING):
        export_deepspeed(tmp_path / "root", tmp_path / "out", stage=stage)
    [path] = (tmp_path / "out").glob("*/*_optim_states.pt")
    content = torch.load(path, weights_only=False)["optimizer_state_dict"]
    base = content["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    assert base["state"][0]["step"].item() == 2.0
    assert "step differs between parameters" in caplog.text
    assert same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out"), dict(model.state_dict()))
