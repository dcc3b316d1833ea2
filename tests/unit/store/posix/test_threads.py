"""A call ends when its system call has ended, cancelled or not."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator

import pytest

from checkpointd.store.posix.threads import Threads


@pytest.fixture
def one() -> Iterator[Threads]:
    threads = Threads(1, "test")
    yield threads
    threads.close()


class Held:
    """A blocking call that ends when it is told to."""

    def __init__(self) -> None:
        self.entered, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.go_on.wait(60)
        self.ended.set()
        return "done"


async def test_it_returns_and_raises_what_the_call_does(one: Threads) -> None:
    assert await one.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await one.run(divmod, 7, 0)


async def test_a_cancelled_task_goes_on_when_the_call_has_ended(one: Threads) -> None:
    held = Held()
    task = asyncio.create_task(one.run(held))
    await asyncio.to_thread(held.entered.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    held.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.ended.is_set()


async def test_a_call_that_has_not_begun_is_dropped(one: Threads) -> None:
    held = Held()
    begun: list[int] = []
    busy = asyncio.create_task(one.run(held))
    await asyncio.to_thread(held.entered.wait)
    waiting = asyncio.create_task(one.run(begun.append, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.go_on.set()
    assert await busy == "done"
    await one.run(int)
    assert begun == []


async def test_an_error_of_a_cancelled_call_does_not_hide_the_cancellation(one: Threads) -> None:
    held = Held()

    def fail() -> None:
        held()
        raise OSError(errno.EIO, "lost")

    task = asyncio.create_task(one.run(fail))
    await asyncio.to_thread(held.entered.wait)
    task.cancel()
    held.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_close_a_call_is_refused_as_a_system_error(one: Threads) -> None:
    one.close()
    with pytest.raises(OSError, match="shutdown") as caught:
        await one.run(int)
    assert caught.value.errno == errno.ESHUTDOWN


async def test_close_waits_for_the_end_of_the_threads_but_for_no_call_that_hangs() -> None:
    before = set(threading.enumerate())
    threads = Threads(2, "test")
    await threads.run(int)
    threads.close()
    assert set(threading.enumerate()) <= before

    held, threads = Held(), Threads(2, "test")
    task = asyncio.create_task(threads.run(held))
    await asyncio.to_thread(held.entered.wait)
    threads.close()
    assert not held.ended.is_set()
    held.go_on.set()
    assert await task == "done"
