"""The loop of the contract's tests: asyncio's own, and a simulated one for the simulated bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.contract.simulated_loop import RunnableSimLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    seed = getattr(getattr(item, "cls", None), "SEED", None)
    return {"asyncio": asyncio.new_event_loop} if seed is None else {"simulated": lambda: RunnableSimLoop(seed)}
