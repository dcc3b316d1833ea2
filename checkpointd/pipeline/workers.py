"""A bounded number of asynchronous works at once, all of them ended before the call returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence


class Stopped(Exception):
    """The attempt was decided while this rank was still persisting: what it does is moot."""


async def run_workers(works: Sequence[Callable[[], Awaitable[None]]], width: int, check: Callable[[], None]) -> None:
    """Run `works` in order, at most `width` at once; `check` may raise to stop before the next one.

    The first error stops the rest. Works that have begun are waited for, never cancelled: a thread behind a cancelled future
    would go on reading the caller's memory.
    """
    todo = iter(works)
    failed = False

    async def worker() -> None:
        nonlocal failed
        for work in todo:
            if failed:
                return
            try:
                check()
                await work()
            except BaseException:
                failed = True
                raise

    results = await _join([asyncio.ensure_future(worker()) for _ in range(min(width, len(works)))])
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _join(tasks: list[asyncio.Future[None]]) -> list[BaseException | None]:
    """Wait for all `tasks`, also while being cancelled."""
    gathered = asyncio.gather(*tasks, return_exceptions=True)
    try:
        return await asyncio.shield(gathered)
    except asyncio.CancelledError:
        await gathered
        raise
