"""How every test runs: on uvloop, with the markers' needs checked, heavy ones one at a time, Hypothesis profiles."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

# Tests with one of these markers share the two cores and the loop devices badly: under `--dist loadgroup` those of one folder
# all go to one worker, one after another. A test's own `xdist_group` wins.
ONE_AT_A_TIME = ("e2e", "power_cut")

# Neither times an example: the machine decides how long one takes. Both print what reproduces a failure.
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=200)
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kill-rounds", type=int, default=4, help="rounds of SIGKILL under torchrun (default: 4)")
    parser.addoption("--sidecar-rounds", type=int, default=2, help="rounds of kills with sidecars (default: 2)")
    parser.addoption("--bucket-rounds", type=int, default=0, help="rounds of kills and faults with a bucket (default: none)")
    parser.addoption("--bucket-races", type=int, default=4, help="races of 16 writers in a bucket (default: 4 each)")
    parser.addoption("--sidecar-seed", type=int, help="the seed of the rounds with sidecars (default: a new one)")
    parser.addoption("--ema-swaps", type=int, default=25, help="averages swapped in while a snapshot is taken (default: 25)")
    parser.addoption("--call-stride", type=int, default=5, help="each so manieth call of a save fails (default: 5)")
    parser.addoption("--every-load", action="store_true", help="every state, layout, writer, world and dtype, not only some")
    parser.addoption("--trainer-rounds", type=int, default=1, help="jobs of trainers killed in a save (default: 1 each)")
    parser.addoption("--fuzzed-files", type=int, default=25, help="roots and files that are changed and loaded (default: 25)")
    parser.addoption("--mistake-rounds", type=int, default=1, help="times that each planted mistake must show (default: 1)")
    parser.addoption("--chaos-seeds", type=int, default=6, help="trainings on streams in random orders (default: 6)")
    parser.addoption("--chaos-first", type=int, default=0, help="the seed of the first of them (default: 0)")
    parser.addoption("--simulated-device", action="store_true", help="collect the tests that make it this process's device")
    parser.addoption("--require-compiler", action="store_true", help="fail where the simulated device cannot be built")
    parser.addoption("--damage-stride", type=int, default=17, help="each so manieth damage to an object (default: 17)")
    parser.addoption("--nightly", action="store_true", help="also the tests marked nightly")
    parser.addoption("--power-cuts", type=int, default=4, help="power cuts under a saving job (default: 4)")


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


# First: xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None and any(map(item.get_closest_marker, ONE_AT_A_TIME)):
            item.add_marker(pytest.mark.xdist_group(f"one-at-a-time-{item.path.parent.name}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    timeout = item.get_closest_marker("timeout")
    if timeout and timeout.args and timeout.args[0] > float(item.config.getini("faulthandler_timeout")):
        # The net of pyproject.toml, which ends the process, must come after the test's own timeout.
        faulthandler.dump_traceback_later(timeout.args[0] + 60, exit=True, file=sys.__stderr__)
    if item.get_closest_marker("nightly") and not item.config.getoption("--nightly"):
        pytest.skip("takes long: make integrations runs it")
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip(f"needs root; this is user id {os.geteuid()}")
    if item.get_closest_marker("gpu"):
        missing = why_no_cuda()
        if missing:
            pytest.skip(missing)


def why_no_cuda() -> str | None:
    """What keeps a CUDA test from running here, in words; None where it can run."""
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device; torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"needs a CUDA device; torch {torch.__version__} sees none"
    return None
