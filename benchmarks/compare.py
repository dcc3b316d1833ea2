"""Measure checkpointd beside its peers, its costs by size, and end in one verdict for every goal. `make bench` runs this.

See benchmarks/README.md for what is measured and how, and benchmarks/goals.py for the goals.
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
from benchmarks.report import BIG, OURS, PEERS

if TYPE_CHECKING:
    from benchmarks.document import Run
    from benchmarks.launch import Setting
    from benchmarks.limits import Limits
    from benchmarks.measures import Trial

_GIB = 1 << 30
_HERE = Path(__file__).resolve().parent
_SCRIPTS = ("sharded", "zero", "calls", "overhead", "codec", "recovery", "objects")
"""Scripts that give figures with --figures; one that cannot leaves its goals unmeasured."""
_PARTS = ("peers", "big", "history", "ranks", *_SCRIPTS)
_REPEATED = {"sharded": ("--systems", "dcp-thread,checkpointd"), "zero": ("--ways", "stock;checkpointd, DeepSpeed's files")}
"""Scripts that repeat as often as the systems are measured, with what the goals compare. Their pages take more."""
_QUICK = ("peers", "history", "ranks")
_QUICK_SYSTEMS = ("torch.save", "dcp-thread", "torch-checkpointing-prewarmed", "checkpointd", "checkpointd-sidecar")
_RESULTS = environment.ROOT / "benchmarks" / "RESULTS.md"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state over all ranks")
    parser.add_argument("--big-gib", type=float, default=4.0, help="size of the state for first saves and first loads")
    parser.add_argument("--parts", help=f"what is measured, with commas (all: {','.join(_PARTS)})")
    parser.add_argument("--runs", type=int, default=7, help="times that every system is measured")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, with commas")
    parser.add_argument("--systems", help=f"with commas (all: {','.join((*PEERS, *OURS))})")
    parser.add_argument("--warm", type=int, default=2, help="quiet warm saves in each process")
    parser.add_argument("--gate", type=float, default=0.2, help="seconds of training between optimizer steps")
    parser.add_argument("--quiet", type=float, default=1.0, help="seconds of undisturbed steps before and after a save")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of the state")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--json", type=Path, metavar="OUT", help="keep every measurement there; go on if it has some already")
    parser.add_argument("--render", type=Path, metavar="IN", help="measure nothing: tables of an earlier --json")
    parser.add_argument("--write", action="store_true", help=f"write {_RESULTS.relative_to(environment.ROOT)} and speed.svg")
    parser.add_argument("--quick", action="store_true", help="a few minutes: 0.1 GiB, one run, few systems, small sizes")
    options = parser.parse_args(given)
    if options.quick:
        options.gib, options.runs, options.warm, options.ranks, options.quiet = 0.1, 1, 1, "1", 0.5
    options.systems = options.systems or ",".join(_QUICK_SYSTEMS if options.quick else (*PEERS, *OURS))
    options.parts = options.parts or ",".join(_QUICK if options.quick else _PARTS)
    return options


def main() -> int:
    """Run the benchmark; 1 where a system failed or loaded wrong bytes."""
    options = arguments()
    environment.enter()
    from benchmarks import document, goals  # torch exists from here on

    run = document.read(options.render) if options.render else measure(options)
    text = document.text(run)
    print("\n" + text)
    print("\n".join(goals.lines(goals.verdicts(document.figures_of(run)))))
    if options.write:
        _RESULTS.write_text(text)
        if run.trials:
            picture.write(text)
    return 1 if document.flaws(run) else 0


def measure(options: argparse.Namespace) -> Run:
    """All runs: the limits, then every system with every number of ranks in a new order; then the costs by size.

    Keeps what was measured after each trial, and leaves out what was kept.
    """
    from benchmarks.systems import is_available

    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(_PARTS)):
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(_PARTS)}")
    counts = [int(count) for count in options.ranks.split(",")]
    cases = [(system, count, options.gib) for system in _known(options.systems.split(",")) for count in counts]
    cases = cases if "peers" in parts else []
    if "big" in parts:
        cases += [(system, 1, options.big_gib) for system in _known(list(BIG)) if is_available(system)]
    largest = max((gib for _, _, gib in cases), default=0.0)
    free = shutil.disk_usage(options.dir).free
    if free < 8 * largest * _GIB:
        raise SystemExit(f"{options.dir} has {free / _GIB:.1f} GiB free; this needs {8 * largest:.1f}")
    run = _begun(options)
    with tempfile.TemporaryDirectory(prefix="checkpointd-bench-", dir=options.dir) as directory:
        for number in range(options.runs if cases else 0):
            if len(run.limits) == number:
                run.limits.append(_limits(_setting(options, Path(directory), options.gib)))
            if "big" in parts and len(run.big_limits) == number:
                run.big_limits.append(_limits(_setting(options, Path(directory), options.big_gib)))
                _keep(run, options.json)
            order = random.Random(options.seed * 1000 + number).sample(cases, len(cases))
            for place, (system, count, gib) in enumerate(order):
                trials = run.trials if gib == options.gib else run.big
                if not any((one.run, one.system, one.ranks) == (number, system, count) for one in trials):
                    trials.append(_trial(_setting(options, Path(directory), gib), options, number, place, system, count))
                    _keep(run, options.json)
        for part in ("history", "ranks", *_SCRIPTS):
            if part in parts and part not in run.parts and _script(options, Path(directory) / "out.json", part, run):
                run.parts.append(part)
                _keep(run, options.json)
    return run


def _begun(options: argparse.Namespace) -> Run:
    """The run that `--json` keeps, or a new one."""
    from benchmarks import document

    begun = document.Run(
        command=shlex.join(["benchmarks/compare.py", *sys.argv[1:]]),
        code=environment.code(),
        machine=document.machine(options.dir),
        gib=options.gib,
        gate_s=options.gate,
        big_gib=options.big_gib,
    )
    if options.json is None or not options.json.exists():
        return begun
    kept = document.read(options.json)
    if (kept.code, kept.gib, kept.gate_s, kept.big_gib) != (begun.code, begun.gib, begun.gate_s, begun.big_gib):
        raise SystemExit(
            f"{options.json} keeps measurements of other code or of other sizes, which are no run with new ones. Move the file "
            f"away to begin anew, or print its page: --render {options.json}"
        )
    return kept


def _keep(run: Run, path: Path | None) -> None:
    from benchmarks import document

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document.write(run, path)


def _script(options: argparse.Namespace, out: Path, part: str, run: Run) -> bool:
    """Add the costs of `history` or `ranks`, or the figures of another script, which each run in a process of their own."""
    from benchmarks import document, figures

    if part not in _SCRIPTS:
        write = ("--write",) if options.write else ()
        if not _ran(part, "--json", str(out), "--quick" if options.quick else "--full", "--dir", str(options.dir), *write):
            return False
        named = document.costs_of(json.loads(out.read_text()))
        run.costs.update({document.PARTS[name]: one for name, one in named.items()})
        run.others.update({f"{part}/{name}": {0: one} for name, one in _numbers(out).items()})
        return True
    repeated = ("--runs", str(options.runs), *_REPEATED[part]) if part in _REPEATED else ()
    if not _ran(part, "--figures", str(out), *repeated):
        return False
    run.others.update(figures.read(out))
    return True


def _numbers(out: Path) -> dict[str, float]:
    """The single numbers in what a script wrote."""
    return {name: float(value) for name, value in json.loads(out.read_text()).items() if isinstance(value, int | float)}


def _ran(part: str, option: str, *arguments: str) -> bool:
    """Whether the script of `part` ran to its end. DeepSpeed's runs where the project's own environment has DeepSpeed."""
    script = _HERE / f"{part}.py"
    if not script.exists() or f'"{option}"' not in script.read_text():
        print(f"{part} is not measured: benchmarks/{part}.py has no {option}", file=sys.stderr)
        return False
    python = sys.executable if part != "zero" else str(environment.ROOT / ".venv" / "bin" / "python")
    ended = subprocess.run([python, str(script), option, *arguments], check=False)
    if ended.returncode:
        print(f"{part} is not measured: benchmarks/{part}.py ended with {ended.returncode}", file=sys.stderr)
    return ended.returncode == 0


def _setting(options: argparse.Namespace, directory: Path, gib: float) -> Setting:
    from benchmarks.launch import Setting

    return Setting(
        directory=directory,
        target_bytes=int(gib * _GIB),
        warm_saves=options.warm if gib == options.gib else 1,
        gate_s=options.gate,
        quiet_s=options.quiet if gib == options.gib else 0.2,
        timeout_s=300 + 120 * gib,
    )


def _known(systems: list[str]) -> list[str]:
    from benchmarks.systems import SYSTEMS, installed

    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown:
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if not installed():
        print("checkpointd_client is not installed here: measuring the peers alone", file=sys.stderr)
        return [system for system in systems if system in PEERS]
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
