"""Measure checkpointd beside its peers, and end in one table of ratios. `make bench` runs this.

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
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Not this folder, and the tree only behind the installed packages: what is measured is what is installed.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment, picture
from benchmarks.report import OURS, PEERS

if TYPE_CHECKING:
    from benchmarks.document import Run
    from benchmarks.launch import Setting
    from benchmarks.limits import Limits
    from benchmarks.measures import Trial

_GIB = 1 << 30
_RESULTS = environment.ROOT / "benchmarks" / "RESULTS.md"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state over all ranks")
    parser.add_argument("--runs", type=int, default=5, help="times that every system is measured")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, with commas")
    parser.add_argument("--systems", default=",".join((*PEERS, *OURS)), help="with commas")
    parser.add_argument("--warm", type=int, default=2, help="quiet warm saves in each process")
    parser.add_argument("--gate", type=float, default=0.2, help="seconds of training between optimizer steps")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of the state")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every measurement there")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: tables of an earlier --json")
    parser.add_argument("--write", action="store_true", help=f"write {_RESULTS.relative_to(environment.ROOT)} and speed.svg")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 0.1 GiB, one run")
    options = parser.parse_args(given)
    if options.quick:
        options.gib, options.runs = 0.1, 1
    return options


def main() -> int:
    """Run the benchmark; 1 where a system failed or loaded wrong bytes."""
    options = arguments()
    environment.enter()
    from benchmarks import document  # torch exists from here on

    run = document.read(options.render) if options.render else measure(options)
    if options.json:
        document.write(run, options.json)
    text = document.text(run)
    print("\n" + text)
    if options.write:
        _RESULTS.write_text(text)
        picture.write(text)
    return 1 if document.flaws(run) else 0


def measure(options: argparse.Namespace) -> Run:
    """All runs: the limits, then every system with every number of ranks in a new order."""
    from benchmarks import document

    systems = _known(options.systems.split(","))
    ranks = [int(count) for count in options.ranks.split(",")]
    free = shutil.disk_usage(options.dir).free
    if free < 8 * options.gib * _GIB:
        raise SystemExit(f"{options.dir} has {free / _GIB:.1f} GiB free; this needs {8 * options.gib:.1f}")
    limits: list[Limits] = []
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="checkpointd-bench-", dir=options.dir) as directory:
        setting = _setting(options, Path(directory))
        for run in range(options.runs):
            limits.append(_limits(setting))
            order = [(system, count) for system in systems for count in ranks]
            random.Random(options.seed * 1000 + run).shuffle(order)
            for place, (system, count) in enumerate(order):
                trials.append(_trial(setting, options, run, place, system, count))
    return document.Run(
        command=shlex.join(["benchmarks/compare.py", *sys.argv[1:]]),
        machine=document.machine(options.dir),
        gib=options.gib,
        gate_s=options.gate,
        limits=limits,
        trials=trials,
    )


def _setting(options: argparse.Namespace, directory: Path) -> Setting:
    from benchmarks.launch import Setting

    return Setting(
        directory=directory,
        target_bytes=int(options.gib * _GIB),
        warm_saves=options.warm,
        gate_s=options.gate,
        quiet_s=1.0,
        timeout_s=300 + 120 * options.gib,
    )


def _known(systems: list[str]) -> list[str]:
    from benchmarks.systems import SYSTEMS, installed

    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown:
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if not installed():
        print("checkpointd_client is not installed here: measuring the peers alone", file=sys.stderr)
        return [system for system in systems if system not in OURS]
    return systems


def _limits(setting: Setting) -> Limits:
    from benchmarks.limits import Limits

    script = Path(__file__).with_name("limits.py")
    command = [sys.executable, str(script), str(setting.directory), str(setting.target_bytes / _GIB)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    os.sync()
    return Limits(**json.loads(printed))


def _trial(setting: Setting, options: argparse.Namespace, run: int, place: int, system: str, ranks: int) -> Trial:
    from benchmarks import report
    from benchmarks.launch import run_trial

    trial = run_trial(setting, system=system, ranks=ranks, run=run, order=place, seed=options.seed)
    shown = (report.CALL, report.SAFE, report.DURABLE, report.LOST, report.LOAD_COLD)
    words = trial.error or ", ".join(f"{metric.title} {report.figure(metric.of(trial))}" for metric in shown)
    print(f"run {run + 1}, {ranks} rank(s), {system}: {words}; others {trial.other_cores:.2f} cores", flush=True)
    return trial


if __name__ == "__main__":
    sys.exit(main())
