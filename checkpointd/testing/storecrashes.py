"""Scenarios on the simulated disk for the promises of the POSIX store at a power cut and in a race.

They check STORE-1 to STORE-5 of `checkpointd.store.base`. Each scenario takes the class of the disk's views: a test passes one
that forgets a step (a mutation), and shows that the scenario fails. It returns whether its crash came before the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

from checkpointd.errors import NotFoundError
from checkpointd.pipeline.root_id import OwnId, made_id
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from checkpointd.testing.crashpoints import Crash, Scenario
from checkpointd.testing.simdisk import ProcessDisk, SimDisk

ROOT = "/root/run"
KEY = "tag/00000001-0/outcome"
PASSING = f".checkpointd/shown/{'a' * 32}"
OLD, NEW = b"old " * 300, b"new " * 500

View: TypeAlias = type[ProcessDisk]
Work: TypeAlias = Callable[[PosixStore], Coroutine[Any, Any, Any]]


class CrashWorld:
    """A disk with processes, each with a store on it. `view` is the class of the view of the processes under test."""

    def __init__(self, view: View = ProcessDisk) -> None:
        self.disk = SimDisk()
        self._view = view

    def spawn(self, name: str, work: Work) -> asyncio.Task[Any]:
        return self._spawn(name, work, self._view)

    async def honest(self, name: str, work: Work) -> Any:
        """Run `work` in a process without mutation: for preparing, and for checking the result."""
        try:
            return await self._spawn(name, work, ProcessDisk)
        finally:
            self.disk.kill(name)

    def _spawn(self, name: str, work: Work, view: View) -> asyncio.Task[Any]:
        disk = self.disk.process(name, view)
        store = PosixStore(ROOT, disk, writer=name, is_alive=lambda writer: writer in self.disk.alive())
        return disk.process.spawn(work(store))

    def remove_root(self) -> None:
        """rm -r, by a person."""
        for line in reversed(self.disk.fs.dump()):
            path = line if line.endswith("/") else line.rpartition(" ")[0]
            if path.startswith(f"{ROOT}/"):
                (self.disk.fs.remove_directory if path.endswith("/") else self.disk.fs.unlink)(path.rstrip("/"))

    async def content(self, key: str = KEY) -> bytes | None:
        return await self.honest("reader", lambda store: content(store, key))  # type: ignore[no-any-return]


async def content(store: PosixStore, key: str) -> bytes | None:
    try:
        return await store.get(key)
    except NotFoundError:
        return None


async def prepare(store: PosixStore) -> None:
    assert await store.put_if_absent(KEY, OLD)


# --- the scenarios: what each call promises at a power cut --------------------------------------------------------


def put_if_absent(view: View = ProcessDisk) -> Scenario:
    """STORE-1: whole or nothing; durable once it returned."""

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()

        async def create(store: PosixStore) -> None:
            returned.append(await store.put_if_absent(KEY, NEW))
            await store.stat(KEY)

        struck = await crash.strikes(world.disk, [world.spawn("a", create)])
        if not struck:
            world.disk.power_cut()
        assert await world.content() in ({NEW} if returned else {NEW, None})
        return struck

    return scenario


def lost_put_if_absent(view: View = ProcessDisk) -> Scenario:
    """STORE-1: also who lost the race may rely on the object: it is durable, though its writer died half-way."""

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()

        async def create(store: PosixStore) -> None:
            returned.append(await store.put_if_absent(KEY, NEW))

        struck = await Crash(crash.number, lambda disk, _: disk.kill("a")).strikes(world.disk, [world.spawn("a", create)])
        await world.spawn("b", create)
        world.disk.power_cut()
        assert await world.content() == NEW
        return struck

    return scenario


def put(view: View = ProcessDisk) -> Scenario:
    """STORE-2: the old bytes or the new ones; the new ones once it returned."""

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()
        await world.honest("before", prepare)

        async def replace(store: PosixStore) -> None:
            await store.put(KEY, NEW)
            returned.append(True)

        struck = await crash.strikes(world.disk, [world.spawn("a", replace)])
        if not struck:
            world.disk.power_cut()
        assert await world.content() in ({NEW} if returned else {NEW, OLD})
        return struck

    return scenario


def put_if_match(view: View = ProcessDisk) -> Scenario:
    """STORE-2: a chain of replacements, as `latest` sees them: never back behind one that returned."""
    values = [None, b"1\n", b"2\n", b"3\n"]

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), [0]

        async def replace(store: PosixStore) -> None:
            for at in (1, 2, 3):
                data = values[at]
                assert data is not None
                assert await store.put_if_match("latest", values[at - 1], data)
                assert not await store.put_if_match("latest", values[at - 1], b"wrong")
                returned.append(at)

        struck = await crash.strikes(world.disk, [world.spawn("a", replace)])
        if not struck:
            world.disk.power_cut()
        assert await world.content("latest") in values[returned[-1] : returned[-1] + 2]
        return struck

    return scenario


def large_object(view: View = ProcessDisk) -> Scenario:
    """STORE-3: durable once `finish` has returned."""
    blocks = [bytes([65 + at]) * 6000 for at in range(3)]

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()

        async def write(store: PosixStore) -> None:
            writer = await store.open_writer("tag/00000001-0/00000-0.chunks", size_hint=20_000)
            await asyncio.gather(*(writer.write_at(6000 * at, block) for at, block in enumerate(blocks)))
            await writer.finish(18_000)
            returned.append(True)

        struck = await crash.strikes(world.disk, [world.spawn("a", write)])
        if not struck:
            world.disk.power_cut()
        found = await world.content("tag/00000001-0/00000-0.chunks")
        assert not returned or found == b"".join(blocks)
        return struck

    return scenario


def replacement(view: View = ProcessDisk) -> Scenario:
    """STORE-2 for a large object: the old bytes or the new ones; the new ones once `finish` has returned."""

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()
        await world.honest("before", prepare)

        async def replace(store: PosixStore) -> None:
            writer = await store.open_replacement(KEY, size_hint=len(NEW))
            await asyncio.gather(*(writer.write_at(at, NEW[at : at + 500]) for at in range(0, len(NEW), 500)))
            await writer.finish(len(NEW))
            returned.append(True)

        struck = await crash.strikes(world.disk, [world.spawn("a", replace)])
        if not struck:
            world.disk.power_cut()
        assert await world.content() in ({NEW} if returned else {NEW, OLD})
        return struck

    return scenario


def settle(view: View = ProcessDisk) -> Scenario:
    """STORE-4: what a writer left half-way is durable once `settle` has returned to a reader that saw it."""

    async def scenario(crash: Crash) -> bool:
        world = CrashWorld(view)
        seen: dict[str, bytes] = {}

        async def write(store: PosixStore) -> None:
            writer = await store.open_writer("tag/large")
            await writer.write_at(0, NEW)
            await writer.finish(len(NEW))
            await store.put_if_absent(KEY, NEW)

        async def look(store: PosixStore) -> None:
            for key in (KEY, "tag/large"):
                found = await content(store, key)
                if found is not None:
                    await store.settle(key)
                    seen[key] = found

        struck = await Crash(crash.number, lambda disk, _: disk.kill("a")).strikes(world.disk, [world.spawn("a", write)])
        await world.spawn("b", look)
        world.disk.power_cut()
        for key, found in seen.items():
            assert await world.content(key) == found
        return struck

    return scenario


def delete(view: View = ProcessDisk) -> Scenario:
    """STORE-5: gone for good once it returned, and nothing else with it."""

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()
        await world.honest("before", prepare)
        await world.honest("neighbour", lambda store: store.put("tag/other", OLD))

        async def remove(store: PosixStore) -> None:
            await store.delete(KEY)
            returned.append(True)

        struck = await crash.strikes(world.disk, [world.spawn("a", remove)])
        if not struck:
            world.disk.power_cut()
        assert await world.content() in ({None} if returned else {OLD, None})
        assert await world.content("tag/other") == OLD
        return struck

    return scenario


def delete_several(view: View = ProcessDisk) -> Scenario:
    """STORE-5 for many objects by one call: all are gone for good once it returned, and nothing else with them."""
    keys = [f"tag/00000001-0/{group}{number:05d}.index" for group in ("", "1/") for number in range(3)]

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()
        for key in (*keys, "tag/00000001-0/other"):
            await world.honest(f"before {key}", partial(_put_old, key))

        async def remove(store: PosixStore) -> None:
            await store.delete_each(keys)
            returned.append(True)

        struck = await crash.strikes(world.disk, [world.spawn("a", remove)])
        if not struck:
            world.disk.power_cut()
        for key in keys:
            assert await world.content(key) in ({None} if returned else {OLD, None})
        assert await world.content("tag/00000001-0/other") == OLD
        return struck

    return scenario


async def _put_old(key: str, store: PosixStore) -> None:
    await store.put(key, OLD)


def several_at_once(view: View = ProcessDisk) -> Scenario:
    """STORE-1 for calls of one process that share the syncs of their directories: each is durable once it returned."""
    keys = [f"tag/00000001-0/{number:05d}.index" for number in range(4)]

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[str]()

        async def create(store: PosixStore, key: str) -> None:
            assert await store.put_if_absent(key, NEW)
            returned.append(key)
            await store.stat(key)

        async def create_all(store: PosixStore) -> None:
            await asyncio.gather(*(create(store, key) for key in keys))

        struck = await crash.strikes(world.disk, [world.spawn("a", create_all)])
        if not struck:
            world.disk.power_cut()
        for key in keys:
            assert await world.content(key) in ({NEW} if key in returned else {NEW, None})
        return struck

    return scenario


def undurable(view: View = ProcessDisk) -> Scenario:
    """STORE-1 and STORE-5 with `durable=False`: a power cut may undo calls, and harms nothing else. What is settled stays."""

    async def scenario(crash: Crash) -> bool:
        world, settled = CrashWorld(view), list[bool]()
        await world.honest("before", prepare)

        async def create(store: PosixStore) -> None:
            assert await store.put_if_absent("tag/00000001-0/vote", NEW, durable=False)
            assert not await store.put_if_absent("tag/00000001-0/vote", OLD, durable=False)
            assert await content(store, "tag/00000001-0/vote") == NEW
            await store.settle("tag/00000001-0/vote")
            settled.append(True)
            await store.put("tag/other", OLD)
            await store.delete("tag/other", durable=False)
            assert await content(store, "tag/other") is None

        struck = await crash.strikes(world.disk, [world.spawn("a", create)])
        if not struck:
            world.disk.power_cut()
        assert await world.content() == OLD
        assert await world.content("tag/other") in {OLD, None}
        if settled:
            assert await world.content("tag/00000001-0/vote") == NEW
        return struck

    return scenario


def put_while_emptied(view: View = ProcessDisk) -> Scenario:
    """STORE-1 and STORE-5 together: a directory that one process empties and removes while another puts an object into it."""

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()
        await world.honest("before", lambda store: store.put("tag/00000001-0/left-over", OLD))

        async def create(store: PosixStore) -> None:
            returned.append(await store.put_if_absent(KEY, NEW))

        async def remove(store: PosixStore) -> None:
            await store.delete("tag/00000001-0/left-over")

        struck = await crash.strikes(world.disk, [world.spawn("a", create), world.spawn("b", remove)])
        if not struck:
            world.disk.power_cut()
        assert await world.content() in ({NEW} if returned else {NEW, None})
        return struck

    return scenario


def put_in_a_root_made_again(view: View = ProcessDisk) -> Scenario:
    """STORE-1 for a store that is open for longer than its root is there: the next job makes the root again,
    and begins in it.
    """

    async def scenario(crash: Crash) -> bool:
        world, returned = CrashWorld(view), list[bool]()
        before, anew = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def outlive(store: PosixStore) -> None:
            assert await store.put_if_absent(PASSING, OLD)
            before.set()
            await OwnId(store, await anew).check()
            returned.append(await store.put_if_absent(PASSING, NEW))

        task = world.spawn("a", outlive)
        await before.wait()
        world.remove_root()
        anew.set_result(await world.honest("the next job", made_id))
        struck = await crash.strikes(world.disk, [task])
        if not struck:
            world.disk.power_cut()
        assert await world.content(PASSING) in ({NEW} if returned else {NEW, None})
        return struck

    return scenario


SCENARIOS: list[Callable[[View], Scenario]] = [
    put_if_absent,
    lost_put_if_absent,
    put,
    put_if_match,
    large_object,
    replacement,
    settle,
    delete,
    delete_several,
    several_at_once,
    undurable,
    put_while_emptied,
    put_in_a_root_made_again,
]


# --- races ------------------------------------------------------------------------------------------------------


def one_winner(seed: int, view: View = ProcessDisk) -> None:
    """STORE-1: five processes create one object, one of them dies on the way: one winner, and its bytes are what all see."""

    async def main() -> None:
        world = CrashWorld(view)
        won: list[bytes] = []
        seen: set[bytes | None] = set()

        def creates(data: bytes) -> Work:
            async def create(store: PosixStore) -> None:
                if await store.put_if_absent(KEY, data):
                    won.append(data)
                seen.add(await content(store, KEY))

            return create

        tasks = [world.spawn(name, creates(name.encode() * 1000)) for name in "abcde"]
        await Crash(1 + seed % 70, lambda disk, _: disk.kill("a")).strikes(world.disk, tasks[1:])
        await asyncio.gather(*tasks[1:])
        assert len(won) <= 1
        assert len(seen) == 1
        assert not won or seen == set(won)
        assert won or seen == {b"a" * 1000}
        world.disk.power_cut()
        assert {await world.content()} == seen

    simloop.run(seed, main())


def nothing_overwritten(seed: int, view: View = ProcessDisk) -> None:
    """STORE-2: processes that count up one object by compare and replace lose no step, even if some die or are paused."""

    async def main() -> None:
        world, steps = CrashWorld(view), list[int]()

        async def count(store: PosixStore) -> None:
            for _ in range(3):
                while True:
                    found = await content(store, "latest")
                    value = int(found or b"0") + 1
                    if await store.put_if_match("latest", found, b"%d" % value):
                        steps.append(value)
                        break

        tasks = [world.spawn(name, count) for name in "abcd"]
        world.disk.pause("b")
        await Crash(10 + seed % 60, lambda disk, _: disk.kill("a")).strikes(world.disk, [tasks[0], *tasks[2:]])
        world.disk.resume("b")
        await asyncio.gather(*tasks[1:])
        assert len(steps) == len(set(steps))
        world.disk.power_cut()
        # One more than was counted: the dead one may have replaced without learning of it.
        assert int(await world.content("latest") or b"0") in {max(steps), max(steps) + 1}

    simloop.run(seed, main())
