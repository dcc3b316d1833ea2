"""The writer: a thread of its own with an event loop, on which every storage operation of this process runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from checkpointd.errors import ClosedError

log = logging.getLogger("checkpointd")
T = TypeVar("T")


class Writer:
    """Runs coroutines for other threads; an error in one of them is its caller's alone."""

    def __init__(self, threads: int) -> None:
        self._loop = uvloop.new_event_loop()
        # Encoding, hashing and delivering run here; the store has threads of its own for the disk.
        self._loop.set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="checkpointd-worker"))
        self._thread = threading.Thread(target=self._run, name="checkpointd-writer", daemon=True)
        self._closed = False
        self._thread.start()

    def _run(self) -> None:
        """The thread: the loop's whole life, so that closing works from inside another running loop, too."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.run_forever()
        abandoned = asyncio.all_tasks(loop)
        for task in abandoned:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*abandoned, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop; its result or error ends up in the future."""
        if self._closed:
            work.close()
            raise ClosedError("the writer is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `work` on the loop and wait for it."""
        return self.submit(work).result(timeout)

    def close(self) -> None:
        """Stop the loop; what still runs is abandoned."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
