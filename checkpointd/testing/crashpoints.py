"""Runs a scenario once for each crash point: the crash comes just after effect number n, and the scenario checks what is left.

A scenario is a function of a `Crash`. It makes a simulated disk or bucket, sets up, and awaits `crash.strikes(storage, tasks)`,
which returns whether the crash came before the tasks were done. `every_crash_point` calls it with n = 1, 2, 3, ... until it is
too late.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from checkpointd.testing import simloop
from checkpointd.testing.simstorage import Effect, SimStorage

POINTS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash just after effect `number`, counted from 1 at the call of `strikes`. `how` makes it, by default a power cut."""

    number: int
    how: Callable[[SimStorage, Effect], None] = lambda storage, _: storage.power_cut()

    async def strikes(self, storage: SimStorage, tasks: Iterable[asyncio.Task[Any]]) -> bool:
        """Wait for the crash or the end of `tasks`; returns whether the crash came first. Raises errors of the tasks."""
        struck = storage.loop.create_future()
        base = storage.effects

        def after(effect: Effect, _done: bool) -> None:
            if effect.number - base == self.number:
                self.how(storage, effect)
                struck.set_result(None)

        storage.after = after
        done = asyncio.gather(*tasks)
        await asyncio.wait({done, struck}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
        return struck.done()


Scenario: TypeAlias = Callable[[Crash], Coroutine[Any, Any, bool]]


def every_crash_point(
    scenario: Scenario, seeds: Iterable[int], how: Callable[[SimStorage, Effect], None] | None = None, *, stride: int = 1
) -> int:
    """Run `scenario` with a crash after each effect, for each seed; the number of runs. A failure names seed and effect.

    Where runs are dear, a `stride` leaves effects out; another seed then strikes at other ones.
    """
    runs = 0
    for i, seed in enumerate(seeds):
        for number in itertools.count(1 + i % stride, stride):
            crash = Crash(number, how) if how else Crash(number)
            runs += 1
            try:
                struck = simloop.run(seed, scenario(crash))
            except BaseException as error:
                error.add_note(f"crash after effect {number}")
                raise
            if not struck:
                break
            if number >= POINTS_MAX:
                raise simloop.StuckError(f"seed {seed}: the scenario has more than {POINTS_MAX} effects")
    return runs
