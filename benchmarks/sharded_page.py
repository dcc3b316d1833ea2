"""A run of `sharded.py` as JSON, and as the page that benchmarks/SHARDED.md is. Nothing is measured here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measures import ShardTrial, WorldLoad, shard_trial
from benchmarks.report import Metric, Results

SAVES = (report.CALL, report.SAFE, report.DURABLE, report.LOST, report.CPU, report.MEMORY, report.STORED)
COLD = (report.COLD_CALL, report.COLD_SAFE, report.COLD_DURABLE)
RATIOS = (report.CALL, report.SAFE, report.DURABLE, report.LOST, report.COLD_DURABLE, report.CPU, report.MEMORY)


@dataclass(frozen=True, kw_only=True)
class ShardRun:
    """Everything that one run of the benchmark measured."""

    command: str
    machine: dict[str, str]
    gib: float
    minutes: float
    trials: list[ShardTrial]


def read(path: Path) -> ShardRun:
    """A run that `--json` kept."""
    data: dict[str, Any] = json.loads(path.read_text())
    return ShardRun(**{**data, "trials": [shard_trial(one) for one in data["trials"]]})


def load_words(load: WorldLoad) -> str:
    """One load in a few words: seconds with the cache dropped and filled, or what went wrong."""
    wrong = {name for times in load.times for name in times.wrong}
    if load.error or wrong:
        return load.error or f"WRONG BYTES in {len(wrong)} tensors"
    cold, cached = (max(pick) for pick in zip(*((one.cold_s, one.cached_s) for one in load.times), strict=True))
    return f"{report.figure(cold)} dropped, {report.figure(cached)} cached"


def flaws(run: ShardRun) -> list[str]:
    """One line for each trial or load that failed, or gave back other bytes than were saved."""
    lines = []
    for trial in run.trials:
        where = f"{trial.system}, run {trial.run + 1}"
        lines += [f"{where}: {trial.error}"] if trial.error else []
        bad = [load for load in trial.loads if load.error or any(times.wrong for times in load.times)]
        lines += [f"{where}, loading on {load.ranks} rank(s): {load_words(load)}" for load in bad]
    return lines


def text(run: ShardRun) -> str:
    """The page."""
    results = _results(run)
    parts = [_opening(run), *_saves(results), *_loads(results, _worlds(run)), *_ratios(results, _worlds(run)), _notes(run)]
    return "\n\n".join(parts) + "\n"


def _results(run: ShardRun) -> Results:
    from benchmarks.sharded_systems import SYSTEMS

    good: Any = tuple(
        trial for trial in run.trials if not trial.error
    )  # metrics of saves look at `reports`, as those of a Trial
    measured = {trial.system for trial in good}
    return Results(2, tuple(system for system in SYSTEMS if system in measured), good)


def _worlds(run: ShardRun) -> list[int]:
    return list(dict.fromkeys(load.ranks for trial in run.trials for load in trial.loads))


def _opening(run: ShardRun) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    first = next((trial.reports[0] for trial in run.trials if trial.reports), None)
    runs = len({trial.run for trial in run.trials})
    tensors = first.tensors if first else 0
    return f"""# FSDP2 on two ranks

This page compares checkpointd with DCP and torch-checkpointing under FSDP2 on two ranks: saving, and loading on two, one and
three ranks. `{run.command}` writes it in {run.minutes:.0f} minutes; do not edit it by hand. [README.md](README.md) has the
words and the method.

Machine: {facts}.

State: {run.gib:g} GiB over both ranks in {tensors} tensors: a GPT-shaped model in fp32 under `fully_shard`,
AdamW's `exp_avg` and `exp_avg_sq` as DTensors, and its step; moved on by a real optimizer step between any two
saves. {runs} run(s), systems in shuffled order, each in fresh processes. Seconds of the slower rank, unless a
heading says otherwise: the median, and in brackets the smallest and the largest."""


def _saves(results: Results) -> list[str]:
    synced = _synced(results)
    return [
        "## Saving",
        "A warm save while nothing else runs, and *lost*: what one costs a training loop beside it.",
        report.metric_table(results, SAVES, synced, "our fsync"),
        "The first save of a fresh process.",
        report.metric_table(results, COLD, synced, "our fsync"),
    ]


def _synced(results: Results) -> dict[str, str]:
    from benchmarks.sharded_systems import SYSTEMS

    return {system: SYSTEMS[system].ours_to_sync for system in results.systems}


def _loads(results: Results, worlds: Sequence[int]) -> list[str]:
    columns = _load_metrics(worlds)
    rows = [
        [system, *(_cell(results, system, metric) for metric in columns), _exact(results, system)] for system in results.systems
    ]
    return [
        "## Loading what two ranks saved",
        "Into FSDP2 on as many ranks as the heading says, in fresh processes: with the page cache dropped, and with it filled.",
        report.table(["system", *(metric.heading for metric in columns), "bit-exact"], rows),
    ]


def _load_metrics(worlds: Sequence[int]) -> list[Metric]:
    return [
        Metric(f"on {ranks}, {'cached' if cached else 'dropped'}", "s", lambda trial, r=ranks, c=cached: _load_s(trial, r, c))  # type: ignore[misc]
        for ranks in worlds
        for cached in (False, True)
    ]


def _load_s(trial: Any, ranks: int, cached: bool) -> float:
    """Seconds of the slowest rank; not a number where that load failed, or was not tried."""
    loads = [load for load in trial.loads if load.ranks == ranks]
    return max(((times.cached_s if cached else times.cold_s) for load in loads for times in load.times), default=math.nan)


def _cell(results: Results, system: str, metric: Metric) -> str:
    values = [metric.of(trial) for trial in results.of(system)]
    return "cannot" if any(map(math.isnan, values)) else str(report.spread(values))


def _exact(results: Results, system: str) -> str:
    trials: Any = results.of(system)
    loads = [load for trial in trials for load in trial.loads]
    wrong = {name for load in loads for times in load.times for name in times.wrong}
    failed = sorted({load.ranks for load in loads if load.error})
    words = [f"NO: {len(wrong)} tensors"] if wrong else ["yes" if len(failed) < len({load.ranks for load in loads}) else "-"]
    return ", ".join(words + [f"fails on {ranks}" for ranks in failed])


def _ratios(results: Results, worlds: Sequence[int]) -> list[str]:
    failed = {
        (system, metric.title)
        for metric in _load_metrics(worlds)
        for system in results.systems
        if any(math.isnan(metric.of(trial)) for trial in results.of(system))
    }
    columns = (*RATIOS, *_load_metrics(worlds))
    rows = [[system, *(_ratio(results, system, metric, failed) for metric in columns)] for system in results.systems]
    return [
        "## Ratios",
        "Each system over the best peer (**1**, the smallest median) of that column: below 1 is better than every peer."
        "\nTaken within one run; `-` where a figure is not above zero, or a load failed.",
        report.table(["system", *(metric.title for metric in columns)], rows),
    ]


def _ratio(results: Results, system: str, metric: Metric, failed: set[tuple[str, str]]) -> str:
    able = Results(results.ranks, tuple(one for one in results.systems if (one, metric.title) not in failed), results.trials)
    best = able.best_peer(metric)
    if best is None or system not in able.systems:
        return "-"
    ratio = able.ratio(system, best, metric)
    return "**1**" if best == system else "-" if ratio is None else str(ratio)


def _notes(run: ShardRun) -> str:
    others = report.spread(trial.other_cores for trial in run.trials)
    left = max((times.resident for trial in run.trials for load in trial.loads for times in load.times), default=0.0)
    lines = [
        "Every system gets the same DTensors. DCP and torch-checkpointing get them as nested dictionaries that are made once,"
        " which spares them `get_state_dict`; checkpointd gets the module and the optimizer.",
        "After every load the digest of every whole tensor, put together from all ranks, must be what it was before the save;"
        " every tensor was overwritten as soon as that save was safe.",
        "checkpointd loads verify every byte against a digest; DCP and torch-checkpointing have none.",
        "torch-checkpointing 0.1.1 loads on another number of ranks only if the save used its `DefaultResharder`, which needs a"
        " GPU to exchange metadata. So here it saves each rank's own part. Direct I/O is off, as in [RESULTS.md](RESULTS.md).",
        "A warm save is one after the first; dcp.save blocks until it has written.",
        f"Other work on the machine during the trials, kernel threads included: {others} cores. Of dropped files at most"
        f" {left:.1%} stayed in the page cache.",
        *flaws(run),
    ]
    return "## Notes\n\n" + "\n".join(f"- {line}" for line in lines)
