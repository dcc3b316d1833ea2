"""The POSIX store keeps STORE-1 to STORE-6 of `store/base.py` on the simulated disk: at every crash point, in races, when it
refuses.

The scenarios are in `checkpointd/testing/storecrashes.py`; `test_posix_mutations.py` shows that they can fail.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from checkpointd.errors import StoreError, StoreFullError
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from checkpointd.testing.crashpoints import Crash, Scenario, every_crash_point
from checkpointd.testing.simdisk import ProcessDisk
from checkpointd.testing.storecrashes import KEY, NEW, OLD, SCENARIOS, CrashWorld, View, nothing_overwritten, one_winner

SEEDS = range(12)


@pytest.mark.parametrize("make", SCENARIOS, ids=lambda make: make.__name__)
def test_every_crash_point(make: Callable[[View], Scenario]) -> None:
    runs = every_crash_point(make(ProcessDisk), SEEDS)
    assert runs >= 5 * len(SEEDS)


# --- a disk that refuses ------------------------------------------------------------------------------------------


async def put_all(store: PosixStore, returned: dict[str, bytes]) -> None:
    """One call of each kind; what returned stands in `returned`."""
    await store.put_if_absent(KEY, NEW)
    returned[KEY] = NEW
    await store.put("tag/replaced", NEW)
    returned["tag/replaced"] = NEW
    if await store.put_if_match("latest", OLD, NEW):
        returned["latest"] = NEW
    writer = await store.open_writer("tag/large", size_hint=len(NEW))
    try:
        await writer.write_at(0, NEW)
        await writer.finish(len(NEW))
        returned["tag/large"] = NEW
    except StoreError:
        await writer.discard()
        raise


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_refused_effect(number: int) -> None:
    """STORE-6, and STORE-1 to STORE-3 behind it: an error is a StoreError, what returned is durable, and the
    second try succeeds.
    """

    async def scenario(crash: Crash) -> bool:
        world, returned, errors = CrashWorld(), dict[str, bytes](), list[StoreError]()
        await world.honest("before", lambda store: store.put("tag/replaced", OLD))
        await world.honest("before", lambda store: store.put("latest", OLD))
        last = world.disk.effects + crash.number
        world.disk.before = lambda effect: number if effect.number == last else None

        async def work(store: PosixStore) -> None:
            try:
                await put_all(store, returned)
            except StoreError as error:
                errors.append(error)
                await put_all(store, returned)

        await world.spawn("a", work)
        assert all(isinstance(error, StoreFullError) == (number == errno.ENOSPC) for error in errors)
        world.disk.power_cut()
        for key in (KEY, "tag/replaced", "latest", "tag/large"):
            found = await world.content(key)
            assert found == returned.get(key, found)
            assert found in {NEW, None if key == KEY else OLD} or key == "tag/large"
        return world.disk.effects > last

    assert every_crash_point(scenario, range(5)) > 100


def test_a_disk_without_hard_links_is_said() -> None:
    """STORE-6: nothing is created there."""

    async def scenario() -> None:
        world = CrashWorld()
        world.disk.before = lambda effect: errno.EPERM if effect.kind == "link" else None
        with pytest.raises(StoreError, match="hard links"):
            await world.honest("a", lambda store: store.put_if_absent(KEY, NEW))
        assert await world.content() is None

    simloop.run(0, scenario())


# --- races ------------------------------------------------------------------------------------------------------


def test_racing_creators_have_one_winner() -> None:
    for seed in range(300):
        one_winner(seed)


def test_compare_and_replace_loses_nothing() -> None:
    for seed in range(100):
        nothing_overwritten(seed)


def test_sweep_removes_what_the_dead_left_and_keeps_what_the_living_use() -> None:
    async def scenario(crash: Crash) -> bool:
        world = CrashWorld()

        async def create(store: PosixStore) -> None:
            await store.put("tag/from-" + store.url[-1], NEW)

        dying, living = world.spawn("a", create), world.spawn("b", create)
        struck = await Crash(crash.number, lambda disk, _: disk.kill("a")).strikes(world.disk, [dying, living])
        await world.honest("sweeper", lambda store: store.sweep())
        await living
        assert not [line for line in world.disk.fs.dump() if "/tmp/" in line and not line.endswith("/")]
        assert await world.content("tag/from-n") == NEW
        return struck

    every_crash_point(scenario, range(10))
