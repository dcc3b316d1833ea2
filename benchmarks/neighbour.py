"""Measure what persisting costs a training loop that uses every core, and what the sidecar's manners save of it.

See benchmarks/README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Not this folder, and the tree only behind the installed packages: what is measured is what is installed.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment

if TYPE_CHECKING:
    from benchmarks.neighbour_page import BesideSave, Mode, NeighbourRun, NeighbourTrial

_GIB = 1 << 30
_RESULTS = environment.ROOT / "benchmarks" / "NEIGHBOUR.md"
_TRIAL_S = 300.0


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--runs", type=int, default=5, help="times that every way is measured")
    parser.add_argument("--saves", type=int, default=3, help="saves under the loop in each process")
    parser.add_argument("--limit-mib", type=int, default=100, help="the bandwidth limit, in MiB per second")
    parser.add_argument("--compression", default="planes", help="planes and zstd want a core; auto may not")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of the state")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every measurement there")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: the page of an earlier --json")
    parser.add_argument("--write", action="store_true", help=f"write {_RESULTS.relative_to(environment.ROOT)}")
    parser.add_argument("--in-place", action="store_true", help="use the environment of this Python, not .bench-venv")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> int:
    """Run the benchmark; 1 where a trial failed."""
    options = arguments()
    if options.trial:
        return _be_the_trainer(options.trial)
    if not options.in_place:
        environment.enter()
    from benchmarks import neighbour_page  # torch exists from here on

    run = neighbour_page.run_of(json.loads(options.render.read_text())) if options.render else measure(options)
    if options.json:
        options.json.write_text(json.dumps(asdict(run), indent=1) + "\n")
    text = neighbour_page.text(run)
    print("\n" + text)
    if options.write:
        _RESULTS.write_text(text)
    return 1 if any(trial.error for trial in run.trials) else 0


def _be_the_trainer(job: str) -> int:
    from benchmarks.neighbour_loop import NeighbourJob, measure

    print(json.dumps(measure(NeighbourJob(**json.loads(job)))))
    return 0


def measure(options: argparse.Namespace) -> NeighbourRun:
    """All runs: every way once in a new order."""
    from benchmarks import document
    from benchmarks.neighbour_page import NeighbourRun, modes

    free = shutil.disk_usage(options.dir).free
    needed = options.gib * (options.saves + 3)
    if free < needed * _GIB:
        raise SystemExit(f"{options.dir} has {free / _GIB:.1f} GiB free; this needs {needed:.1f}")
    ways = modes(cores=_cores(), limit_mib=options.limit_mib)
    trials: list[NeighbourTrial] = []
    for run in range(options.runs):
        order = list(ways)
        random.Random(options.seed * 1000 + run).shuffle(order)
        trials += [_trial(options, mode, run, place) for place, mode in enumerate(order)]
    return NeighbourRun(
        command=shlex.join(["benchmarks/neighbour.py", *sys.argv[1:]]),
        machine=document.machine(options.dir),
        gib=options.gib,
        compression=options.compression,
        scheduler=_scheduler(options.dir),
        modes=[mode.name for mode in ways],
        trials=trials,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _scheduler(directory: Path) -> str:
    """The I/O scheduler of the disk behind `directory`, as the kernel names it."""
    device = os.stat(directory).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for place in (block, block.parent):
        found = place / "queue" / "scheduler"
        if found.exists():
            return found.read_text().strip().partition("[")[2].partition("]")[0] or found.read_text().strip()
    return "unknown"


# --- one trial ---------------------------------------------------------------------------------------------------


def _trial(options: argparse.Namespace, mode: Mode, run: int, place: int) -> NeighbourTrial:
    """One way once; an error becomes the trial's `error`."""
    from benchmarks import neighbour_page as page

    saves: list[page.BesideSave] = []
    error, start, others = "", time.monotonic(), _others_seconds()
    with tempfile.TemporaryDirectory(prefix="checkpointd-neighbour-", dir=options.dir) as directory:
        root = Path(directory).resolve() / "data"
        root.mkdir()
        try:
            with _daemon(mode, root) as (socket, pid):
                saves = _trained(options, mode, root, socket, pid)
        except (RuntimeError, subprocess.SubprocessError) as failure:
            error = str(failure)
    other_cores = max(0.0, (_others_seconds() - others) / (time.monotonic() - start))
    os.sync()  # the freed blocks are discarded now, and not during the next trial
    trial = page.NeighbourTrial(mode=mode.name, run=run, order=place, saves=saves, other_cores=other_cores, error=error)
    words = error or ", ".join(f"{title} {page.of_trial(trial, figure):.3g}" for title, figure in page.COLUMNS)
    print(f"run {run + 1}, {mode.name}: {words}", flush=True)
    return trial


def _others_seconds() -> float:
    from benchmarks import processes

    return processes.busy_seconds() - processes.own_seconds()


def _trained(options: argparse.Namespace, mode: Mode, root: Path, socket: str, pid: int) -> list[BesideSave]:
    from benchmarks.neighbour_loop import NeighbourJob
    from benchmarks.neighbour_page import saves_of

    job = NeighbourJob(
        root=str(root),
        saves=options.saves,
        socket=socket,
        daemon_pid=pid,
        saving=mode.saves,
        compression=options.compression,
        target_bytes=int(options.gib * _GIB),
        threads=_cores(),
        seed=options.seed,
    )
    command = [sys.executable, __file__, "--trial", json.dumps(asdict(job))]
    environ = {**os.environ, "OMP_NUM_THREADS": str(_cores())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TRIAL_S, env=environ)
    if done.returncode:
        raise RuntimeError(f"the trainer ended with {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    return saves_of(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def _daemon(mode: Mode, root: Path) -> Iterator[tuple[str, int]]:
    """The sidecar of `mode`, ready: its socket and process id; ("", 0) where it has none."""
    if not mode.sidecar:
        yield "", 0
        return
    with tempfile.TemporaryDirectory(prefix="checkpointd-") as directory:
        socket = f"{directory}/sock"
        command = [sys.executable, "-m", "checkpointd", "serve", "--socket", socket, "--root", str(root), *mode.serve]
        command += ["--uid", str(os.geteuid())]  # root has to be named
        with open(f"{directory}/log", "w+") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                assert process.stdout is not None
                if not process.stdout.readline().startswith("ready at"):
                    log.seek(0)
                    raise RuntimeError(f"the sidecar did not start: {log.read().strip()[-300:]}")
                yield socket, process.pid
            finally:
                process.terminate()
                process.communicate(timeout=_TRIAL_S)


if __name__ == "__main__":
    sys.exit(main())
