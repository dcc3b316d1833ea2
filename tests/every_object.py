"""A root that has every kind of object of docs/FORMAT.md, but files. Its two ranks are processes of their own.

    every_object.py FOLDER

is those processes: they write FOLDER/root.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from checkpointd.codec import Compression
from checkpointd.commit import log_access
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import attempt_lease_key, read_back_name
from checkpointd.layout.manifest import Lease, ReadBack, encode
from checkpointd.pipeline import identity
from checkpointd.pipeline.read.verify import record_verdict, verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.write import choose_codec
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, Retention
from tests.e2e.forked_ranks import forked, forked_output
from tests.faults.jobs import wait_until
from tests.logged_roots import log_state

RANKS = 2
LIMIT_S = 200.0
NEWEST, LATER = 5, 6
"""The step of the newest checkpoint, and one whose save is undecided."""
STEPS = {"global_step1": 1, "global_step2": 2, "best": 3, "global_step4": 4, f"global_step{NEWEST}": NEWEST}
"""The checkpoints of the root, with the step whose values they hold."""
NOBODY = "elsewhere.000000000000.0.4711.0.00000000"

_ATTEMPT = r"[^/.]+/\d{8}-\d+/"
KINDS = {
    "latest": "latest",
    "raw chunks": rf"{_ATTEMPT}\d{{5}}-0\.chunks",
    "encoded chunks": rf"{_ATTEMPT}\d{{5}}-1\.chunks",
    "index": rf"{_ATTEMPT}\d{{5}}\.index",
    "vote": rf"{_ATTEMPT}\d{{5}}\.vote",
    "ballot": rf"{_ATTEMPT}ballot-[0-9a-f]{{32}}",
    "joint plan": rf"{_ATTEMPT}plan-[0-9a-f]{{32}}",
    "record of reading back": rf"{_ATTEMPT}\d{{5}}\.readback",
    "lease of an attempt": rf"\.checkpointd/leases/attempts/{_ATTEMPT.rstrip('/')}",
    "lease of a job": r"\.checkpointd/leases/\d{8}",
    "id of the root": "log/root",
    "entry": r"log/\d{12}\.json",
    "state": r"log/\d{12}\.state",
}
"""The kinds of objects, each with a pattern of its keys."""


def keys_of(root: Path, kind: str) -> list[str]:
    """The keys of the objects of this kind, sorted."""
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(key for key in found if re.fullmatch(KINDS[kind], key))


def values(step: int) -> dict[str, torch.Tensor]:
    """What is saved as `step`."""
    moving, still = torch.Generator().manual_seed(step), torch.Generator().manual_seed(7)
    return {
        "w": torch.randn(48, 32, generator=moving),
        "b": torch.randn(64, generator=moving).bfloat16(),
        "still": torch.randn(64, 32, generator=still),
        "nearly still": torch.randn(64, 64, generator=still).index_fill_(0, torch.tensor(step % 64), step),
        "ids": torch.arange(step, step + 501),
        "flags": torch.rand(77, generator=moving) < 0.5,
        "scalar": torch.tensor(float(step)),
        "empty": torch.zeros(0, 4),
    }


def client_state(step: int) -> dict[str, Any]:
    return {"step": step, "list": [1, 2.5, None, b"\0\xff"], "nested": {"a": {"b": (1, 2)}}, "big": 10**30}


def cut(step: int) -> dict[str, object]:
    """The values of `step`, each cut over the ranks along its longest dimension, if it has more than one element."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, object] = {}
    for name, value in values(step).items():
        placement = Shard(value.shape.index(max(value.shape))) if value.numel() > 1 else Replicate()
        # Every rank has the whole: nothing is sent.
        found[name] = distribute_tensor(value, mesh, [placement], src_data_rank=None)
    return found


def make(folder: Path) -> Path:
    """The root, below `folder`."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.every_object", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr + forked_output(folder)
    return with_records(folder / "root")


def with_records(root: Path) -> Path:
    """Add to the root what a job leaves for a moment only, or after damage."""
    asyncio.run(_add_records(root))
    return root


async def _add_records(root: Path) -> None:
    async with PosixStore(root) as store:
        newest = await root_view.find(store, f"global_step{NEWEST}")
        await record_verdict(store, newest, await verify(store, newest, LoadConfig()))
        await store.put(f"{newest.prefix}/{read_back_name(0)}", encode(ReadBack(rank=0, nbytes=1, writer=identity.writer())))
        lease = Lease(process=NOBODY, job="train", count=7, length_s=0.05, writer=identity.writer())
        await store.put(attempt_lease_key(newest.prefix), encode(lease))


# --- in each of the ranks -----------------------------------------------------------------------------------------------


def run(folder: Path, rank: int) -> None:
    begin(folder, rank)
    save(folder, rank)


def begin(folder: Path, rank: int) -> None:
    """Make the group of the ranks."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)


def save(folder: Path, rank: int) -> None:
    """Write `folder`/root, and end this process as if it were killed."""
    with (
        mock.patch.object(log_access, "STATE_EVERY", 8),
        mock.patch.object(choose_codec, "DELTA_BYTES_MIN", 1024),
    ):
        _save_all(folder, rank)
    torch.distributed.barrier()
    os._exit(0)


def _save_all(folder: Path, rank: int) -> None:
    root = folder / "under way"
    with _opened(root) as ckpt:
        for step in (0, 1, 2):
            _save(ckpt, step, metrics={"loss": 1 / (step + 1)})
        for step in (2, 3):
            _save(ckpt, step, tag="best", save_latest=False)
        with suppress(CheckpointdError):
            ckpt.save(3, {"model": cut(3), "refused": object() if rank else None}).wait()
    with _opened(root) as ckpt:
        ckpt.load({"model": cut(0)})
        _save(ckpt, 4)
        _save(ckpt, 3, tag="best", save_latest=False)
    ckpt = _opened(root, compression="none")
    ckpt.load({"model": cut(0)})
    _save(ckpt, NEWEST)
    if rank == 0:
        wait_until(lambda: log_state(root).attempts[f"global_step{NEWEST}/00000003-0"].verified, "the newest is read back")
        ckpt.save(LATER, {"model": cut(LATER)})
        wait_until((root / f"global_step{LATER}/00000003-0/00000.vote").is_file, "rank 0 has voted")
        shutil.copytree(root, folder / "root")


def _opened(root: Path, *, compression: Compression = "planes") -> Checkpointer:
    full_every = None if compression == "none" else 3
    return Checkpointer(
        root, compression=compression, full_every=full_every, chunk_bytes=4096, retention=Retention(keep_last=5)
    )


def _save(ckpt: Checkpointer, step: int, **options: Any) -> None:
    ckpt.save(step, {"model": cut(step)}, client_state=client_state(step), **options).wait()


if __name__ == "__main__":
    forked(Path(sys.argv[1]), RANKS, run)
