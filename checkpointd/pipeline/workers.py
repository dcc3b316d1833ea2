"""Runs a bounded number of asynchronous tasks at once; all of them have ended when the call returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from checkpointd.errors import StoreError
from checkpointd.waits import Waiting

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 4096
"""From so many tensors on, what goes over all of them would hold the loop for longer than others may wait."""


class Stopped(Exception):
    """The attempt was decided while this rank was still persisting: what it does is moot."""


async def run_workers(
    works: Sequence[Callable[[], Awaitable[None]]], width: int, check: Callable[[], None] = lambda: None
) -> None:
    """Run `works` in order, at most `width` at once; `check` may raise to stop before the next one.

    The first error stops the rest, and so does being cancelled. Works that have begun are waited for, never cancelled: a thread
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
    """The result of `call`, which goes over so many `tensors`: made on a thread where these are many."""
    if tensors < LARGE:
        return call(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **kwargs))


async def answered(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of `work`; StoreError where it takes longer than `seconds`.

    A system call that hangs cannot be cancelled, so `work` is then left to itself; what it returns in the end is dropped.
    """
    task = asyncio.ensure_future(work)
    waiting = Waiting(lambda: "the storage has not answered", clock=asyncio.get_running_loop().time)
    if not await waiting.until_done(task, seconds):
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise StoreError(f"the storage has not answered for {seconds:.3g} s")
    return task.result()


async def unless(over: asyncio.Event, waiting: Coroutine[Any, Any, T]) -> T:
    """What is waited for; Stopped where the attempt is `over` before it comes."""
    waited, ended = asyncio.ensure_future(waiting), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({waited, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not waited.done():
            raise Stopped
        return waited.result()
    finally:
        waited.cancel()
        ended.cancel()
