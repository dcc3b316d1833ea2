"""What it takes to resume a DeepSpeed job on another number of ranks: DeepSpeed's universal path, and checkpointd's.

    python -m benchmarks.deepspeed_universal [--stage 1] [--width 1024] [--layers 4] [--ranks 2 --to 3]

Saves one engine both ways, then loads each into engines on another number of ranks, and prints seconds and bytes as JSON.
DeepSpeed's path is `save_checkpoint`, `ds_to_universal`, `load_checkpoint` with `load_universal`; ours is `save_checkpoint` and
`load_checkpoint` with layout="checkpointd". Needs deepspeed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 2


def main() -> None:
    arguments = _parsed(sys.argv[1:])
    if arguments.act is not None:
        _worker(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments.folder = folder
        found: dict[str, Any] = {"settings": {name: getattr(arguments, name) for name in _SETTINGS}}
        found |= _launch(arguments, "save", arguments.ranks)
        found["convert_s"] = _convert(Path(folder))
        found |= _launch(arguments, "load-universal", arguments.to)
        found |= _launch(arguments, "load-ours", arguments.to)
        found["bytes"] = {name: _size(Path(folder) / place) for name, place in _PLACES.items()}
        print(json.dumps(found, indent=2))


_SETTINGS = ("stage", "width", "layers", "ranks", "to")
_TAG = f"global_step{STEPS}"
_PLACES = {"deepspeed": f"stock/{_TAG}", "universal": f"stock/{_TAG}_universal", "ours": f"ours/{_TAG}"}


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--act", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="where to work; the system's temporary directory by default")
    for name, default in (("stage", 1), ("width", 1024), ("layers", 4), ("ranks", 2), ("to", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(words)


def _launch(arguments: argparse.Namespace, act: str, ranks: int) -> dict[str, Any]:
    """One job; what its rank 0 says."""
    settings = [word for name in _SETTINGS for word in (f"--{name}", str(getattr(arguments, name)))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", __spec__.name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, "--act", act, "--folder", arguments.folder, *settings],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return dict(json.loads(said))


def _convert(folder: Path) -> float:
    source = folder / "stock" / _TAG
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    began = time.perf_counter()
    subprocess.run(
        [*command, "--input_folder", str(source), "--output_folder", f"{source}_universal"],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


def _size(folder: Path) -> int:
    """Bytes on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


# --- inside a job ---------------------------------------------------------------------------------------------------


def _worker(arguments: argparse.Namespace) -> None:
    import deepspeed
    import deepspeed.comm.comm
    import torch

    from checkpointd_client.integrations.deepspeed import attach

    # It would be compiled for a minute, and is not needed: gloo does the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
    model = torch.nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": arguments.stage},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": arguments.act == "load-universal"},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    folder = Path(arguments.folder)
    if arguments.act == "save":
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(1, arguments.width, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        said = {"deepspeed_save_s": _timed(lambda: engine.save_checkpoint(str(folder / "stock")))}
        plug = attach(engine, layout="checkpointd")
        said["ours_call_s"] = _timed(lambda: engine.save_checkpoint(str(folder / "ours")))
        assert plug.handle is not None
        plug.handle.wait()
        said["ours_committed_s"] = plug.handle.timings.committed_s
    elif arguments.act == "load-universal":
        tag = f"{_TAG}_universal"
        said = {"universal_load_s": _timed(lambda: engine.load_checkpoint(str(folder / "stock"), tag=tag))}
    else:
        attach(engine, layout="checkpointd")
        said = {"ours_load_s": _timed(lambda: engine.load_checkpoint(str(folder / "ours")))}
    if engine.global_rank == 0:
        print("\n" + json.dumps(said), flush=True)
    engine.destroy()


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
