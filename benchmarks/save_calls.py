"""The system calls of one save on a disk, by rank, as strace counts them: with and without rules that remove old checkpoints.

    python benchmarks/save_calls.py                            # this tree
    python benchmarks/save_calls.py --before OTHER/bin/python  # beside another installation, which runs the same job

Two ranks train a small module under DDP and save it at every step. Each case runs twice, with few saves and with many; the
difference, by the saves between the two, is what one save costs. Nothing but the public API is used, so any installation of
checkpointd can be measured.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS = ("fsync", "linkat", "unlinkat", "openat", "getdents64", "newfstatat", "mkdirat")
RANKS, FEW, MANY = 2, 5, 25
KEEPS = (0, 3)
"""The numbers of checkpoints that the rules keep; 0: all."""

JOB = """
import sys
import torch
import torch.distributed as dist
from checkpointd_client import Checkpointer

root, saves, keeps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
torch.manual_seed(0)
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.Adam(module.parameters())
state = {"module": module, "optimizer": optimizer}
with Checkpointer(root, **({"retention": keeps} if keeps else {})) as ckpt:
    ckpt.load(state)
    for step in range(saves):
        module(torch.randn(2, 100)).sum().backward()
        optimizer.step()
        ckpt.save(step, state).wait()
dist.destroy_process_group()
"""


def counts(python: str, saves: int, keeps: int, folder: Path) -> list[dict[str, int]]:
    """The calls of each rank of a job with so many saves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = folder / "job.py"
    job.write_text(JOB)
    root = folder / f"root-{saves}-{keeps}"
    running = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        traced = ["strace", "-f", "-c", "-o", str(folder / f"calls-{rank}")]
        asked = [python, str(job), str(root), str(saves), str(keeps)]
        command, environment = traced + asked, {**os.environ, **place}
        running.append(subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True))
    for one in running:
        _, said = one.communicate(timeout=600)
        if one.returncode:
            raise SystemExit(f"a rank failed under {python}:\n{said}")
    return [_read(folder / f"calls-{rank}") for rank in range(RANKS)]


def _read(summary: Path) -> dict[str, int]:
    """The counts in the summary of `strace -c`: seconds in the second column, calls in the fourth, the name in the last."""
    found = dict.fromkeys(CALLS, 0)
    for words in map(str.split, summary.read_text().splitlines()):
        if len(words) >= 5 and words[-1] in found:
            found[words[-1]] = int(words[3])
    return found


def per_save(python: str, keeps: int) -> list[dict[str, float]]:
    """The calls of one save, for each rank."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        few, many = (counts(python, saves, keeps, Path(folder).resolve()) for saves in (FEW, MANY))
    return [{name: (many[rank][name] - few[rank][name]) / (MANY - FEW) for name in CALLS} for rank in range(RANKS)]


def table(columns: dict[str, str]) -> str:
    """A row for each rank, rule and installation. `columns`: the interpreter of each installation, by its name."""
    lines = [f"| rank | keeps | checkpointd | {' | '.join(CALLS)} |", f"|---|---|---|{'---:|' * len(CALLS)}"]
    for keeps in KEEPS:
        found = {name: per_save(python, keeps) for name, python in columns.items()}
        for rank in range(RANKS):
            for name, ranks in found.items():
                cells = " | ".join(f"{ranks[rank][call]:.1f}" for call in CALLS)
                lines.append(f"| {rank} | {keeps or 'all'} | {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="the interpreter of another installation of checkpointd")
    args = parser.parse_args()
    print(table(({"before": args.before} if args.before else {}) | {"now": sys.executable}))


if __name__ == "__main__":
    main()
