"""Measure what a save costs training while it runs, with `max_overhead` and without.

    python benchmarks/overhead.py --figures OUT

Each way of saving is a process of its own, in a new shuffled order for each run. Its loop steps a small optimizer, whose hook
the governor counts. The next save is far away, so a save may take its time. The last save runs beside a loop of pure Python:
the time in which that loop neither ran nor waited for a core is time in which another thread held the interpreter lock. On a
busy machine, trust the ratios, the CPU times and that time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import figures
from benchmarks.state import State
from benchmarks.training import PythonLoop, TrainingLoop, loop_times
from checkpointd.pipeline.write import compare, encode
from checkpointd_client import Checkpointer, SaveHandle
from checkpointd_client.staging import stager

GATE_S = 0.03
"""Seconds between two steps of the optimizer."""
WARM_SAVES = 3
"""Saves in which the governor finds its pace."""
QUIET_S = 1.0
SYSTEM_CALLS = ("open", "close", "pwrite", "preadv", "fsync", "fdatasync", "ftruncate", "link", "unlink", "rename", "stat")
"""Functions of `os` that release the interpreter lock."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to save."""

    system: str
    max_overhead: float | None

    @property
    def name(self) -> str:
        """As figures name it."""
        return f"{figures.OVERHEAD}{self.system}, {'full speed' if self.max_overhead is None else 'governed'}"


WAYS = tuple(
    Way(system=system, max_overhead=limit) for system in ("checkpointd", "checkpointd-sidecar") for limit in (None, 0.03)
)


class Lock:
    """What each of our threads has used of the CPU, and the part of it in calls that release the interpreter lock."""

    def __init__(self) -> None:
        self._free: dict[str, float] = defaultdict(float)
        for name in SYSTEM_CALLS:
            self._watch(os, name)
        for module in (encode, compare):
            self._watch(module, "xxh3_128")
        self._watch(encode, "xxh3_64")
        self._watch(encode, "encode_chunk")
        self._watch(stager, "copy_bits")

    def _watch(self, module: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(module, name)

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._free[_kind(threading.current_thread().name)] += time.thread_time() - began

        setattr(module, name, watched)

    def used(self) -> dict[str, float]:
        """CPU seconds in Python so far, and times that a thread gave up its core by itself, by kind of thread."""
        found: dict[str, float] = defaultdict(float)
        for thread in threading.enumerate():
            kind = _kind(thread.name)
            if thread.name.startswith("checkpointd") and thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                found[f"{kind}: in Python, ms"] += time.clock_gettime(clock) * 1e3
                found[f"{kind}: wake-ups"] += _wakeups(thread.native_id)
        for kind, free in self._free.items():
            if f"{kind}: wake-ups" in found:
                found[f"{kind}: in Python, ms"] -= free * 1e3
        return found


def _kind(thread: str) -> str:
    return thread.removeprefix("checkpointd-").partition("_")[0]


def _wakeups(thread: int | None) -> int:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def _for_a_core_s() -> float:
    """How long this thread has waited for a core."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


class Training:
    """The trainer of one trial."""

    def __init__(self, root: Path, options: argparse.Namespace, way: Way, socket: str | None) -> None:
        state = State(target_bytes=int(options.gib * (1 << 30)), ranks=1, rank=0, seed=options.seed)
        self._objects = {"model": state.model, "master": state.master, "optimizer": state.optimizer}
        self._loop, self._python = TrainingLoop(gate_s=GATE_S), PythonLoop(gate_s=GATE_S)
        self._weight = torch.nn.Parameter(torch.ones(8))
        self._weight.grad = torch.zeros(8)
        self._steps = torch.optim.SGD([self._weight], lr=0.1)
        self._gap_s, self._saves = options.gap, options.saves
        self._checkpointer = Checkpointer(
            root,
            max_overhead=way.max_overhead,
            sidecar=socket,
            on_sidecar_loss="raise",
            dedup=False,  # the state does not change, and everything is written nevertheless
            on_no_progress="ignore",
            read_back=False,
            retention=2,
        )
        self._checkpointer.load(self._objects)

    def measured(self) -> dict[str, float]:
        """All figures of this trial."""
        self._idle(self._loop, QUIET_S)
        for step in range(WARM_SAVES):
            self._beside(step, self._loop)
        quiet, busy, handles = list[float](), list[float](), list[SaveHandle]()
        for step in range(WARM_SAVES, WARM_SAVES + self._saves):
            handle, during, after = self._beside(step, self._loop)
            quiet, busy, handles = quiet + after, busy + during, [*handles, handle]
        times = loop_times(quiet, busy, 0.0)
        found = {
            "step over undisturbed": times.mean_ms / times.undisturbed_ms,
            "step p99 over undisturbed": times.p99_ms / times.undisturbed_p99_ms,
            "durable, s": statistics.median(handle.timings.durable_s or 0.0 for handle in handles),
            "steps waited, ms": statistics.median(handle.timings.fence_s for handle in handles) * 1e3,
            "rested, s": statistics.median(handle.timings.rested_s for handle in handles),
            "copy rested, ms": statistics.median(handle.timings.copy_rested_s for handle in handles) * 1e3,
        }
        found |= self._beside_python(WARM_SAVES + self._saves)
        self._checkpointer.close()
        return found

    def _beside(self, step: int, loop: TrainingLoop) -> tuple[SaveHandle, list[float], list[float]]:
        """A save under the loop; the seconds of steps beside it, and of steps after it until the next save is due."""
        ended, began = threading.Event(), time.monotonic()
        handle = self._checkpointer.save(step, self._objects)
        handle.when_done(ended.set)  # nobody waits for it, which would end its rests
        during = loop.until(ended, self._steps.step)
        handle.wait()
        return handle, during, self._idle(loop, max(QUIET_S, self._gap_s - (time.monotonic() - began)))

    def _idle(self, loop: TrainingLoop, seconds: float) -> list[float]:
        """Steps without a save in flight."""
        over = threading.Event()
        timer = threading.Timer(seconds, over.set)
        timer.start()
        steps = loop.until(over, self._steps.step)
        timer.join()
        return steps

    def _beside_python(self, step: int) -> dict[str, float]:
        """The use of the interpreter lock during a save beside a loop that holds it all the time."""
        lock = Lock()
        before, waited, cpu, began = lock.used(), _for_a_core_s(), time.thread_time(), time.perf_counter()
        self._beside_until(step)
        wall, cpu, waited = time.perf_counter() - began, time.thread_time() - cpu, _for_a_core_s() - waited
        used = {name: value - before.get(name, 0.0) for name, value in lock.used().items()}
        return {"waits for the lock, ms": max(0.0, wall - cpu - waited) * 1e3, **used}

    def _beside_until(self, step: int) -> None:
        ended = threading.Event()
        self._checkpointer.save(step, self._objects).when_done(ended.set)
        self._python.until(ended, self._steps.step)


def trial(options: argparse.Namespace, way: Way) -> dict[str, float]:
    """One trial in a process of its own, with a daemon if it needs one."""
    with tempfile.TemporaryDirectory(prefix="checkpointd-overhead-", dir=options.dir) as directory, ExitStack() as undo:
        root, socket = Path(directory).resolve() / "root", ""
        root.mkdir()
        if way.system == "checkpointd-sidecar":
            socket = f"{directory}/sidecar/socket"
            command = [sys.executable, "-m", "checkpointd", "serve", "--socket", socket, "--root", str(root)]
            command += ["--uid", str(os.geteuid())]  # root has to be named
            daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            undo.callback(daemon.wait)
            undo.callback(daemon.terminate)
            assert daemon.stdout is not None
            daemon.stdout.readline()  # "ready at ..."
        job = json.dumps({"way": asdict(way), "root": str(root), "socket": socket})
        arguments = ["--gib", str(options.gib), "--saves", str(options.saves), "--gap", str(options.gap)]
        command = [sys.executable, __file__, *arguments, "--seed", str(options.seed), "--trial", job]
        found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        return found


def measure(options: argparse.Namespace) -> figures.Figures:
    """All runs."""
    found: figures.Figures = defaultdict(dict)
    for run in range(options.runs):
        for way in random.Random(options.seed * 1000 + run).sample(WAYS, len(WAYS)):
            one = trial(options, way)
            print(f"run {run + 1}, {way.name}: " + ", ".join(f"{name} {value:.4g}" for name, value in one.items()), flush=True)
            for name, value in one.items():
                found[f"{way.name}/{name}"][run] = value
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="size of the state")
    parser.add_argument("--runs", type=int, default=3, help="times that every way is measured")
    parser.add_argument("--saves", type=int, default=4, help="measured saves in each process")
    parser.add_argument("--gap", type=float, default=8.0, help="seconds from one save to the next")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of the state")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write the figures there")
    parser.add_argument("--trial", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    if options.trial:
        job = options.trial
        print(json.dumps(Training(Path(job["root"]), options, Way(**job["way"]), job["socket"] or None).measured()))
        return
    found = measure(options)
    if options.figures:
        figures.write(options.figures, found)


if __name__ == "__main__":
    main()
