"""torchtitan's debug model with checkpointd: what it saves, and what it resumes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd_client import open_checkpoint
from tests.integrations.torchtitan.titan_data import make_data

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-all installs it")

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.xdist_group("torchtitan")]


def launch(folder: Path, ranks: int, *runs: dict[str, Any], fails: bool = False) -> str:
    """Train on so many ranks; returns what they wrote."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the training, and changes nothing that is saved
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, "-m", "tests.integrations.torchtitan.debug_model", str(folder), json.dumps(runs)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, output[-8000:]
    return output


def args(dump: Path, *more: str) -> list[str]:
    return ["--dump_folder", str(dump), "--training.steps", "8", *more]


def state_of(dump: Path, tag: str) -> dict[str, Any]:
    """All tensors of a checkpoint by name, the step that it would go on from, and the state of the data loaders."""
    with open_checkpoint(dump / "checkpoint", tag) as opened:
        rest: dict[str, Any] = {"train_state": {}, "lr_scheduler": {}, "dataloader": {}}
        opened.load(rest, strict=False)
        return {**opened.tensors(), **rest}


def model_of(dump: Path, tag: str) -> dict[str, Any]:
    """The tensors of the model alone."""
    tensors = {name: value for name, value in state_of(dump, tag).items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}


def assert_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name], name


def test_a_killed_run_goes_on_as_if_nothing_had_happened_and_loads_on_fewer_ranks(tmp_path: Path) -> None:
    """Eight steps without a stop equal four, a start that is killed in the save of step 6, and the rest."""
    make_data(tmp_path)
    whole, resumed, exported = tmp_path / "whole", tmp_path / "resumed", tmp_path / "exported"
    stopped, killed = {"args": args(resumed), "stop": 4}, {"args": args(resumed), "kill": 6}
    launch(tmp_path, 2, {"args": args(whole)}, stopped, killed, fails=True)
    assert sorted(resumed.glob("checkpoint/step-6/00000002-0"))  # of the start that was killed
    newest = ["--checkpoint.initial_load_path", str(whole / "checkpoint" / "step-8")]
    export = args(exported, *newest, "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")
    output = launch(tmp_path, 2, {"args": args(resumed)}, {"args": export, "resave": True})
    assert "Training starts at step 5" in output or "Training starts at step 7" in output
    for tag in ("step-4", "step-6", "step-8"):
        assert_equal(state_of(resumed, tag), state_of(whole, tag))

    fewer, imported = tmp_path / "fewer", tmp_path / "imported"
    all_of_it = ["--checkpoint.no-initial_load_model_only", "--checkpoint.exclude_from_loading", "dataloader"]
    from_hf = ["--checkpoint.initial_load_path", str(exported / "checkpoint" / "step-0"), "--checkpoint.initial_load_in_hf"]
    resaved = [args(fewer, *newest, *all_of_it), args(imported, *from_hf)]
    launch(tmp_path, 1, *({"args": one, "resave": True} for one in resaved))
    expected, found = state_of(whole, "step-8"), state_of(fewer, "step-8")
    assert expected.pop("dataloader") != found.pop("dataloader")  # the only part that was not loaded
    assert_equal(found, expected)
    assert_equal(model_of(imported, "step-0"), model_of(whole, "step-8"))


LAYOUTS = {
    "pipeline": ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4"],
    "tensor": ["--parallelism.tensor_parallel_degree", "2"],
}
ALL_OF_IT = ["--checkpoint.no-initial_load_model_only", "--checkpoint.exclude_from_loading", "dataloader"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_it_does_with_other_parallelism_and_goes_on_in_another_layout(tmp_path: Path, layout: str) -> None:
    make_data(tmp_path)
    whole, resumed, fsdp, back, alone = (tmp_path / name for name in ("whole", "resumed", "fsdp", "back", "alone"))
    given = LAYOUTS[layout]
    stopped, killed = {"args": args(resumed, *given), "stop": 4}, {"args": args(resumed, *given), "kill": 6}
    launch(tmp_path, 2, {"args": args(whole, *given)}, stopped, killed, fails=True)
    from_last = ["--checkpoint.initial_load_path", str(whole / "checkpoint" / "step-8"), *ALL_OF_IT]
    from_fsdp = ["--checkpoint.initial_load_path", str(fsdp / "checkpoint" / "step-8"), *ALL_OF_IT]
    resaved = [args(fsdp, *from_last), args(back, *from_fsdp, *given)]
    launch(tmp_path, 2, {"args": args(resumed, *given)}, *({"args": one, "resave": True} for one in resaved))
    launch(tmp_path, 1, {"args": args(alone, *from_last), "resave": True})
    for tag in ("step-4", "step-6", "step-8"):
        assert_equal(state_of(resumed, tag), state_of(whole, tag))
    expected = state_of(whole, "step-8")
    del expected["dataloader"]  # the only part that was not loaded
    for dump in (fsdp, back, alone):
        found = state_of(dump, "step-8")
        del found["dataloader"]
        assert_equal(found, expected)
