"""A simulated loop that asyncio.Runner can run, for tests that are coroutines."""

from __future__ import annotations

from typing import Any, TypeVar

from checkpointd.testing.simloop import SimLoop

T = TypeVar("T")


class RunnableSimLoop(SimLoop):
    """A SimLoop that runs several coroutines, one after the other."""

    def run_until_complete(self, future: Any) -> Any:
        async def result() -> Any:
            return await future

        return self.run_main(result())

    async def shutdown_asyncgens(self) -> None:
        """Nothing to shut down: there are no threads, and the loop closes generators itself."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """The same."""

    def set_debug(self, enabled: bool) -> None:
        """A simulated loop is always the same."""
