"""The roots and files that the fuzzer changes. Roots of two ranks or of DeepSpeed are made in separate processes.

    corpus.py FOLDER

is those processes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests import every_object
from tests.e2e.forked_ranks import forked
from tests.every_object import RANKS, client_state, cut, values

STEPS = (1, 2, 3)
STAGES = (2, 3)
LIMIT_S = 200.0


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
    (folder / "every" / "root").rename(folder / "every object")
    shutil.rmtree(folder / "every")
    every_object.with_records(folder / "every object")


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
    every_object.begin(folder, rank)
    _save_sharded(folder / "ranks")
    for stage in STAGES:
        _save_engine(folder, stage)
    every_object.save(folder / "every", rank)


def _save_sharded(root: Path) -> None:
    with Checkpointer(root, compression="none", chunk_bytes=4096) as ckpt:
        for step in STEPS:
            ckpt.save(step, {"model": cut(step)}, client_state=client_state(step)).wait()


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
