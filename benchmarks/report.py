"""Trials in, tables out: medians with their ranges, ratios within one run. Pure: nothing is read or measured.

Per trial, a figure is the worst rank's; where a process made several warm saves, it is their median. Over the
runs it is the median, with the smallest and the largest in brackets. A ratio is taken between two trials of the
same run and only then made a median, so that a slow moment of the machine touches both of its sides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.measures import RankReport, SaveTimes, Trial

MIB = 1 << 20
GIB = 1 << 30
PEERS = (
    "torch.save",
    "dcp-thread",
    "dcp-thread-reused",
    "dcp-thread-background",
    "dcp-process",
    "dcp-process-reused",
    "torch-checkpointing",
    "torch-checkpointing-prewarmed",
)
OURS = ("checkpointd", "checkpointd-raw", "checkpointd-sidecar")
BIG = ("torch.save", "checkpointd", "checkpointd-eager", "checkpointd-prepared")
"""The systems that are measured with a state of several GiB, for the first save and the first load of a process."""
BLOCKING = ("torch.save",)
"""Their call ends when the file is written: no training step runs beside it."""


@dataclass(frozen=True)
class Spread:
    """The median of some runs and their range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if figure(self.low) == figure(self.high):
            return figure(self.median)
        return f"{figure(self.median)} ({figure(self.low)}–{figure(self.high)})"


@dataclass(frozen=True)
class Metric:
    """One column: smaller is better in all of them."""

    title: str
    unit: str
    of: Callable[[Trial], float]
    of_steps: bool = False
    """Whether it looks at training steps that ran beside the save: says nothing of a blocking system."""

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


def spread(values: Iterable[float]) -> Spread:
    """Median, smallest and largest of at least one value."""
    known = sorted(values)
    return Spread(statistics.median(known), known[0], known[-1])


def figure(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value == 0:
        return "0"
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 0.9999 is 1.00
    return f"{value:.{max(0, 2 - exponent)}f}"


# --- figures of one trial ----------------------------------------------------------------------------------


def _warm(pick: Callable[[SaveTimes], float]) -> Callable[[Trial], float]:
    def of(trial: Trial) -> float:
        saves = zip(*(report.warm for report in trial.reports), strict=True)
        return statistics.median(max(pick(times) for times in ranks) for ranks in saves)

    return of


def _worst(pick: Callable[[RankReport], float]) -> Callable[[Trial], float]:
    return lambda trial: max(pick(report) for report in trial.reports)


def _cpu(trial: Trial) -> float:
    saves = zip(*(report.warm for report in trial.reports), strict=True)
    return float(statistics.median(sum(times.cpu_s for times in ranks) for ranks in saves))


def _save_memory(trial: Trial) -> float:
    return (trial.save_peak_bytes - sum(report.base_bytes for report in trial.reports)) / MIB


def _load_memory(trial: Trial) -> float:
    return max(0.0, trial.load_peak_bytes - sum(report.load_base_bytes for report in trial.reports)) / MIB


CALL = Metric("call", "s", _warm(lambda times: times.call_s))
SAFE = Metric("safe", "s", _warm(lambda times: times.safe_s))
DONE = Metric("done", "s", _warm(lambda times: times.done_s))
DURABLE = Metric("durable", "s", _warm(lambda times: times.durable_s))
CPU = Metric("CPU", "s", _cpu)
MEMORY = Metric("peak memory over base", "MiB", _save_memory)
STORED = Metric("stored", "GiB", _warm(lambda times: times.stored_bytes / GIB))
SETUP = Metric("set-up", "s", _worst(lambda report: report.setup_s))
COLD_CALL = Metric("cold call", "s", _worst(lambda report: report.cold.call_s))
COLD_SAFE = Metric("cold safe", "s", _worst(lambda report: report.cold.safe_s))
COLD_DURABLE = Metric("cold durable", "s", _worst(lambda report: report.cold.durable_s))
LOST = Metric("lost", "s", _worst(lambda report: report.loop.lost_s))
LOST_PYTHON = Metric("lost to Python", "s", _worst(lambda report: report.python.lost_s))
PYTHON_P99 = Metric("Python p99", "ms", _worst(lambda report: report.python.p99_ms), of_steps=True)
SLOWDOWN = Metric("mean step / undisturbed", "", _worst(lambda report: _slowdown(report)), of_steps=True)
P50 = Metric("step p50", "ms", _worst(lambda report: report.loop.p50_ms), of_steps=True)
P99 = Metric("step p99", "ms", _worst(lambda report: report.loop.p99_ms), of_steps=True)
MAX = Metric("step max", "ms", _worst(lambda report: report.loop.max_ms), of_steps=True)
QUIET_P99 = Metric("undisturbed p99", "ms", _worst(lambda report: report.loop.undisturbed_p99_ms))
LOAD_COLD = Metric("load, cache dropped", "s", _worst(lambda report: report.load.cold_s))
LOAD_CACHED = Metric("load, cached", "s", _worst(lambda report: report.load.cached_s))
LOAD_FIRST = Metric("first load, cached", "s", _worst(lambda report: report.load.first_s or math.nan))
LOAD_FIRST_COLD = Metric("first load, cache dropped", "s", _worst(lambda report: report.load.first_cold_s or math.nan))
PLAIN_READ = Metric("plain read, cache dropped", "s", _worst(lambda report: report.load.plain_s or math.nan))
FIRST_PLAIN_READ = Metric("plain read after the first load", "s", _worst(lambda report: report.load.first_plain_s or math.nan))
LOAD_MEMORY = Metric("load peak over base", "MiB", _load_memory)
LOAD_PRIVATE = Metric("load peak, private", "MiB", lambda trial: trial.load_private_bytes / MIB)


def _slowdown(report: RankReport) -> float:
    return report.loop.mean_ms / report.loop.undisturbed_ms


SAVES = (CALL, SAFE, DONE, DURABLE, CPU, MEMORY, STORED)
COLD = (SETUP, COLD_CALL, COLD_SAFE, COLD_DURABLE)
TRAINING = (LOST, SLOWDOWN, P50, P99, MAX, QUIET_P99, LOST_PYTHON, PYTHON_P99)
LOADS = (LOAD_COLD, PLAIN_READ, LOAD_CACHED, LOAD_FIRST_COLD, FIRST_PLAIN_READ, LOAD_FIRST, LOAD_MEMORY, LOAD_PRIVATE)
METRICS = (*SAVES, *COLD, *TRAINING, *LOADS)
RATIOS = (
    *(CALL, SAFE, DURABLE, LOST, LOST_PYTHON, P99, COLD_SAFE, COLD_DURABLE, CPU, MEMORY),
    *(LOAD_COLD, LOAD_CACHED, LOAD_FIRST_COLD, LOAD_FIRST),
)


# --- over the runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The trials of one number of ranks, failed ones left out; `systems` in the order of the tables."""

    ranks: int
    systems: tuple[str, ...]
    trials: tuple[Trial, ...]

    def of(self, system: str) -> list[Trial]:
        """The trials of one system, by run."""
        return sorted((trial for trial in self.trials if trial.system == system), key=lambda trial: trial.run)

    def spread(self, system: str, metric: Metric) -> Spread:
        """A metric of one system over its runs."""
        return spread(metric.of(trial) for trial in self.of(system))

    def best_peer(self, metric: Metric) -> str | None:
        """The peer with the smallest median; None where no peer was measured."""
        unfit = BLOCKING if metric.of_steps else ()
        peers = [system for system in self.systems if system in PEERS and system not in unfit]
        return min(peers, key=lambda system: self.spread(system, metric).median, default=None)

    def ratio(self, system: str, other: str, metric: Metric) -> Spread | None:
        """`system` over `other`, within each run; None without a run of both, or where one is not above 0."""
        others = {trial.run: metric.of(trial) for trial in self.of(other)}
        pairs = [(metric.of(trial), others[trial.run]) for trial in self.of(system) if trial.run in others]
        if not pairs or any(own <= 0 or base <= 0 for own, base in pairs):
            return None
        return spread(own / base for own, base in pairs)


def results(trials: Sequence[Trial], ranks: int) -> Results:
    """The trials with `ranks` ranks that did not fail."""
    good = tuple(trial for trial in trials if trial.ranks == ranks and not trial.error)
    measured = {trial.system for trial in good}
    return Results(ranks, tuple(system for system in dict.fromkeys((*PEERS, *OURS, *BIG)) if system in measured), good)


def wrong(results: Results, system: str) -> list[str]:
    """Names of tensors that any run of the system loaded with other bytes than it saved."""
    reports = [report for trial in results.of(system) for report in trial.reports]
    return sorted({path for report in reports for path in report.load.wrong})


# --- tables ------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table that also lines up as plain text: `left` columns to the left, the others to the right."""
    widths = [max(3, *(len(row[column]) for row in [head, *rows])) for column in range(len(head))]
    rule = [":" + "-" * (width - 1) if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        padded = (cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in pairs)
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def metric_table(results: Results, metrics: Sequence[Metric], last: dict[str, str], last_title: str) -> str:
    """One row a system, one column a metric, and one last column of words."""
    rows = [[system, *(str(results.spread(system, metric)) for metric in metrics), last[system]] for system in results.systems]
    return table(["system", *(metric.heading for metric in metrics), last_title], rows)


def exactness(results: Results) -> dict[str, str]:
    """By system: whether every load of every run gave back the saved bytes."""
    words = {system: wrong(results, system) for system in results.systems}
    return {system: f"NO: {len(paths)} tensors" if paths else "yes" for system, paths in words.items()}


def ratio_table(all_results: Sequence[Results], metrics: Sequence[Metric] = RATIOS) -> str:
    """The one table: every system over the best peer of each metric, for each number of ranks."""
    rows = [
        [f"{results.ranks}", system, *(_ratio(results, system, metric) for metric in metrics)]
        for results in all_results
        for system in results.systems
    ]
    return table(["ranks", "system", *(metric.title for metric in metrics)], rows, left=2)


def _ratio(results: Results, system: str, metric: Metric) -> str:
    best = results.best_peer(metric)
    if best is None or (metric.of_steps and system in BLOCKING):
        return "-"
    if best == system:
        return "**1**"
    ratio = results.ratio(system, best, metric)
    return "-" if ratio is None else str(ratio)
