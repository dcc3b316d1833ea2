"""How much is simulated: `pytest tests/simulation --sim-schedules=20000 --sim-first=0 --sim-stride=1 --sim-store=bucket`."""

from __future__ import annotations

import pytest

from checkpointd.commit import log, log_access
from checkpointd.store.objects import store as objects
from tests.simulation.named_seeds import NamedSeeds

SEEDS_PER_TEST = 25
STORAGES = {"disk": ("disk",), "bucket": ("bucket",), "both": ("disk", "bucket")}
PART_BYTES = 4096
STATE_EVERY = 8


@pytest.fixture(scope="session")
def named_seeds(pytestconfig: pytest.Config) -> NamedSeeds:
    names = pytestconfig.getoption("--name-seeds")
    if names and hasattr(pytestconfig, "workerinput"):
        raise pytest.UsageError("--name-seeds needs one process, since each would write the whole file: -n 0, or WORKERS=0")
    return NamedSeeds(names=names, searches=pytestconfig.getoption("--nightly"))


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """How far the effects are apart at which a job is struck; 1: all of them."""
    return int(request.config.getoption("--sim-stride"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    first = metafunc.config.getoption("--sim-first")
    last = first + metafunc.config.getoption("--sim-schedules")
    parts = [range(at, min(at + SEEDS_PER_TEST, last)) for at in range(first, last, SEEDS_PER_TEST)]
    metafunc.parametrize("seeds", parts, ids=lambda part: f"{part.start}-{part.stop - 1}")
    metafunc.parametrize("storage", STORAGES[metafunc.config.getoption("--sim-store")])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_down(monkeypatch)


def scale_down(patch: pytest.MonkeyPatch) -> None:
    """Simulated roots have few attempts: put states early, and forget early. Their objects are small: upload them in parts."""
    patch.setattr(log_access, "STATE_EVERY", STATE_EVERY)
    patch.setattr(log, "FORGET_EVERY", STATE_EVERY)
    patch.setattr(log, "FORGET_AFTER", 2 * STATE_EVERY)
    patch.setattr(objects, "part_bytes_for", lambda _: PART_BYTES)
