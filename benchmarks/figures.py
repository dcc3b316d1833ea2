"""Everything that was measured, as numbers by name and run. Pure.

A name says what was measured on what, as `1/checkpointd/load, cached`: one rank, the system, the column of RESULTS.md.
`goals.py` computes its verdicts from these names, so a benchmark of any kind takes part by giving its numbers names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import costs, curves, report
from benchmarks.costs import Cost
from benchmarks.limits import Limits
from benchmarks.measures import ShardTrial, Trial

Figures = dict[str, dict[int, float]]
"""By name and run. Measurements that are not repeated with the others are of run 0."""

MEMCPY = "limit/memcpy"
"""Seconds per GiB: a copy into memory in use, and the faster way to read files that are not cached."""
OVERHEAD = "overhead/"
"""How figures of `overhead.py` begin: then the way to save, a slash, and what was measured."""
COUNTS = ("seconds", "cpu_s", "fsyncs", "stats", "listings", "opened", "read_bytes", "peak_bytes")


def joined(parts: Iterable[Figures]) -> Figures:
    """All of `parts`, whose names differ."""
    return {name: values for part in parts for name, values in part.items()}


def of_trials(trials: Iterable[Trial], prefix: str = "") -> Figures:
    """Every metric of every trial that did not fail: `<ranks>/<system>/<title>`."""
    found: Figures = {}
    for trial in trials:
        for metric in () if trial.error else report.METRICS:
            found.setdefault(f"{prefix}{trial.ranks}/{trial.system}/{metric.title}", {})[trial.run] = metric.of(trial)
    return found


def of_limits(limits: Sequence[Limits], prefix: str = "") -> Figures:
    """The limits of the machine in each run."""
    return {f"{prefix}{MEMCPY}": {run: one.memcpy_reused for run, one in enumerate(limits)}}


def of_costs(prefix: str, found: Sequence[Cost]) -> Figures:
    """`<prefix>/<operation>/<size>/<count>`, and `<prefix>/<operation>/exponent/<count>`."""
    named: Figures = {}
    for cost in found:
        for count in COUNTS:
            named[f"{prefix}/{cost.name}/{cost.size}/{count}"] = {0: float(getattr(cost, count))}
    for name in costs.names(found):
        for count in COUNTS:
            exponent = curves.exponent(costs.points(found, name, count))
            if exponent is not None:
                named[f"{prefix}/{name}/exponent/{count}"] = {0: exponent}
    return named


def of_shards(trials: Iterable[ShardTrial]) -> Figures:
    """Loads of what two ranks saved under FSDP2: `fsdp2/<ranks>/<system>/load, dropped` and `.../load, cached`."""
    found: Figures = {}
    for trial in trials:
        for load in trial.loads:
            if load.times and not load.error:
                place = f"fsdp2/{load.ranks}/{trial.system}/load"
                found.setdefault(f"{place}, dropped", {})[trial.run] = max(times.cold_s for times in load.times)
                found.setdefault(f"{place}, cached", {})[trial.run] = max(times.cached_s for times in load.times)
    return found


def read(path: Path) -> Figures:
    """What a script wrote with `--figures`: for each name the values by run, or a list of them."""
    data: dict[str, dict[str, float] | list[float]] = json.loads(path.read_text())
    return {
        name: dict(enumerate(values)) if isinstance(values, list) else {int(run): value for run, value in values.items()}
        for name, values in data.items()
    }


def write(path: Path, found: Figures) -> None:
    """Write figures as `read` takes them."""
    path.write_text(json.dumps(found, indent=1) + "\n")
