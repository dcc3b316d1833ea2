"""What a state costs by its number of tensors: the call of save() beside a copy, the first one of a process and later ones; the
time until the save is committed; and loads.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import figures
from benchmarks.state import State
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.staging.stager import StagingMode

EAGER: StagingMode = "eager"
LAZY: StagingMode = "lazy"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A state, how a step changes it, and the tensors whose copy the call is compared with: those that it must copy at once,
    or all of them.
    """

    name: str
    state: dict[str, object]
    change: Callable[[], object]
    compared: list[torch.Tensor]
    together: bool = False
    """Whether they are copied by one call of torch, not in a loop."""


def small_tensors(tensors: int, nbytes: int) -> Case:
    """A module with `tensors` parameters of `nbytes` in all, and its optimizer, which has no state."""
    net = torch.nn.Module()
    each = max(1, nbytes // 4 // tensors)
    for i in range(tensors):
        net.register_parameter(f"p{i}", torch.nn.Parameter(torch.full((each,), 1.0)))
    parameters: list[torch.Tensor] = list(net.parameters())

    def change() -> None:
        with torch.no_grad():
            torch._foreach_add_(parameters, 1.0)

    state = {"net": net, "optimizer": torch.optim.SGD(parameters, lr=0.1)}
    return Case(name=f"{tensors} tensors, {nbytes / (1 << 30):.2g} GiB", state=state, change=change, compared=parameters)


def training(nbytes: int) -> Case:
    """The 700 tensors of `state.py`. Its weights in bf16 belong to no optimizer, so save() must copy them at once."""
    made = State(target_bytes=nbytes, ranks=1, rank=0, seed=0)
    return Case(
        name=f"700 tensors with AdamW, {nbytes / (1 << 30):.2g} GiB",
        state={"model": made.model, "master": made.master, "optimizer": made.optimizer},
        change=made.advance,
        compared=list(made.model.parameters()),
        together=True,
    )


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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of wall and of CPU time of this thread. `committed` and `loads` are wall times alone."""

    first: tuple[float, float]
    copies: list[tuple[float, float]]
    calls: list[tuple[float, float]]
    committed: list[float]
    """From the beginning of each later call."""
    background: list[dict[str, float]]
    loads: list[float]


def measure(case: Case, mode: StagingMode, *, runs: int, prepare: bool, loads: int = 0) -> Costs:
    """Save `case` once, then `runs` times after one that does not count, each after a copy of the same bytes."""
    targets = [torch.zeros_like(tensor) for tensor in case.compared]

    def copy() -> None:
        with torch.no_grad():
            if case.together:
                torch._foreach_copy_(targets, case.compared)
            else:
                for target, source in zip(targets, case.compared, strict=True):
                    target.copy_(source)

    root, handles = tempfile.mkdtemp(prefix="calls-", dir="."), list[OwnHandle]()
    costs = Costs(first=(0.0, 0.0), copies=[], calls=[], committed=[], background=[], loads=[])
    try:
        with Checkpointer(root, staging=mode, compression="none", retention=2, read_back=False) as ckpt:
            if prepare:
                ckpt.prepare(case.state)
                thread = core_of(ckpt)._saver._prewarming
                if thread is not None:
                    thread.join()
            costs = replace(costs, first=seconds(lambda: ckpt.save(0, case.state)))
            core_of(ckpt).settle()
            for step in range(1, runs + 2):
                case.change()
                costs.copies.append(seconds(copy))
                before, began = cpu_s(), time.perf_counter()
                costs.calls.append(seconds(lambda step=step: handles.append(ckpt.save(step, case.state))))  # type: ignore[misc]
                handles[-1].wait()
                costs.committed.append(time.perf_counter() - began)
                core_of(ckpt).settle()
                costs.background.append({name: used - before.get(name, 0.0) for name, used in cpu_s().items()})
        for _ in range(loads):
            with Checkpointer(root, read_back=False) as ckpt:
                costs.loads.append(seconds(lambda: ckpt.load(case.state))[0])
    finally:
        shutil.rmtree(root)
    for measured in (costs.copies, costs.calls, costs.committed, costs.background):
        del measured[0]
    tell(f"{case.name}, {mode}{', prepared' if prepare else ''}", costs)
    return costs


def tell(name: str, costs: Costs) -> None:
    """Print the medians."""
    print(name)
    for i, kind in enumerate(("wall", "CPU")):
        copy, call = (statistics.median(one[i] for one in some) for some in (costs.copies, costs.calls))
        print(
            f"  {kind:4}: copies {copy:.4f} s; first call {costs.first[i]:.4f} s, {costs.first[i] / call:.2f} x later; "
            f"later calls {call:.4f} s, {call / copy:.2f} x the copies"
        )
    shares = {name: statistics.median(one.get(name, 0.0) for one in costs.background) for name in costs.background[-1]}
    print(f"  committed after {statistics.median(costs.committed):.3f} s; background", end=" ")
    print(", ".join(f"{name} {used:.3f}" for name, used in sorted(shares.items())))
    if costs.loads:
        print(f"  load {statistics.median(costs.loads):.3f} s")


def figures_of(gib: float, runs: int) -> figures.Figures:
    """What the goals for the costs of many tensors need."""
    nbytes = int(gib * (1 << 30))
    some = measure(training(nbytes), "lazy", runs=runs, prepare=True)
    many = small_tensors(10_000, nbytes)
    eager, lazy = (measure(many, mode, runs=runs, prepare=True) for mode in (EAGER, LAZY))
    del many
    most = measure(small_tensors(100_000, 100_000 << 10), "lazy", runs=runs, prepare=True, loads=runs)

    def of(values: Iterable[float]) -> dict[int, float]:
        return dict(enumerate(values))

    def walls(measured: list[tuple[float, float]]) -> list[float]:
        return [wall for wall, _ in measured]

    pairs = zip(walls(some.calls), walls(some.copies), strict=True)
    ratios = zip(walls(eager.calls), walls(eager.copies), strict=True)
    return {
        "calls/700/beyond the copy, ms": of((call - copy) * 1e3 for call, copy in pairs),
        "calls/10000/eager over memcpy": of(call / copy for call, copy in ratios),
        "calls/10000/lazy, ms": of(call * 1e3 for call in walls(lazy.calls)),
        "calls/100000/call, s": of(walls(most.calls)),
        "calls/100000/commit, s": of(most.committed),
        "calls/100000/load, s": of(most.loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--training", action="store_true", help="700 tensors with AdamW instead")
    parser.add_argument("--loads", type=int, default=0)
    parser.add_argument("--mode", choices=["eager", "lazy"], default="eager")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="measure what the goals need, and write it there")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    if arguments.figures:
        figures.write(arguments.figures, figures_of(arguments.gib, arguments.runs))
    else:
        nbytes = int(arguments.gib * (1 << 30))
        case = training(nbytes) if arguments.training else small_tensors(arguments.tensors, nbytes)
        measure(case, arguments.mode, runs=arguments.runs, prepare=arguments.prepare, loads=arguments.loads)


if __name__ == "__main__":
    main()
