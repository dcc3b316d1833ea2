"""What reading a checkpoint back costs the training that goes on beside it.

    python benchmarks/readback.py --write

A trial: a process saves, waits for the commit, and then steps (`training.py`) while the checkpoint is read back from the disk,
past the page cache; and as long again afterwards, while nothing is read. Every trial is a fresh process; loops are shuffled in
each run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import document, report

LOOPS = ("products", "Python")
HERE = Path(__file__).resolve().parent
REST_S = 2.0
LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One checkpoint read back. Seconds; steps in milliseconds; `lost_s` is training that the reading cost, `control_s` what is
    counted as lost in a window as long in which nothing was read; `cpu_s` is what all threads but the training's have used.
    """

    loop: str
    run: int
    nbytes: int
    window_s: float
    lost_s: float
    control_s: float
    cpu_s: float
    quiet_ms: float
    busy_ms: float
    p99_ratio: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write benchmarks/READBACK.md")
    parser.add_argument("--trial", nargs=3, metavar=("LOOP", "RUN", "ROOT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.trial:
        loop, run, root = options.trial
        print(json.dumps(asdict(measured(options, loop, int(run), root))))
        return 0
    shuffled, found = random.Random(options.seed), []
    for run in range(options.runs):
        for loop in shuffled.sample(LOOPS, len(LOOPS)):
            found.append(trial(options, loop, run))
            print(json.dumps(asdict(found[-1])), flush=True)
    text = page(options, found)
    print(text)
    if options.write:
        (HERE / "READBACK.md").write_text(text)
    return 0


def trial(options: argparse.Namespace, loop: str, run: int) -> Reading:
    folder = Path(tempfile.mkdtemp(prefix="checkpointd-readback-", dir=options.dir))
    try:
        command = [sys.executable, __file__, "--mib", str(options.mib), "--trial", loop, str(run), str(folder / "root")]
        return Reading(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
    finally:
        shutil.rmtree(folder)


def measured(options: argparse.Namespace, name: str, run: int, root: str) -> Reading:
    import torch

    from benchmarks.training import PythonLoop, TrainingLoop, loop_times
    from checkpointd.pipeline.read.readback import QUIET_S
    from checkpointd_client import Checkpointer

    torch.set_num_threads(1)
    state = {"weights": torch.randn(options.mib << 18)}
    loop = (TrainingLoop if name == "products" else PythonLoop)(gate_s=1.0)
    with Checkpointer(root, compression="none", dedup=False) as ckpt:
        quiet = loop.undisturbed(REST_S)
        ckpt.save(1, state).wait()
        time.sleep(QUIET_S)  # then reading begins
        began, cpu_began, done = time.perf_counter(), beside_training_s(), threading.Event()
        threading.Thread(target=lambda: (_wait_until(lambda: ckpt.list()[0].read_back == "whole"), done.set())).start()
        busy = loop.until(done, lambda: None)
        window_s, cpu_s = time.perf_counter() - began, beside_training_s() - cpu_began
        began = time.perf_counter()
        alone = loop.undisturbed(window_s)
        control_s = time.perf_counter() - began
    reading, control = loop_times([*quiet, *alone], busy, window_s), loop_times(quiet, alone, control_s)
    return Reading(
        loop=name,
        run=run,
        nbytes=options.mib << 20,
        window_s=window_s,
        lost_s=reading.lost_s,
        control_s=control.lost_s,
        cpu_s=cpu_s,
        quiet_ms=control.mean_ms,
        busy_ms=reading.mean_ms,
        p99_ratio=reading.p99_ms / control.p99_ms,
    )


def beside_training_s() -> float:
    """CPU seconds of all threads of this process but the calling one, which trains. Other programs do not change them."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_THREAD)]
    every, own = (usage.ru_utime + usage.ru_stime for usage in spent)
    return every - own


def _wait_until(condition: object) -> None:
    assert callable(condition)
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the checkpoint was not read back")
        time.sleep(0.1)


def page(options: argparse.Namespace, found: list[Reading]) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(options.dir).items())
    rows = []
    for loop in LOOPS:
        ours = [one for one in found if one.loop == loop]
        rows.append(
            [
                loop,
                str(report.spread(one.window_s / one.nbytes * report.GIB for one in ours)),
                str(report.spread(one.cpu_s / one.nbytes * report.GIB for one in ours)),
                str(report.spread(one.lost_s / one.nbytes * report.GIB for one in ours)),
                str(report.spread(one.control_s / one.nbytes * report.GIB for one in ours)),
                str(report.spread(one.busy_ms / one.quiet_ms for one in ours)),
                str(report.spread(one.p99_ratio for one in ours)),
            ]
        )
    head = [
        "steps of",
        "read back, s/GiB",
        "CPU, s/GiB",
        "lost, s/GiB",
        "lost unread, s/GiB",
        "step / undisturbed",
        "p99 / undisturbed",
    ]
    return f"""# Reading back

This page shows what reading checkpoints back costs training.
`python benchmarks/readback.py --mib {options.mib} --runs {options.runs} --write` writes it; do not edit it by hand.

Machine: {facts}; load average at the end {os.getloadavg()[1]:.0f}.

One rank, {options.mib} MiB, {options.runs} runs, loops shuffled in each; the median, and in brackets the smallest and the
largest. *Read back* is the time from the first byte to the record, which is long on purpose: at most a quarter of it goes
into reading. *CPU* is the processor time of the threads beside the training. *Lost* is training time: the time of reading
back, less the undisturbed time of the steps done in it (measured just before and just after). *Lost unread* is the same for an
equally long time in which nothing is read; it shows the noise. The ratios are taken within one run.

{report.table(head, rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
