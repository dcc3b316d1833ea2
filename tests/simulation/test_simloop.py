"""The simulated loop keeps its invariants SIMLOOP-1 to SIMLOOP-5 (`checkpointd/testing/simloop.py`)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from checkpointd.testing.simloop import ProcessState, SimLoop, StuckError, current_process, run


def loop() -> SimLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, SimLoop)
    return running


async def _interleaving(tasks: int = 4, turns: int = 4) -> list[int]:
    order: list[int] = []

    async def work(which: int) -> None:
        for _ in range(turns):
            order.append(which)
            await asyncio.sleep(0)

    await asyncio.gather(*map(work, range(tasks)))
    return order


def test_one_seed_is_one_schedule() -> None:  # SIMLOOP-1
    assert run(7, _interleaving()) == run(7, _interleaving())


def test_seeds_differ_in_order() -> None:  # SIMLOOP-3
    assert len({tuple(run(seed, _interleaving())) for seed in range(20)}) > 10


def test_time_jumps_to_the_next_timer() -> None:  # SIMLOOP-2
    async def main() -> list[float]:
        seen = []
        for delay in (3600.0, 0.0, 0.5):
            await asyncio.sleep(delay)
            seen.append(loop().time())
        return seen

    assert run(0, main()) == [3600.0, 3600.0, 3600.5]


def test_executor_runs_inline_and_takes_virtual_time() -> None:
    async def main() -> tuple[int, bool]:
        found = await asyncio.to_thread(sum, [1, 2, 3])
        return found, loop().time() > 0

    assert run(0, main()) == (6, True)


def test_an_executor_error_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await loop().run_in_executor(None, divmod, 1, 0)

    run(0, main())


def test_deadlock_names_seed_and_tasks() -> None:  # SIMLOOP-5
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(waits_for_ever(), name="the culprit")

    with pytest.raises(StuckError, match=r"(?s)seed 42.*nothing is ready.*main.*the culprit: .*test_simloop.py"):
        run(42, main())


def test_a_run_is_bounded() -> None:  # SIMLOOP-5
    async def polls() -> None:
        while True:
            await asyncio.sleep(1)

    async def spins() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StuckError, match="virtual time"):
        run(0, polls(), time_max_s=100)
    with pytest.raises(StuckError, match="bound on callbacks"):
        run(0, spins(), callbacks_max=1000)


def test_an_error_carries_the_seed() -> None:
    async def main() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        run(31337, main())
    assert any("seed 31337" in note for note in caught.value.__notes__)


def test_an_error_that_nobody_awaits_fails_the_run() -> None:
    async def breaks() -> None:
        raise KeyError("lost")

    async def main() -> None:
        task = asyncio.create_task(breaks())
        await asyncio.sleep(1)
        del task

    with pytest.raises(KeyError, match="lost"):
        run(0, main())


def test_a_killed_process_runs_nothing_more() -> None:  # SIMLOOP-4
    for seed in range(20):
        done: list[float] = []

        async def main(done: list[float] = done) -> float:
            process = loop().process("rank0")

            async def work() -> None:
                async with asyncio.TaskGroup() as group:
                    for start in range(1, 11):
                        group.create_task(count(start))

            async def count(start: int) -> None:
                while True:
                    await asyncio.sleep(start / 10)
                    done.append(loop().time())

            process.spawn(work())
            await asyncio.sleep(3)
            process.kill()
            await asyncio.sleep(3)
            return max(done)

        assert 2 < run(seed, main()) <= 3


def test_a_paused_process_finds_its_timers_overdue() -> None:  # SIMLOOP-4
    async def main() -> list[float]:
        process = loop().process("rank0")
        seen: list[float] = []

        async def work() -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                seen.append(loop().time())

        task = process.spawn(work())
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(10)
        assert seen == [1.0]
        process.resume()
        await task
        return seen

    assert run(0, main()) == [1.0, 11.5, 12.5]


def test_tasks_belong_to_the_process_that_started_them() -> None:
    async def main() -> None:
        process = loop().process("a")

        async def inner() -> str | None:
            found = current_process()
            return found.name if found else None

        async def outer() -> str | None:
            return await asyncio.create_task(inner())

        assert await process.spawn(outer()) == "a"
        assert await outer() is None

    run(0, main())


def test_a_name_is_free_again_after_death_alone() -> None:
    async def main() -> None:
        first = loop().process("a")
        with pytest.raises(ValueError, match="still alive"):
            loop().process("a")
        deaths: list[str] = []
        first.on_death(lambda: deaths.append("a"))
        first.kill()
        first.kill()
        assert deaths == ["a"]
        assert loop().process("a").state is ProcessState.RUNNING

    run(0, main())


def test_what_is_left_unwinds_without_a_word() -> None:
    unwound: list[str] = []

    async def generator() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            unwound.append("generator")

    async def hangs() -> None:
        try:
            async for _ in generator():
                await asyncio.Event().wait()
        finally:
            unwound.append("task")

    async def main() -> None:
        dead, paused = loop().process("dead"), loop().process("paused")
        for process in (dead, paused):
            process.spawn(hangs())
        await asyncio.sleep(1)
        dead.kill()
        paused.pause()

    run(0, main())
    assert unwound.count("task") == 2


@pytest.mark.parametrize("holder", ["timer", "task"])
def test_a_loop_that_has_ended_keeps_nothing_alive(holder: str) -> None:
    class Held:
        """What a timer or a task still holds at the end."""

    ended: list[str] = []

    async def waits(held: Held) -> None:
        await asyncio.sleep(1e6)
        raise AssertionError(held)

    async def main() -> None:
        held = Held()
        weakref.finalize(held, lambda _loop: ended.append(holder), loop())
        if holder == "timer":
            loop().call_later(1e6, print, held)
        else:
            loop().process("dead").spawn(waits(held))
        await asyncio.sleep(1)

    run(0, main())
    gc.collect()
    assert ended == [holder]


def test_a_task_that_refuses_to_end_is_reported() -> None:
    async def refuses() -> None:
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        asyncio.create_task(refuses(), name="stubborn")  # noqa: RUF006  # the loop itself keeps what it must unwind
        await asyncio.sleep(0.5)

    with pytest.raises(StuckError, match="stubborn"):
        run(0, main())


def test_threads_and_sockets_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(NotImplementedError):
            await loop().getaddrinfo("localhost", 80)

    run(0, main())


async def test_no_run_inside_a_running_loop() -> None:
    async def main() -> None:
        """Never runs."""

    coroutine = main()
    with pytest.raises(RuntimeError, match="plain function"):
        run(0, coroutine)
    coroutine.close()
