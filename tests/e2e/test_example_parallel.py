"""The training example under FSDP2 and tensor parallelism: saved on two ranks, gone on with on three and on one.

Equal bit for bit: every tensor of model and optimizer right after loading, the schedule and the loader's position. Equal up to
the rounding of reductions, whose order is another on another number of ranks: the losses after that.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # the examples import each other as scripts do

from launch import Job  # noqa: E402

pytest.importorskip("torch")

SAVED, STEPS = 4, 8
SMALL = ["--steps", "20", "--layers", "1", "--length", "16", "--dropout", "0", "--save-every", str(SAVED)]
COMMON = ("model", "optimizer", "scheduler", "batches")
ROUNDING = 1e-4
"""Relative; the losses themselves move by 1e-1 from step to step, and float32 has a precision of 6e-8."""


def train(root: Path, parallel: str, ranks: int, until: int) -> tuple[list[str], dict[int, float], dict[str, str]]:
    """What rank 0 printed, the loss of each step since the start, and digests of what is left at the end."""
    out = root.with_name(f"{root.name}-{parallel}-{ranks}-{until}")
    arguments = [*SMALL, "--root", str(root), "--out", str(out), "--parallel", parallel, "--until", str(until)]
    with Job(EXAMPLES / "train_gpt.py", arguments, errors=root.with_suffix(".stderr"), ranks=ranks) as job:
        printed = list(job)
    lines = [json.loads(line) for line in (out / "losses-0.jsonl").read_text().splitlines()]
    finals = [json.loads((out / f"final-{rank}.json").read_text()) for rank in range(ranks)]
    common = [{name: digest for name, digest in one.items() if name.partition(".")[0] in COMMON} for one in finals]
    assert all(one == common[0] for one in common), "the ranks ended with other whole tensors"
    return printed, {line["step"]: float.fromhex(line["loss"]) for line in lines}, common[0]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_two_ranks_goes_on_on_three_and_on_one(tmp_path: Path) -> None:
    _, losses, saved = train(tmp_path / "root", "fsdp2", 2, SAVED)
    assert any(name.endswith("exp_avg") for name in saved)
    for parallel, ranks in (("fsdp2", 1), ("tp", 3)):
        printed, _, loaded = train(tmp_path / "root", parallel, ranks, SAVED)
        assert printed[0].startswith(f"resumed from global_step{SAVED - 1}"), printed
        assert loaded == saved, f"{parallel} on {ranks} ranks"

    _, whole, _ = train(tmp_path / "undisturbed", "fsdp2", 1, STEPS)
    assert losses == pytest.approx({step: whole[step] for step in range(SAVED)}, rel=ROUNDING)
    for parallel, ranks in (("fsdp2", 3), ("tp", 2)):
        root = tmp_path / f"root-{parallel}"
        shutil.copytree(tmp_path / "root", root)
        _, resumed, _ = train(root, parallel, ranks, STEPS)
        assert resumed == pytest.approx({step: whole[step] for step in range(SAVED, STEPS)}, rel=ROUNDING), parallel
