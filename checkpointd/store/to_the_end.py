"""Awaits work that cannot be stopped, such as a system call on a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Awaitable[T], job: Future[T] | None = None) -> T:
    """Await `work`. A cancellation takes effect only when `work` has ended, or when its `job` had not begun and was dropped.

    A system call cannot be stopped. A caller that went on earlier would reuse memory and descriptors that are still in use.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if job is None or not job.cancel():
            await _ended(task)
        raise


async def _ended(task: asyncio.Future[T]) -> None:
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # The cancellation is what the caller learns of.
