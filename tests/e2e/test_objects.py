"""A job with its checkpoints in a bucket of a real server: it saves, is started again, and the commands see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointd_client import Checkpointer, open_checkpoint
from tests.servers.fixtures import Place

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = 3


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = torch.nn.Linear(64, 64)
    return made, torch.optim.AdamW(made.parameters())


def train(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    made(torch.ones(8, 64)).square().sum().backward()
    optimizer.step()


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "checkpointd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_job_in_a_bucket_goes_on_where_it_was(seaweed_root: str) -> None:
    made, optimizer = model()
    with Checkpointer(seaweed_root) as ckpt:
        assert ckpt.load({"model": made, "optimizer": optimizer}) is None
        for step in range(STEPS):
            train(made, optimizer)
            ckpt.save(step, {"model": made, "optimizer": optimizer}).wait()
        requests = ckpt.status().requests
        assert requests is not None
        assert requests.puts >= 3 * STEPS
    again, its_optimizer = model()
    with Checkpointer(seaweed_root) as ckpt:
        loaded = ckpt.load({"model": again, "optimizer": its_optimizer})
        assert loaded is not None
        assert loaded.step == STEPS - 1
    train(made, optimizer)
    train(again, its_optimizer)
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), again.parameters(), strict=True))
    with open_checkpoint(seaweed_root) as checkpoint:
        assert checkpoint.step == STEPS - 1


def refused(code: int, *arguments: str) -> str:
    """What a command says that ends with `code`."""
    done = subprocess.run([sys.executable, "-m", "checkpointd", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done
    return done.stderr


def test_the_commands_see_a_root_in_a_bucket(seaweed_root: str, seaweed_place: Place, tmp_path: Path) -> None:
    made, optimizer = model()
    with Checkpointer(seaweed_root) as ckpt:
        for step in range(2):
            ckpt.save(step, {"model": made, "optimizer": optimizer}).wait()
    listed = json.loads(run("list", seaweed_root, "--json"))
    assert [row["tag"] for row in listed["rows"]] == ["global_step1", "global_step0"]
    assert "whole" in run("verify", seaweed_root)
    assert "multipart" in run("doctor", seaweed_root) or "upload" in run("doctor", seaweed_root)
    run("consolidate", seaweed_root, "latest", str(tmp_path / "model.safetensors"), "--only", "model")
    assert (tmp_path / "model.safetensors").stat().st_size > made.weight.nbytes
    run("gc", seaweed_root, "--keep-last", "1")
    assert [row["tag"] for row in json.loads(run("list", seaweed_root, "--json"))["rows"]] == ["global_step1"]
    inside = seaweed_root.replace(f"/{seaweed_place.prefix}?", f"/{seaweed_place.prefix}/global_step1?")
    assert "lies in the root" in refused(2, "list", inside)
    nothing = seaweed_root.replace(f"/{seaweed_place.prefix}?", f"/{seaweed_place.prefix}-misspelt?")
    assert "no job ever saved there" in refused(4, "mirror", nothing, str(tmp_path / "mirror"))
    assert not (tmp_path / "mirror").exists()
