"""A daemon's hub, a root below it, and looks of the monitor at that root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from checkpointd.commit.facts import STATES
from checkpointd.config import ServeConfig
from checkpointd.daemon.hub import Hub, RootScan
from checkpointd.daemon.roots.root_monitor import MonitorPace, RootMonitor
from checkpointd.store import writers
from checkpointd.store.base import Store
from tests.builders import attempts_at

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"
NEVER_S = 1e9
AT_ONCE = MonitorPace(busy_s=NEVER_S, idle_s=NEVER_S, patience_s=0.0, grace_s=0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
async def hub(tmp_path: Path, root: Path) -> AsyncIterator[Hub]:
    hub = Hub(ServeConfig(socket=str(tmp_path / "socket"), roots=(str(tmp_path),)))
    yield hub
    await hub.roots.close()


@pytest.fixture
def store(hub: Hub, root: Path) -> Store:
    return hub.roots.store(str(root))


@pytest.fixture
def dead_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took a start was on this machine, and is dead."""
    monkeypatch.setattr(writers, "is_alive", lambda _: False)


async def look(hub: Hub, root: Path, care: MonitorPace = AT_ONCE) -> RootScan:
    await RootMonitor(hub, care).look(str(root))
    return hub.root_scans[str(root)]


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def state(store: Store, tag: str = TAG) -> str:
    [view] = await attempts_at(store, tag)
    return STATES[view.status]
