"""Runs a bounded number of asynchronous tasks at once, and bounds waits for the storage."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from checkpointd.errors import StoreError
from checkpointd.waits import Waiting

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 4096
"""From this many tensors on, work over all of them runs on a thread, since it would hold the loop for too long."""


class Stopped(Exception):
    """The attempt was decided while this rank was still persisting, so its work is not needed any more."""


async def run_workers(
    works: Sequence[Callable[[], Awaitable[None]]], width: int, check: Callable[[], None] = lambda: None
) -> None:
    """Run `works` in order, at most `width` at once. `check` is called before each and may raise to stop.

    The first error, or a cancellation, stops the rest. Works that have begun are awaited and never cancelled, since a thread
    behind a cancelled future would go on reading the caller's memory.
    """
    todo = iter(works)
    stopped = False

    async def worker() -> None:
        nonlocal stopped
        for work in todo:
            if stopped:
                return
            try:
                check()
                await work()
            except BaseException:
                stopped = True
                raise

    gathered = asyncio.gather(*(worker() for _ in range(min(width, len(works)))), return_exceptions=True)
    cancelled: asyncio.CancelledError | None = None
    while not gathered.done():
        try:
            await asyncio.shield(gathered)
        except asyncio.CancelledError as error:
            stopped, cancelled = True, error
    if cancelled is not None:
        raise cancelled
    for result in gathered.result():
        if isinstance(result, BaseException):
            raise result


async def aside(tensors: int, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `call`, which goes over this many `tensors`. If there are many, it runs on a thread."""
    if tensors < LARGE:
        return call(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **kwargs))


async def answered(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of `work`. Raises StoreError if it takes longer than `seconds`.

    A system call that hangs cannot be cancelled, so this does not wait for it; its result is dropped.
    """
    task = asyncio.ensure_future(work)
    waiting = Waiting(lambda: "the storage has not answered", clock=asyncio.get_running_loop().time)
    if not await waiting.until_done(task, seconds):
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise StoreError(f"the storage has not answered for {seconds:.3g} s")
    return task.result()


async def stopped(tasks: Collection[asyncio.Task[Any]], seconds: float) -> bool:
    """Cancel `tasks`, and wait at most `seconds` until they have ended, since a system call that hangs cannot be cancelled.

    Returns whether all have ended.
    """
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
    return not tasks or not (await asyncio.wait(tasks, timeout=seconds))[1]


async def unless(over: asyncio.Event, waiting: Coroutine[Any, Any, T]) -> T:
    """The result of `waiting`. Raises Stopped if the attempt is `over` first."""
    waited, ended = asyncio.ensure_future(waiting), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({waited, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not waited.done():
            raise Stopped
        return waited.result()
    finally:
        waited.cancel()
        ended.cancel()


class _Collector:
    """Python's garbage collector, which several threads may hold up at once. A signal may interrupt any of its calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._is_held = False
        self._was_enabled = False

    def hold(self, holder: object) -> None:
        with self._lock:
            if not self._is_held:
                self._was_enabled = gc.isenabled()
            self._is_held = True
            self._holders.add(holder)
            gc.disable()

    def let_go(self, holder: object) -> None:
        """Let the collector run again, unless others hold it. A second call does nothing."""
        with self._lock:
            self._holders.discard(holder)
            if self._is_held and not self._holders:
                if self._was_enabled:
                    gc.enable()
                self._is_held = False


_COLLECTOR = _Collector()


def uncollected(work: Callable[[], T]) -> T:
    """The result of `work`, during which Python's garbage collector does not run.

    For work that makes a few objects for each of many things and keeps them: the collector would look at them again and again.
    """
    holder = object()
    try:
        _COLLECTOR.hold(holder)
        return work()
    finally:
        try:
            _COLLECTOR.let_go(holder)
        except BaseException:
            _COLLECTOR.let_go(holder)  # a signal came just now, and the collector must not stay off for good
            raise
