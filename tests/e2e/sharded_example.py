"""The training example, saved under FSDP2 on two ranks, and gone on with on others under FSDP2 and tensor parallelism.

Equal bit for bit: every tensor of model and optimizer right after loading, the schedule and the loader's position. Equal up to
the rounding of reductions, whose order is another on another number of ranks: the losses after that.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.sharded_ranks import Process

SAVED, STEPS = 4, 8
"""The checkpoint is of so many steps; training goes on up to the other."""
SMALL = ["--steps", "20", "--layers", "1", "--length", "16", "--dropout", "0"]
COMMON = ("model", "optimizer", "scheduler", "batches")
ROUNDING = 1e-4
"""Relative; the losses themselves move by 1e-1 from step to step, and float32 has a precision of 6e-8."""


def example(process: Process) -> None:
    """Save on 2 ranks; load on 1 and 3, and train on 2 and 3 as an undisturbed run on 1 does."""
    _train(process, "example", "fsdp2", 2, SAVED, "--save-every", str(SAVED))
    for parallel, ranks in (("fsdp2", 1), ("tp", 3)):
        _train(process, "example", parallel, ranks, SAVED)
    _train(process, "undisturbed", "fsdp2", 1, STEPS)
    for parallel, ranks in (("fsdp2", 3), ("tp", 2)):
        _train(process, "example", parallel, ranks, STEPS)
    if process.number == 0:
        process.wrong += _faults(process.folder)


def _train(process: Process, root: str, parallel: str, ranks: int, until: int, *more: str) -> None:
    """Run the example as a job of the first `ranks` processes; what it leaves lies in a folder named after the job."""
    examples = str(Path(__file__).resolve().parents[2] / "examples" / "demo")
    if examples not in sys.path:
        sys.path.insert(0, examples)  # the examples import each other as scripts do
    import train_gpt

    name = f"{root}-{parallel}-{ranks}-{until}"
    where = ["--root", str(process.folder / root), "--out", str(process.folder / name)]
    with process.job(name, ranks) as mine:
        if mine:
            never = ["--save-every", "1000", "--print-every", "1000", "--parallel", parallel, "--until", str(until)]
            with redirect_stdout(io.StringIO()):  # what it says would be taken for a fault
                train_gpt.train(train_gpt.parse_args([*SMALL, *where, *never, *more]))


def _faults(folder: Path) -> list[str]:
    """What is not as it should be, a line each."""
    saved = _final(folder / f"example-fsdp2-2-{SAVED}")
    whole = _losses(folder / f"undisturbed-fsdp2-1-{STEPS}", 0, STEPS)
    wrong = [] if any(name.endswith("exp_avg") for name in saved) else [f"the example saved no optimizer state: {saved}"]
    for name in (f"example-fsdp2-1-{SAVED}", f"example-tp-3-{SAVED}"):
        loaded = _final(folder / name)
        different = sorted(key for key in saved.keys() | loaded.keys() if saved.get(key) != loaded.get(key))
        wrong += [f"{name}, right after loading, differs in {different}"] if different else []
    resumed = {f"example-{kind}-{STEPS}": (SAVED, STEPS) for kind in ("fsdp2-3", "tp-2")}
    runs = {f"example-fsdp2-2-{SAVED}": (0, SAVED), **resumed}
    for name, (first, end) in runs.items():
        losses = _losses(folder / name, first, end)
        if losses != pytest.approx(whole[first:end], rel=ROUNDING):
            wrong.append(f"{name}: losses {losses}, not {whole[first:end]}")
    return wrong


def _final(out: Path) -> dict[str, str]:
    """Digests of what ranks have in common at the end of a job. Every rank must say the same."""
    ranks = [json.loads(path.read_text()) for path in sorted(out.glob("final-*.json"))]
    common = [{name: digest for name, digest in rank.items() if name.partition(".")[0] in COMMON} for rank in ranks]
    return common[0] if all(one == common[0] for one in common) else {"the ranks": "differ"}


def _losses(out: Path, first: int, end: int) -> list[float]:
    """The losses of these steps, and of no others."""
    entries: list[dict[str, Any]] = [json.loads(line) for line in (out / "losses-0.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(first, end)), f"{out} has other steps"
    return [float.fromhex(entry["loss"]) for entry in entries]
