"""The roots and files that the fuzzer changes. Roots of two ranks or of DeepSpeed are made in separate processes.

    corpus.py FOLDER

is those processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.e2e.forked_ranks import forked

STEPS = (1, 2, 3)
RANKS = 2
STAGES = (2, 3)
LIMIT_S = 200.0


def values(step: int) -> dict[str, torch.Tensor]:
    """What is saved as `step`."""
    moving, still = torch.Generator().manual_seed(step), torch.Generator().manual_seed(7)
    return {
        "w": torch.randn(48, 32, generator=moving),
        "b": torch.randn(64, generator=moving).bfloat16(),
        "still": torch.randn(64, 32, generator=still),
        "ids": torch.arange(step, step + 501),
        "flags": torch.rand(77, generator=moving) < 0.5,
        "scalar": torch.tensor(float(step)),
        "empty": torch.zeros(0, 4),
    }


def client_state(step: int) -> dict[str, Any]:
    return {"step": step, "list": [1, 2.5, None, b"\0\xff"], "nested": {"a": {"b": (1, 2)}}, "big": 10**30}


def make(folder: Path) -> None:
    """All of it. Needs DeepSpeed."""
    for kind in ("planes", "zstd", "none"):
        with Checkpointer(folder / kind, compression=kind, chunk_bytes=4096) as ckpt:
            for step in STEPS:
                ckpt.save(step, {"model": values(step)}, client_state=client_state(step)).wait()
    with Checkpointer(folder / "files" / ".checkpointd", compression="none") as ckpt:
        for step in STEPS:
            core_of(ckpt).save_files(step, {"mp_rank_00_model_states.pt": {"module": values(step)}}).wait()
    (folder / "pickle").mkdir()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    torch.save(
        {"module": values(1), "optimizer": optimizer.state_dict(), "args": argparse.Namespace(a=1)}, folder / "pickle" / "a.pt"
    )
    _make_by_ranks(folder)


def _make_by_ranks(folder: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.corpus", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT_S,
        check=False,
    )
    said = "".join(log.read_text() for log in sorted(folder.glob("rank-*.log")))
    assert done.returncode == 0, done.stderr + said


# --- in each of the ranks -----------------------------------------------------------------------------------------------


def run(folder: Path, rank: int) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    _save_sharded(folder / "ranks")
    for stage in STAGES:
        _save_engine(folder, stage)
    dist.barrier()


def _save_sharded(root: Path) -> None:
    """Each tensor is cut over the ranks, along its longest dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    with Checkpointer(root, compression="none", chunk_bytes=4096) as ckpt:
        for step in STEPS:
            placements = {
                name: Shard(value.shape.index(max(value.shape))) if value.numel() > 1 else Replicate()
                for name, value in values(step).items()
            }
            # Every rank has the whole: nothing is sent.
            model = {
                name: distribute_tensor(value, mesh, [placements[name]], src_data_rank=None)
                for name, value in values(step).items()
            }
            ckpt.save(step, {"model": model}, client_state=client_state(step)).wait()


def _save_engine(folder: Path, stage: int) -> None:
    """Of DeepSpeed alone, below `zero<stage>`; the same engine through checkpointd, below `shown<stage>`."""
    from checkpointd_client.integrations.deepspeed import attach
    from tests.e2e.deepspeed_engines import Kind, train
    from tests.e2e.deepspeed_engines import make as make_engine

    engine = make_engine(Kind(stage))
    train(engine, 0, 1)
    engine.save_checkpoint(str(folder / f"zero{stage}"), tag="global_step3", client_state={"epoch": 3})
    plug = attach(engine, synchronous=True)
    for step in STEPS:
        engine.save_checkpoint(str(folder / f"shown{stage}"), tag=f"global_step{step}", client_state={"epoch": step})
    plug.close()


def main() -> None:
    import tests.e2e.deepspeed_engines  # noqa: F401  # once for all ranks

    forked(Path(sys.argv[1]), RANKS, run)


if __name__ == "__main__":
    main()
