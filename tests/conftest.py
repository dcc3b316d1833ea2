"""How every test runs: on uvloop, with the markers' needs checked, heavy ones one at a time, Hypothesis profiles."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from checkpointd.report import verification

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)

pytest_plugins = ["tests.costs", "tests.servers.fixtures"]

# Tests with one of these markers share the two cores and the loop devices badly: under `--dist loadgroup` those of one folder
# all go to one worker, one after another. A test's own `xdist_group` wins.
ONE_AT_A_TIME = ("e2e", "power_cut")

# Neither profile times an example: the machine decides how long one takes. Both print what reproduces a failure. The gate tries
# the same examples each time, so what it finds is due to the change. The night tries new ones.
settings.register_profile(
    "gate", deadline=None, print_blob=True, max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "night", deadline=None, print_blob=True, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)


# A test that needs what can be installed is skipped with a reason that begins so. Other reasons are of the machine itself.
REQUIRED = {"compiler": ("needs a C++ compiler",), "everything": ("needs ", "could not import ")}


class Count(NamedTuple):
    """How many of something a run has, unless the option says another number."""

    gate: int
    night: int
    what: str


COUNTS = {
    # What only the night has, has an option with one default, below.
    "kill-rounds": Count(1, 6, "rounds of SIGKILL under torchrun"),
    "sidecar-kills": Count(3, 50, "SIGKILLs to the sidecar in the middle of saves, for each number of ranks"),
    "ema-swaps": Count(5, 25, "averages swapped in while a snapshot is taken"),
    "mistake-rounds": Count(1, 2, "times that each planted mistake of the simulated device must show"),
    "power-cuts": Count(1, 4, "power cuts under a saving job"),
    "sim-schedules": Count(8, 1000, "random schedules of the simulated job, for each storage"),
    "sim-stride": Count(60, 18, "of the effects of a simulated job, one in so many is struck"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="the night: also the tests marked nightly, and larger numbers")
    for name, count in COUNTS.items():
        words = f"{count.what} (gate: {count.gate}, night: {count.night})"
        parser.addoption(f"--{name}", type=int, help=words)
    parser.addoption("--sidecar-rounds", type=int, default=4, help="rounds of kills with sidecars (default: 4)")
    parser.addoption("--bucket-rounds", type=int, default=2, help="rounds of kills and faults with a bucket (default: 2)")
    parser.addoption("--trainer-rounds", type=int, default=1, help="jobs of trainers killed in a save (default: 1 each)")
    parser.addoption("--fuzzed-files", type=int, default=100, help="roots and files that are changed and loaded (default: 100)")
    parser.addoption("--chaos-seeds", type=int, default=12, help="trainings on streams in random orders (default: 12)")
    parser.addoption(
        "--damage-stride", type=int, default=17, help="of the damages to objects, one in so many is done (default: 17)"
    )
    parser.addoption("--sidecar-seed", type=int, help="the seed of the rounds with sidecars (default: a new one)")
    parser.addoption("--sim-first", type=int, default=60, help="the seed of the first random schedule (default: 60)")
    parser.addoption("--name-seeds", action="store_true", help="write which seed catches each mutation of tests/simulation")
    parser.addoption("--sim-store", choices=("disk", "bucket", "both"), default="both", help="where simulated roots lie")
    parser.addoption("--every-load", action="store_true", help="every state, layout, writer, world and dtype, not only some")
    parser.addoption("--chaos-first", type=int, default=0, help="the seed of the first training on streams (default: 0)")
    parser.addoption("--simulated-device", action="store_true", help="collect the tests that make it this process's device")
    parser.addoption("--require", choices=sorted(REQUIRED), help="fail, instead of skip, tests that need what is missing here")


def pytest_configure(config: pytest.Config) -> None:
    night = config.getoption("--nightly")
    settings.load_profile("night" if night else "gate")
    for name, count in COUNTS.items():
        attribute = name.replace("-", "_")
        if getattr(config.option, attribute) is None:
            setattr(config.option, attribute, count.night if night else count.gate)


def pytest_report_header(config: pytest.Config) -> str:
    return "suite: gate and night" if config.getoption("--nightly") else "suite: gate; --nightly adds the night"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every async test runs on the loop that the writer uses."""
    return {"uvloop": loop_that_times_out}


def loop_that_times_out() -> asyncio.AbstractEventLoop:
    """A uvloop loop that a test's timeout can end.

    The timeout raises from a signal handler, and uvloop only reports what a signal handler raises: a test that
    waits for ever would go on waiting.
    """
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(cancel_on_timeout)
    return loop


def cancel_on_timeout(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not isinstance(error, pytest.fail.Exception):
        loop.default_exception_handler(context)
        return
    for task in asyncio.all_tasks(loop):
        task.cancel(str(error))


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks only briefly for what is missing, even where no option says how long."""
    modules, defaults = lengths_of_looks(len(sys.modules))
    for module in modules:
        monkeypatch.setattr(module, "ABSENCE_S", 0.05)
    for arguments in defaults:
        monkeypatch.setitem(arguments, "absence_s", 0.05)
    monkeypatch.setattr(verification, "PATIENCE", replace(verification.PATIENCE, absence_s=0.05))


@lru_cache(maxsize=1)
def lengths_of_looks(imported: int) -> tuple[list[ModuleType], list[dict[str, Any]]]:
    """The modules with a constant ABSENCE_S, and the defaults of calls with `absence_s`. `imported`: how many modules are."""
    ours = [one for name, one in list(sys.modules.items()) if name.startswith(("checkpointd.", "checkpointd_client."))]
    calls = [call for one in ours for thing in vars(one).values() for call in (thing, getattr(thing, "__init__", None))]
    defaults = {id(found): found for call in calls if (found := getattr(call, "__kwdefaults__", None))}
    return [one for one in ours if hasattr(one, "ABSENCE_S")], [one for one in defaults.values() if "absence_s" in one]


# First: xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        of_the_night = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=of_the_night)
    for item in items:
        if item.get_closest_marker("xdist_group") is None and any(map(item.get_closest_marker, ONE_AT_A_TIME)):
            item.add_marker(pytest.mark.xdist_group(f"one-at-a-time-{item.path.parent.name}"))


def pytest_collection_finish() -> None:
    """Save time in each test: the search for garbage leaves out what was imported, and torch's loggers propagate.

    In each test, pytest attaches handlers to every logger that does not propagate, and torch has dozens of them.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    timeout = item.get_closest_marker("timeout")
    if timeout and timeout.args and timeout.args[0] > float(item.config.getini("faulthandler_timeout")):
        # The net of pyproject.toml, which ends the process, must come after the test's own timeout.
        faulthandler.dump_traceback_later(timeout.args[0] + 60, exit=True, file=sys.__stderr__)
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip(f"only for root; this is user id {os.geteuid()}")
    if item.get_closest_marker("gpu"):
        missing = why_no_cuda()
        if missing:
            pytest.skip(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return required((yield), item.config.getoption("require"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return required((yield), collector.config.getoption("require"))


def required(report: R, require: str | None) -> R:
    """`report`, which fails if it was skipped since something is missing that `require` wants to be there."""
    if require is not None and report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason.startswith(REQUIRED[require]):
            report.outcome, report.longrepr = "failed", f"{reason}\n--require={require} does not skip it"
    return report


def why_no_cuda() -> str | None:
    """What keeps a CUDA test from running here, in words; None where it can run."""
    if importlib.util.find_spec("torch") is None:
        return "there is no CUDA device; torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"there is no CUDA device; torch {torch.__version__} sees none"
    return None
