"""FSDP2 on two ranks: saving, and loading on two and on other numbers of ranks, beside the peers.

    python benchmarks/sharded.py --write        # writes SHARDED.md

See benchmarks/README.md for the words and the method, and SHARDED.md for what is particular here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Not this folder, and the tree only behind the installed packages: what is measured is what is installed.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment

if TYPE_CHECKING:
    from benchmarks.measures import ShardTrial, WorldLoad
    from benchmarks.sharded_page import ShardRun
    from benchmarks.sharded_rank import Job

_GIB = 1 << 30
_RANKS = 2
_PAGE = environment.ROOT / "benchmarks" / "SHARDED.md"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state over all ranks (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="times that every system is measured (default: %(default)s)")
    parser.add_argument("--worlds", default="2,1,3", help="numbers of ranks that load (default: %(default)s)")
    parser.add_argument("--systems", help="with commas (default: all)")
    parser.add_argument("--warm", type=int, default=2, help="quiet warm saves in each process (default: %(default)s)")
    parser.add_argument("--gate", type=float, default=0.2, help="seconds between optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of the state (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every measurement there")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write what the goals need there")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: the page of an earlier --json")
    parser.add_argument("--write", action="store_true", help="write benchmarks/SHARDED.md")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 0.05 GiB, one run")
    options = parser.parse_args(given)
    if options.quick:
        options.gib, options.runs = 0.05, 1
    return options


def main() -> int:
    """Run the benchmark; 1 where a system failed or loaded wrong bytes."""
    options = arguments()
    environment.enter()
    from benchmarks import figures, sharded_page  # torch exists from here on

    run = sharded_page.read(options.render) if options.render else measure(options)
    if options.json:
        options.json.write_text(json.dumps(asdict(run), indent=1) + "\n")
    if options.figures:
        figures.write(options.figures, figures.of_shards(run.trials))
    text = sharded_page.text(run)
    print("\n" + text)
    if options.write:
        _PAGE.write_text(text)
    return 1 if sharded_page.flaws(run) else 0


def measure(options: argparse.Namespace) -> ShardRun:
    """Every system, in a new order for each run."""
    from benchmarks import document
    from benchmarks.sharded_page import ShardRun

    systems = _known(options.systems)
    worlds = [int(count) for count in options.worlds.split(",")]
    free = shutil.disk_usage(options.dir).free
    if free < 8 * options.gib * _GIB:
        raise SystemExit(f"{options.dir} has {free / _GIB:.1f} GiB free; this needs {8 * options.gib:.1f}")
    started = time.monotonic()
    trials: list[ShardTrial] = []
    for run in range(options.runs):
        order = random.Random(options.seed * 1000 + run).sample(systems, len(systems))
        for place, system in enumerate(order):
            trials.append(_trial(options, system, run, place, worlds))
            print(_words(trials[-1]), flush=True)
    return ShardRun(
        command=shlex.join(["python", "benchmarks/sharded.py", *sys.argv[1:]]),
        machine=document.machine(options.dir),
        gib=options.gib,
        minutes=(time.monotonic() - started) / 60,
        trials=trials,
    )


def _known(wanted: str | None) -> list[str]:
    from benchmarks.sharded_systems import SYSTEMS

    systems = wanted.split(",") if wanted else list(SYSTEMS)
    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown:
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return systems


def _trial(options: argparse.Namespace, system: str, run: int, place: int, worlds: list[int]) -> ShardTrial:
    """One system once; an error becomes the trial's `error`, or that of one load, never an exception."""
    from benchmarks.launch import others_seconds
    from benchmarks.measures import ShardTrial, shard_report
    from benchmarks.sharded_systems import SYSTEMS

    folder = Path(tempfile.mkdtemp(prefix=f"checkpointd-sharded-{system}-", dir=options.dir))
    (folder / "data").mkdir()
    start, others = time.monotonic(), others_seconds()
    reports, loads, peaks, error = [], [], {}, ""
    try:
        found, peaks = _run(options, folder, system, _RANKS, loads=False)
        reports = [shard_report(data) for data in found]
        able = [ranks for ranks in worlds if ranks == _RANKS or SYSTEMS[system].reshards]
        loads = [_load(options, folder, system, ranks) for ranks in able]
    except RuntimeError as failure:
        error = str(failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # the freed blocks are discarded now, and not during the next trial
    return ShardTrial(
        system=system,
        run=run,
        order=place,
        other_cores=max(0.0, (others_seconds() - others) / (time.monotonic() - start)),
        reports=reports,
        loads=loads,
        save_peak_bytes=peaks.get("save", 0),
        error=error,
    )


def _load(options: argparse.Namespace, folder: Path, system: str, ranks: int) -> WorldLoad:
    from benchmarks.measures import LoadTimes, WorldLoad

    try:
        found, _ = _run(options, folder, system, ranks, loads=True)
    except RuntimeError as failure:
        return WorldLoad(ranks=ranks, times=[], error=str(failure))
    return WorldLoad(ranks=ranks, times=[LoadTimes(**data) for data in found])


def _run(
    options: argparse.Namespace, folder: Path, system: str, ranks: int, *, loads: bool
) -> tuple[list[dict[str, object]], dict[str, int]]:
    """Start the ranks of one job; what each reports, and the largest memory of each phase."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed passes it on, but untyped

    from benchmarks.launch import Ranks

    # As torchrun does it: the store lives outside the ranks, and the system picks its port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [_job(options, folder, system, rank, ranks, loads=loads) for rank in range(ranks)]
    with Ranks(jobs, folder, store.port) as running:
        peaks = running.watch(timeout_s=300 + 120 * options.gib)
    return [json.loads(Path(job.result).read_text()) for job in jobs], peaks


def _job(options: argparse.Namespace, folder: Path, system: str, rank: int, ranks: int, *, loads: bool) -> Job:
    from benchmarks.sharded_rank import Job

    return Job(
        system=system,
        root=str(folder / "data"),
        result=str(folder / f"report{rank}.json"),
        digests=str(folder / "digests.json"),
        loads=loads,
        rank=rank,
        ranks=ranks,
        target_bytes=int(options.gib * _GIB),
        warm_saves=options.warm,
        gate_s=options.gate,
        quiet_s=1.0,
        seed=options.seed,
    )


def _words(trial: ShardTrial) -> str:
    from benchmarks import report
    from benchmarks.sharded_page import load_words

    shown = (report.CALL, report.SAFE, report.DURABLE, report.LOST)
    saved = ", ".join(f"{metric.title} {report.figure(metric.of(trial))}" for metric in shown) if trial.reports else ""
    loaded = "; ".join(f"on {load.ranks}: {load_words(load)}" for load in trial.loads)
    return f"run {trial.run + 1}, {trial.system}: {trial.error or f'{saved}; {loaded}'}; others {trial.other_cores:.2f} cores"


if __name__ == "__main__":
    sys.exit(main())
