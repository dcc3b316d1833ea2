"""The writer: a thread with an event loop. Every storage operation of this process runs on it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import uvloop

from checkpointd.errors import ClosedError, StoreError
from checkpointd.waits import Waiting, is_done

log = logging.getLogger("checkpointd")
T = TypeVar("T")
ABANDON_S = 5.0
"""How long abandoned tasks may take to end after they were cancelled."""
_LOOK_S = 1.0
"""How often a wait checks whether more bytes have come."""
ASKED = "the storage has not answered; is it mounted and reachable?"


class WriterThread:
    """Runs coroutines for other threads. Only the caller of a coroutine gets its error."""

    def __init__(self, threads: int) -> None:
        self._loop = uvloop.new_event_loop()
        # Workers encode, hash and deliver chunks. The store has its own threads for the disk.
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="checkpointd-worker")
        self._loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self._run, name="checkpointd-writer", daemon=True)
        self._closed = False
        self._thread.start()

    def _run(self) -> None:
        """Run the loop and close it, all on this thread: so close() works even inside another running loop."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.run_forever()
        abandoned = asyncio.all_tasks(loop)
        for task in abandoned:
            task.cancel()
        left: set[asyncio.Task[Any]] = set()
        if abandoned:
            _, left = loop.run_until_complete(asyncio.wait(abandoned, timeout=ABANDON_S))
        if left:
            log.error("the writer ends without waiting for a call of the storage or of a worker that does not return")
        loop.close()
        self._workers.shutdown(wait=not left, cancel_futures=True)  # what is left may wait for a worker that hangs

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop; the future gets its result or error."""
        if self._closed:
            work.close()
            raise ClosedError("the writer is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Run `call` on the loop at its next turn, unless the writer is closed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(call, *arguments)

    def call(self, work: Coroutine[Any, Any, T], timeout: float, doing: Callable[[], str] = lambda: ASKED) -> T:
        """Run `work` on the loop and wait for it. Raises StoreError if it has not ended within `timeout` seconds.

        `doing` gives the line of the log during a long wait.
        """
        future = self.submit(work)
        if not Waiting(doing).until(partial(is_done, future), timeout):
            raise _given_up(future, timeout)
        return future.result()

    def call_with_progress_timeout(self, work: Callable[[Callable[[int], None]], Coroutine[Any, Any, T]], patience: float) -> T:
        """Run the coroutine of `work(on_bytes)`, which calls `on_bytes` with each number of bytes that has come.

        It may take as long as it likes while bytes come. Raises StoreError if none come for `patience` seconds.
        """
        moved = 0

        def on_bytes(nbytes: int) -> None:
            nonlocal moved
            moved += nbytes

        future = self.submit(work(on_bytes))
        while not future.done():
            if not _has_moved(future, lambda: moved, patience):
                raise _given_up(future, patience)
        return future.result()

    def close(self, *, wait: bool = True) -> None:
        """Stop the loop and cancel its tasks. A thread that hangs in a system call is left behind.

        Without `wait` this returns at once: the garbage collector may call it from any thread.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not wait:
            return
        self._thread.join(2 * ABANDON_S)
        if self._thread.is_alive():
            log.error("the writer's thread does not end: a call on it, or on one of its workers, does not return")


def _given_up(future: Future[Any], seconds: float) -> StoreError:
    """Cancel `future`; the error for its caller, who has waited for `seconds`."""
    future.cancel()
    return StoreError(f"the storage has not answered for {seconds:g} s; is it mounted and reachable?")


def _has_moved(future: Future[Any], moved: Callable[[], int], patience: float) -> bool:
    """Wait until `moved` has grown or `future` is done; False if neither happens for `patience` seconds."""
    before = moved()

    def looked(seconds: float) -> bool:
        return is_done(future, min(seconds, _LOOK_S)) or moved() != before

    return Waiting(lambda: f"{before} bytes have been read, and no more come; {ASKED}").until(looked, patience)
