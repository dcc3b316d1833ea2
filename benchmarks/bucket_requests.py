"""The requests that a job sends to a bucket: for each save, for reading back and for each load, by kind, rank and size.

    python benchmarks/bucket_requests.py 's3://BUCKET/PATH?endpoint=http://127.0.0.1:8333'     # some minutes

Two ranks save random values, which do not compress, as rows of one tensor. Each rank counts its own requests with
`Checkpointer.status().requests`. With `--votes`, one process writes what that many ranks write, and the real code of rank 0
commits their save. Everything lies below PATH in a directory of its own, and stays there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import roots
from checkpointd.bucket_urls import parse
from checkpointd.pipeline.root import starts
from checkpointd.store import open_store
from checkpointd.store.requests import Requests, requests_of
from checkpointd_client import Checkpointer

MIB = 1 << 20
RANKS = 2
SAVES = 3
WAIT_S = 600
QUIET_S = 1.5
START, SAVE, READ_BACK, LOAD, COMMIT = "start", "save", "read back", "load", "save with votes that are there"

Row = dict[str, Any]


def below(root: str, name: str) -> str:
    """The root `name` in the place that `root` names."""
    return parse(root).below(name).url


# --- a job ---------------------------------------------------------------------------------------------------


def sent(ckpt: Checkpointer) -> Requests:
    """What this rank has sent so far."""
    found = ckpt.status().requests
    assert found is not None, "the root is not in a bucket"
    return found


def settled(ckpt: Checkpointer) -> Requests:
    """What this rank has sent when it sends nothing more: after a commit rank 0 tidies up. On all ranks together."""
    last, since = sent(ckpt), time.monotonic()
    while time.monotonic() < since + QUIET_S:
        time.sleep(0.05)
        if sent(ckpt) != last:
            last, since = sent(ckpt), time.monotonic()
    dist.barrier()
    return last


def job(rank: int, root: str, shard_bytes: int, out: str) -> None:
    """One of RANKS ranks: saves, the reading back of the newest save, and a load by another Checkpointer."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(rank)
    rows: list[Row] = []

    def note(what: str, spent: Requests, seconds: float) -> None:
        rows.append({"what": what, "rank": rank, "shard_bytes": shard_bytes, "seconds": round(seconds, 1), **spent.by_kind()})

    def state() -> dict[str, DTensor]:
        local = torch.randint(-(1 << 62), 1 << 62, (shard_bytes // 8,))
        return {"weight": DTensor.from_local(local, mesh, [Shard(0)])}

    began = time.monotonic()
    with Checkpointer(root, read_back=False) as ckpt:
        ckpt.load(state())
        note(START, settled(ckpt), time.monotonic() - began)
        for step in range(SAVES):
            before, began = settled(ckpt), time.monotonic()
            ckpt.save(step, state()).wait(WAIT_S)
            seconds = time.monotonic() - began
            note(SAVE, settled(ckpt) - before, seconds)
    with Checkpointer(root) as ckpt:
        before, began = settled(ckpt), time.monotonic()
        ckpt.load(state())
        seconds = time.monotonic() - began
        note(LOAD, settled(ckpt) - before, seconds)
        ckpt.save(SAVES, state()).wait(WAIT_S)
        before, began = sent(ckpt), time.monotonic()
        note(READ_BACK, settled(ckpt) - before, time.monotonic() - began)
        assert ckpt.list()[0].read_back == "whole"
    Path(out, f"{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def jobs(root: str, shard_bytes: int, folder: Path) -> list[Row]:
    """What all ranks of such a job have sent, in processes of their own."""
    os.environ.setdefault("MASTER_PORT", "29471")
    mp.spawn(job, (root, shard_bytes, str(folder)), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return [row for rank in range(RANKS) for row in json.loads((folder / f"{rank}.json").read_text())]


# --- many votes ----------------------------------------------------------------------------------------------


async def commit(root: str, ranks: int) -> Row:
    """Rank 0's second save of so many ranks, whose votes are there when it looks first."""
    async with open_store(root) as store:
        start = (await starts.take(store, ranks)).start
        saver = roots.Saver(store=store, start=start, world_size=ranks).as_job(store)
        state = saver.writer()
        for number in (0, 1):
            await saver.votes(number, float(number))
            before, began = requests_of(store), time.monotonic()
            await saver.coordinate(state, number, float(number))
        after = requests_of(store)
        assert before is not None
        assert after is not None
        spent, seconds = after - before, time.monotonic() - began
    return {"what": f"{COMMIT}, {ranks} ranks", "rank": 0, "shard_bytes": 0, "seconds": round(seconds, 1), **spent.by_kind()}


# --- the table -----------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    kinds = list(Requests().by_kind())
    lines = [f"| what | rank | shard | {' | '.join(kinds)} | seconds |", f"|{'---|' * (len(kinds) + 4)}"]
    for row in rows:
        size = f"{row['shard_bytes'] // MIB} MiB"
        lines.append(
            f"| {row['what']} | {row['rank']} | {size} | {' | '.join(str(row[kind]) for kind in kinds)} | {row['seconds']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="URL of a bucket, or of a place in one")
    parser.add_argument("--shard-mib", type=int, nargs="*", default=[100, 1024], help="size of each rank's shard")
    parser.add_argument("--votes", type=int, nargs="*", default=[64, 512], help="ranks whose votes rank 0 reads")
    parser.add_argument("--dir", type=Path, required=True, help="an empty folder for the results")
    args = parser.parse_args()
    args.dir.mkdir(parents=True)
    place, rows = below(args.root, f"requests-{int(time.time())}"), list[Row]()
    for size in args.shard_mib:
        rows += jobs(below(place, f"{size}-mib"), size * MIB, args.dir)
    rows += [asyncio.run(commit(below(place, f"{votes}-votes"), votes)) for votes in args.votes]
    print(table(rows))


if __name__ == "__main__":
    main()
