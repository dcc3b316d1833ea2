"""System calls in a bounded pool of threads, under any asyncio loop."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from checkpointd.store.posix.users import User, become
from checkpointd.waits import to_the_end

P = ParamSpec("P")
T = TypeVar("T")


class _Pool(ThreadPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:  # After close(), and when the interpreter is ending.
            raise OSError(errno.ESHUTDOWN, str(error)) from error


class Threads:
    """A pool of at most `count` threads, started as needed. A call after `close` raises OSError ESHUTDOWN.

    With `user`, every call has the rights of that user; OSError EPERM if this process may not take them.
    """

    def __init__(self, count: int, name: str, user: User | None = None) -> None:
        self._executor = _Pool(count, thread_name_prefix=name)
        self._user = user
        self._of_thread = threading.local()
        self._running = 0

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call. If cancelled, wait for its end first; drop a call that has not begun."""
        job = self._executor.submit(self._call, call, *args, **kwargs)
        self._running += 1
        try:
            return await to_the_end(asyncio.wrap_future(job), job)
        finally:
            self._running -= 1

    def _call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._user is not None and not hasattr(self._of_thread, "is_user"):
            become(self._user)
            self._of_thread.is_user = True
        return call(*args, **kwargs)

    def close(self) -> None:
        """End the threads, and wait for their end unless a call is still running: it may hang. Its thread ends with it."""
        self._executor.shutdown(wait=not self._running)
