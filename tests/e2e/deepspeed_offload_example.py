"""examples/demo/deepspeed_finetune.py with `--offload`, on a machine without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e import deepspeed_offload_engines  # noqa: F401  # stands in for CUDA

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))

import deepspeed_finetune as script

if __name__ == "__main__":
    script.check_offload = lambda _: None
    script.train(script.parse_args())
