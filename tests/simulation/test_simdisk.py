"""Simulated processes on the simulated disk keep SIMDISK-1 to SIMDISK-5 (`checkpointd/testing/simdisk.py`)."""

from __future__ import annotations

import asyncio
import errno

import pytest

from checkpointd.testing.simdisk import PAGE_BYTES, ProcessDisk, SimDisk, SimLock
from checkpointd.testing.simloop import run
from checkpointd.testing.simstorage import Effect


async def write_file(view: ProcessDisk, path: str, data: bytes) -> None:
    file = await view.create(path)
    await file.write_at(0, data)
    await file.sync()
    await file.close()


def kinds(disk: SimDisk) -> list[str]:
    return [effect.kind for effect in disk.trace if isinstance(effect, Effect)]


def test_effects_are_numbered_and_traced() -> None:  # SIMDISK-1
    async def main() -> None:
        disk = SimDisk()
        view = disk.process("a")

        async def work() -> None:
            await view.make_directory("/root/d")
            await write_file(view, "/root/d/x", b"12")
            await view.sync_directory("/root/d")
            await view.link("/root/d/x", "/root/d/y")
            await view.rename("/root/d/x", "/root/d/z")
            await view.unlink("/root/d/y")
            assert await view.read("/root/d/z", 10) == b"12"

        await view.process.spawn(work())
        assert kinds(disk) == ["mkdir", "create", "write", "fsync", "sync-dir", "link", "rename", "unlink"]
        assert [e.number for e in disk.trace if isinstance(e, Effect)] == list(range(1, 9))
        assert "a            write     /root/d/x 2 B" in disk.story()

    run(1, main())


@pytest.mark.parametrize("number", range(1, 8))
def test_after_a_kill_no_effect_happens(number: int) -> None:  # SIMDISK-2
    async def main() -> None:
        disk = SimDisk()
        view = disk.process("a")
        returned: list[str] = []

        def after(effect: Effect, done: bool) -> None:
            if effect.number == number:
                disk.kill("a")

        async def work() -> None:
            for name in "bcdefgh":
                await view.create(f"/root/{name}")
                returned.append(name)

        disk.after = after
        view.process.spawn(work())
        await asyncio.sleep(1000)
        assert disk.effects == number
        assert len(disk.fs.directory("/root").live) == number
        assert returned == list("bcdefgh"[: number - 1])

    run(number, main())


def test_a_kill_before_an_effect_prevents_it() -> None:  # SIMDISK-2
    async def main() -> None:
        disk = SimDisk()
        view = disk.process("a")

        def before(_: Effect) -> None:
            disk.kill("a")

        disk.before = before
        view.process.spawn(view.create("/root/x"))
        await asyncio.sleep(1000)
        assert not disk.fs.directory("/root").live

    run(0, main())


def test_a_large_write_may_stop_in_between() -> None:  # SIMDISK-2
    def size_after_kill(seed: int) -> int:
        async def main() -> int:
            disk = SimDisk()
            view = disk.process("a")

            def after(effect: Effect, done: bool) -> None:
                if effect.kind == "write":
                    disk.kill("a")

            disk.after = after
            view.process.spawn(write_file(view, "/root/x", b"x" * 4 * PAGE_BYTES))
            await asyncio.sleep(1000)
            return len(disk.fs.file("/root/x").data)

        return run(seed, main())

    assert {size_after_kill(seed) for seed in range(30)} == {PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES}


def test_a_paused_process_goes_on_where_it_stood() -> None:  # SIMDISK-3
    async def main() -> None:
        disk = SimDisk()
        view = disk.process("a")
        task = view.process.spawn(write_file(view, "/root/x", b"x"))
        disk.pause("a")
        await asyncio.sleep(1000)
        assert disk.effects == 0
        disk.resume("a")
        await task
        assert kinds(disk) == ["create", "write", "fsync"]

    run(0, main())


async def hold(view: ProcessDisk, path: str, log: list[str]) -> None:
    lock = await view.locked(path)
    log.append(f"{view.process.name} in")
    await asyncio.sleep(1)
    log.append(f"{view.process.name} out")
    await lock.release()


def test_a_killed_holder_lets_go_and_a_paused_one_does_not() -> None:  # SIMDISK-2, SIMDISK-3
    async def main() -> None:
        disk = SimDisk()
        log: list[str] = []
        first, second = disk.process("a"), disk.process("b")

        async def keep() -> SimLock:
            return await first.locked("/root/lock")

        await first.process.spawn(keep())
        waiting = second.process.spawn(hold(second, "/root/lock", log))
        disk.pause("a")
        await asyncio.sleep(1000)
        assert not log
        disk.kill("a")
        await waiting
        assert log == ["b in", "b out"]

    run(0, main())


def test_a_lock_is_on_the_file_not_on_its_name() -> None:
    async def main() -> None:
        disk = SimDisk()
        view = disk.process("a")

        async def work() -> None:
            await view.locked("/root/lock")
            await view.unlink("/root/lock")
            await view.locked("/root/lock")

        await view.process.spawn(work())

    run(0, main())


def test_calls_in_flight_overtake_each_other() -> None:  # SIMDISK-4
    async def main() -> str:
        disk = SimDisk()
        view = disk.process("a")

        async def work() -> None:
            await asyncio.gather(*(view.create(f"/root/{name}") for name in "xyz"))

        await view.process.spawn(work())
        return "".join(e.path[-1] for e in disk.trace if isinstance(e, Effect))

    assert {run(seed, main()) for seed in range(60)} == {"xyz", "xzy", "yxz", "yzx", "zxy", "zyx"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", ["create", "write", "fsync", "sync-dir", "link", "rename", "mkdir"])
def test_any_effect_may_be_refused(kind: str, number: int) -> None:  # SIMDISK-5
    async def main() -> None:
        disk = SimDisk()
        view = disk.process("a")
        disk.before = lambda effect: number if effect.kind == kind else None

        async def work() -> None:
            await view.make_directory("/root/d")
            await write_file(view, "/root/d/x", b"x" * 1000)
            await view.sync_directory("/root/d")
            await view.link("/root/d/x", "/root/d/y")
            await view.rename("/root/d/y", "/root/d/z")

        with pytest.raises(OSError, match=r".") as caught:
            await view.process.spawn(work())
        assert caught.value.errno == number
        assert kinds(disk)[-1] == kind

    run(0, main())


def test_a_refused_write_leaves_a_part_of_it() -> None:  # SIMFS-7
    def left(seed: int) -> int:
        async def main() -> int:
            disk = SimDisk()
            view = disk.process("a")
            disk.before = lambda effect: errno.ENOSPC if effect.kind == "write" else None
            with pytest.raises(OSError, match="space"):
                await view.process.spawn(write_file(view, "/root/x", b"x" * 100))
            return len(disk.fs.file("/root/x").data)

        return run(seed, main())

    sizes = {left(seed) for seed in range(100)}
    assert len(sizes) > 20
    assert max(sizes) < 100


def test_memory_that_changes_under_a_write_is_found_out() -> None:
    async def main() -> bytes:
        disk = SimDisk()
        view = disk.process("a")

        async def work() -> bytes:
            file = await view.create("/root/x")
            memory = bytearray(b"old")
            task = asyncio.ensure_future(file.write_at(0, memory))
            await asyncio.sleep(0)
            memory[:] = b"new"
            await task
            return await view.read("/root/x", 10)

        return await view.process.spawn(work())

    assert run(0, main()) == b"new"


def test_a_call_from_outside_the_process_is_a_fault_of_the_test() -> None:
    async def main() -> None:
        view = SimDisk().process("a")
        with pytest.raises(RuntimeError, match="spawn"):
            await view.create("/root/x")

    run(0, main())
