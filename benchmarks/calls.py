"""What the call of save() costs, as a ratio to copying each tensor in a loop: the first call of a process, and later ones.

    python benchmarks/calls.py --tensors 400 --gib 1 --mode eager --prepare

Each later call follows a step that changes every tensor. Wall times mean little on a busy machine. The CPU times are those of
the training thread. `background` is the CPU time of each thread of checkpointd after the
call, in seconds per save.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import figures
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.staging.stager import StagingMode


def state_of(tensors: int, nbytes: int) -> tuple[dict[str, object], list[torch.Tensor]]:
    """A module with `tensors` parameters of `nbytes` in all, and its optimizer, which has no state."""
    net = torch.nn.Module()
    each = max(1, nbytes // 4 // tensors)
    for i in range(tensors):
        net.register_parameter(f"p{i}", torch.nn.Parameter(torch.full((each,), 1.0)))
    parameters: list[torch.Tensor] = list(net.parameters())
    return {"net": net, "optimizer": torch.optim.SGD(parameters, lr=0.1)}, parameters


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """How long `work` takes, and the CPU time of this thread."""
    began, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - began, time.thread_time() - cpu


def cpu_s() -> dict[str, float]:
    """The CPU seconds that each of our threads has used, by the name of the thread without its number."""
    used: dict[str, float] = {}
    for thread in threading.enumerate():
        name = thread.name.rpartition("_")[0] or thread.name
        if name.startswith("checkpointd") and thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            used[name] = used.get(name, 0.0) + time.clock_gettime(clock)
    return used


def measure(tensors: int, gib: float, mode: StagingMode, *, runs: int, prepare: bool) -> tuple[list[float], list[float]]:
    """Print the costs; returns seconds of each later call, and of the copies in a loop before it."""
    state, parameters = state_of(tensors, int(gib * (1 << 30)))
    copies = [torch.zeros_like(p) for p in parameters]

    def copy() -> None:
        with torch.no_grad():
            for target, source in zip(copies, parameters, strict=True):
                target.copy_(source)

    def change() -> None:
        with torch.no_grad():
            torch._foreach_add_(parameters, 1.0)

    root = tempfile.mkdtemp(prefix="calls-", dir=".")
    loops, calls, background = list[tuple[float, float]](), list[tuple[float, float]](), list[dict[str, float]]()
    try:
        with Checkpointer(root, staging=mode, compression="none", retention=2, read_back=False) as ckpt:
            if prepare:
                ckpt.prepare(state)
                thread = core_of(ckpt)._saver._prewarming
                if thread is not None:
                    thread.join()
            first = seconds(lambda: ckpt.save(0, state))
            core_of(ckpt).settle()
            for step in range(1, runs + 2):
                change()
                loops.append(seconds(copy))
                before = cpu_s()
                calls.append(seconds(lambda step=step: ckpt.save(step, state)))  # type: ignore[misc]
                core_of(ckpt).settle()
                background.append({name: used - before.get(name, 0.0) for name, used in cpu_s().items()})
    finally:
        shutil.rmtree(root)
    print(f"{tensors} tensors, {gib:g} GiB, {mode}{', prepared' if prepare else ''}")
    for i, kind in enumerate(("wall", "CPU")):
        loop, call = (statistics.median(one[i] for one in some[1:]) for some in (loops, calls))
        print(
            f"  {kind:4}: copies in a loop {loop:.4f} s; first call {first[i]:.4f} s, {first[i] / call:.2f} x later; "
            f"later calls {call:.4f} s, {call / loop:.2f} x the loop"
        )
    shares = {name: statistics.median(one.get(name, 0.0) for one in background[1:]) for name in background[-1]}
    print("  background " + ", ".join(f"{name} {used:.3f}" for name, used in sorted(shares.items())))
    return [wall for wall, _ in calls[1:]], [wall for wall, _ in loops[1:]]


def figures_of(gib: float, runs: int) -> figures.Figures:
    """What the goals for calls of 10,000 tensors need."""
    eager, loops = measure(10_000, gib, "eager", runs=runs, prepare=True)
    lazy, _ = measure(10_000, gib, "lazy", runs=runs, prepare=True)
    return {
        "calls/10000/eager over memcpy": {run: call / loop for run, (call, loop) in enumerate(zip(eager, loops, strict=True))},
        "calls/10000/lazy, ms": {run: call * 1e3 for run, call in enumerate(lazy)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--mode", choices=["eager", "lazy"], default="eager")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="measure what the goals need, and write it there")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    if arguments.figures:
        figures.write(arguments.figures, figures_of(arguments.gib, arguments.runs))
    else:
        measure(arguments.tensors, arguments.gib, arguments.mode, runs=arguments.runs, prepare=arguments.prepare)


if __name__ == "__main__":
    main()
