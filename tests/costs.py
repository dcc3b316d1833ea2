"""`--costs` prints what each folder and each of the slowest tests takes, in processor seconds and in wall seconds."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest

PROPERTY = "processor_s"
SLOWEST = 100
NAME_MAX = 150


class Cost(NamedTuple):
    """Seconds of one test, or of many. The processor's are those of the worker and of the children that it waited for."""

    processor_s: float = 0.0
    wall_s: float = 0.0
    tests: int = 0

    def __add__(self, other: tuple[object, ...]) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="print what each folder and each of the slowest tests takes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs())


class Costs:
    def __init__(self) -> None:
        self.read_s = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self.read_s = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = processor_s()
        report.user_properties.append((PROPERTY, now_s - self.read_s))
        self.read_s = now_s
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tests = costs_of(terminalreporter)
        folders: dict[str, Cost] = defaultdict(Cost)
        for name, cost in tests.items():
            folders["/".join(PurePosixPath(name.split("::")[0]).parts[:3])] += cost
        slowest = sorted(tests.items(), key=lambda item: item[1].wall_s, reverse=True)[:SLOWEST]
        terminalreporter.section("costs")
        for title, found in (
            ("folder or file", sorted(folders.items(), key=lambda item: item[1].processor_s, reverse=True)),
            (f"the slowest {SLOWEST}", slowest),
        ):
            terminalreporter.line(f"{'processor s':>11} {'wall s':>8} {'tests':>6}  {title}")
            for name, cost in found:
                terminalreporter.line(f"{cost.processor_s:11.1f} {cost.wall_s:8.1f} {cost.tests:6}  {name[:NAME_MAX]}")


def costs_of(terminalreporter: pytest.TerminalReporter) -> dict[str, Cost]:
    costs: dict[str, Cost] = defaultdict(Cost)
    for report in reports(terminalreporter):
        spent_s = sum(value for key, value in report.user_properties if key == PROPERTY)
        if isinstance(report, pytest.SubtestReport):  # its time is part of its test's
            costs[report.nodeid] += Cost(spent_s)
        else:
            costs[report.nodeid] += Cost(spent_s, report.duration, int(report.when == "call"))
    return costs


def reports(terminalreporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    for found in terminalreporter.stats.values():
        yield from (report for report in found if isinstance(report, pytest.TestReport))


def processor_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
