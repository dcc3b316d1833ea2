"""What operations of one kind cost at each size: time, processor time, and calls of the disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from types import TracebackType
from typing import Self

from benchmarks import curves, report


@dataclass(slots=True)
class Work:
    """What was asked of a disk. `stats` counts the names of a listing, too, since each costs one."""

    fsyncs: int = 0
    stats: int = 0
    listings: int = 0
    opened: int = 0
    read_bytes: int = 0

    def less(self, other: Work) -> Work:
        """This work without `other`; never below zero."""
        return Work(*(max(0, mine - theirs) for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One run of one operation."""

    seconds: float
    cpu_s: float
    work: Work
    peak_bytes: int = 0
    """The most memory beside what the process held before; 0 if that was not measured."""

    def less(self, other: Reading) -> Reading:
        """What this one took beyond `other`."""
        seconds, cpu_s = self.seconds - other.seconds, self.cpu_s - other.cpu_s
        return Reading(seconds=max(0.0, seconds), cpu_s=max(0.0, cpu_s), work=self.work.less(other.work))


class Meter:
    """Measures what is inside `with meter:`; the last time counts. `work` is the count of the disk in use."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.reading = Reading(seconds=0.0, cpu_s=0.0, work=Work())

    def __enter__(self) -> Self:
        self._before, self._cpu, self._since = replace(self._work), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        seconds, cpu_s = time.perf_counter() - self._since, time.process_time() - self._cpu
        self.reading = Reading(seconds=seconds, cpu_s=cpu_s, work=self._work.less(self._before))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of the operation `name` at one size. Times are medians over `runs`, calls are those of the last run."""

    name: str
    size: int
    runs: int
    seconds: float
    cpu_s: float
    fsyncs: int
    stats: int
    listings: int
    opened: int
    read_bytes: int
    peak_bytes: int = 0


def gathered(name: str, size: int, once: Callable[[], Reading], runs: int, budget_s: float) -> Cost:
    """`once`, run `runs` times, or fewer if that takes longer than `budget_s` seconds."""
    found, began = [once()], time.monotonic()
    while len(found) < runs and (time.monotonic() - began) * (1 + 1 / len(found)) < budget_s:
        found.append(once())
    return summed_up(name, size, found)


def summed_up(name: str, size: int, found: Sequence[Reading]) -> Cost:
    """The cost by the runs of an operation."""
    work = {field.name: getattr(found[-1].work, field.name) for field in fields(Work)}
    return Cost(
        name=name,
        size=size,
        runs=len(found),
        seconds=statistics.median(one.seconds for one in found),
        cpu_s=statistics.median(one.cpu_s for one in found),
        peak_bytes=max(one.peak_bytes for one in found),
        **work,
    )


def names(costs: Iterable[Cost]) -> list[str]:
    """The operations, each once."""
    return list(dict.fromkeys(cost.name for cost in costs))


def points(costs: Iterable[Cost], name: str, column: str) -> list[tuple[float, float]]:
    """Size and `column` of an operation, by size."""
    return sorted((float(cost.size), float(getattr(cost, column))) for cost in costs if cost.name == name)


def table(costs: Sequence[Cost], size: str) -> str:
    """One row for each operation and size; `size`: what the sizes are."""
    head = ["operation", size, "s", "CPU, s", "fsyncs", "stats", "listings", "opened", "KiB read", "MiB of memory", "runs"]
    rows = [
        [
            cost.name,
            f"{cost.size:,}",
            report.figure(cost.seconds),
            report.figure(cost.cpu_s),
            *(f"{number:,}" for number in (cost.fsyncs, cost.stats, cost.listings, cost.opened, cost.read_bytes >> 10)),
            f"{cost.peak_bytes >> 20:,}" if cost.peak_bytes else "-",
            str(cost.runs),
        ]
        for cost in costs
    ]
    return report.table(head, rows)


def exponents(costs: Sequence[Cost]) -> str:
    """How time and calls of each operation grow with the size: the exponents that fit."""
    columns = ("seconds", "cpu_s", "fsyncs", "stats", "opened", "read_bytes")
    rows = [[name, *(curves.exponent_words(points(costs, name, column)) for column in columns)] for name in names(costs)]
    return report.table(["operation", "s", "CPU", "fsyncs", "stats", "opened", "bytes read"], rows)
