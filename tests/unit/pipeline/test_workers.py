"""run_workers: never more than `width` at once, and all that began has ended when the call returns, whatever happened."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from checkpointd.pipeline import workers
from checkpointd.pipeline.workers import Stopped, run_workers, uncollected
from tests.interruptions import Interruption

Work = Callable[[], Awaitable[None]]


class Works:
    """Works that say when they begin and end, and end only when they are let go."""

    def __init__(self, count: int) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.gates = [asyncio.Event() for _ in range(count)]
        self.changed = asyncio.Event()
        self.errors: dict[int, BaseException] = {}

    def all(self) -> list[Work]:
        return [partial(self.work, number) for number in range(len(self.gates))]

    async def work(self, number: int) -> None:
        self.begun.append(number)
        self.changed.set()
        await self.gates[number].wait()
        self.ended.append(number)
        self.changed.set()
        if number in self.errors:
            raise self.errors[number]

    def have_begun(self, count: int) -> bool:
        return len(self.begun) >= count

    def has_ended(self, number: int) -> bool:
        return number in self.ended

    def open(self, *numbers: int) -> None:
        for number in numbers or range(len(self.gates)):
            self.gates[number].set()

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.changed.clear()
            await self.changed.wait()


async def settle() -> None:
    """Let the loop run until whatever could go on without us has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("width", [1, 3, 8, 100])
async def test_works_begin_in_order_and_no_more_than_width_at_once(width: int) -> None:
    works = Works(8)
    running = asyncio.ensure_future(run_workers(works.all(), width))
    for number in range(8):
        due = list(range(min(8, number + width)))
        await works.until(partial(works.have_begun, len(due)))
        await settle()
        assert works.begun == due
        works.open(number)
        await works.until(partial(works.has_ended, number))
    await running
    assert works.ended == list(range(8))


async def test_no_works_are_no_trouble() -> None:
    await run_workers([], 4)


async def test_the_first_error_stops_what_has_not_begun_and_waits_for_what_has() -> None:
    works = Works(6)
    works.errors[0] = ValueError("broken")
    running = asyncio.ensure_future(run_workers(works.all(), 3))
    await works.until(lambda: len(works.begun) == 3)
    works.open(0)
    await works.until(lambda: works.ended == [0])
    await settle()
    assert not running.done()
    works.open()
    with pytest.raises(ValueError, match="broken"):
        await running
    assert works.begun == [0, 1, 2]
    assert sorted(works.ended) == [0, 1, 2]


async def test_an_error_of_a_check_stops_before_the_next_work() -> None:
    works = Works(4)
    works.open()
    stop = False

    def check() -> None:
        if stop:
            raise Stopped

    async def last() -> None:
        nonlocal stop
        stop = True

    with pytest.raises(Stopped):
        await run_workers([*works.all()[:2], last, *works.all()[2:]], 1, check)
    assert works.ended == [0, 1]


async def test_being_cancelled_however_often_waits_for_what_has_begun_and_begins_nothing_more() -> None:
    works = Works(6)
    running = asyncio.ensure_future(run_workers(works.all(), 2))
    await works.until(lambda: len(works.begun) == 2)
    for _ in range(3):
        running.cancel()
        await settle()
        assert not running.done()
    works.open()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert works.begun == [0, 1]
    assert sorted(works.ended) == [0, 1]


async def test_cancelling_ends_in_cancelled_even_where_a_work_fails_meanwhile() -> None:
    works = Works(2)
    works.errors[0] = ValueError("broken")
    running = asyncio.ensure_future(run_workers(works.all(), 2))
    await works.until(lambda: len(works.begun) == 2)
    running.cancel()
    await settle()
    works.open()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(works.ended) == [0, 1]


def test_the_garbage_collector_runs_again_when_the_last_thread_lets_it_go() -> None:
    begun, ended = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return ended.wait(60.0)

    assert gc.isenabled()
    thread = threading.Thread(target=uncollected, args=(wait,))

    def beside() -> None:
        """It begins while this thread holds the collector, and ends after it."""
        thread.start()
        assert begun.wait(60.0)

    uncollected(beside)
    assert not gc.isenabled()
    ended.set()
    thread.join()
    assert gc.isenabled()


def test_a_garbage_collector_that_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        assert uncollected(gc.isenabled) is False
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_ctrl_c_at_any_line_of_it_does_not_leave_the_garbage_collector_off() -> None:
    for number in itertools.count(1):
        with Interruption(number, lambda code: code.co_filename == workers.__file__) as interruption:
            uncollected(int)
        assert gc.isenabled(), interruption.place
        if not interruption.happened:
            break
    assert number > 8
