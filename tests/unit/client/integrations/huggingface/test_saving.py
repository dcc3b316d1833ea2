"""What saves the directories of Trainer and Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointd.errors import UsageError
from checkpointd_client.integrations.huggingface.filling import Wanted
from checkpointd_client.integrations.huggingface.saving import DirectorySaver


@pytest.mark.parametrize("options", [{"when_bussy": "wait"}, {"when_busy": "later"}])
def test_options_that_cannot_be_are_refused_before_the_training(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="when_busy"):
        DirectorySaver(None, options, synchronous=False)


@pytest.mark.parametrize(("options", "stays"), [({}, False), ({"retention": 3}, True)])
def test_a_run_without_a_load_replaces_what_it_saves_again(
    tmp_path: Path, options: dict[str, int], stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for content in (1.0, 2.0):
        saver = DirectorySaver(None, dict(options), synchronous=True)
        filling = saver.filling(Wanted(str(tmp_path / "checkpoint-1"), 1, None))
        assert filling is not None
        with filling.active():
            torch.save({"weight": torch.full((3,), content)}, Path(filling.filled.path, "model.pt"))
        filling.save(filling, ())
        saver.close()
    assert torch.load(tmp_path / "checkpoint-1" / "model.pt")["weight"].tolist() == [2.0] * 3
    stored = {path.parent.name for path in (tmp_path / ".checkpointd" / "checkpoint-1").glob("*/*.file")}
    assert stored == ({"00000001-0", "00000002-0"} if stays else {"00000002-0"})
    assert ("has not loaded" in caplog.text) is stays
