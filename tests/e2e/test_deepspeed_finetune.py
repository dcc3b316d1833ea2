"""The DeepSpeed example under torchrun: it saves on two ranks and goes on with one, and nobody could tell from the losses."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from words import WordTokenizer  # noqa: E402

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install checkpointd[deepspeed]"
    ),
]

SMALL = ["--layers", "1", "--length", "16", "--vocabulary", "400", "--text_bytes", "100000", "--save_every", "5"]


STEPS = 8


def losses(ranks: int, folder: Path, *arguments: str) -> dict[int, float]:
    """The losses that rank 0 prints, by step."""
    script = [str(EXAMPLES / "deepspeed_finetune.py"), "--output_dir", str(folder), *SMALL, "--steps", str(STEPS), *arguments]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)}


def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ds"
    undisturbed = losses(2, folder, "--save_checkpoint")
    assert list(undisturbed) == list(range(STEPS))
    assert (folder / "checkpoints" / "latest").read_text() == "global_step5\n"
    tokenizer, text = WordTokenizer.from_pretrained(folder / "tokenizer"), "def resume(self): \u00e4"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    resumed = losses(1, folder, "--resume")
    assert resumed == pytest.approx({step: undisturbed[step] for step in (5, 6, 7)}, abs=2e-4)
