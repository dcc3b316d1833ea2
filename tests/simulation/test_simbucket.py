"""Simulated processes on the simulated bucket keep SIMBUCKET-1 to SIMBUCKET-11 (`checkpointd/testing/simbucket.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from typing_extensions import Buffer

from checkpointd.errors import NotFoundError, StoreError
from checkpointd.store.base import Entry
from checkpointd.testing.simbucket import LATE_S_MAX, RETRY_S, Fate, Request, SimBucket, SimClient, Trouble
from checkpointd.testing.simloop import run
from checkpointd.testing.simstorage import Effect

Work = Callable[[SimClient], Coroutine[Any, Any, Any]]


def told(*fates: Fate, kind: str = "") -> Callable[[Request], Fate | None]:
    """These fates for the first requests of `kind`, in this order; all others are served."""
    left = list(fates)
    return lambda request: left.pop(0) if left and kind in ("", request.kind) else "served"


def in_process(work: Work, seed: int = 1, *fates: Fate, kind: str = "", **options: Any) -> SimBucket:
    """Run `work` in a process of its own, and what is on its way to its end. Returns the bucket."""

    async def main() -> SimBucket:
        bucket = SimBucket(**options)
        bucket.before = told(*fates, kind=kind)
        client = bucket.process("a")
        await client.process.spawn(work(client))
        await asyncio.sleep(2 * LATE_S_MAX)
        return bucket

    return run(seed, main())


def kinds(bucket: SimBucket) -> list[str]:
    return [effect.kind for effect in bucket.trace if isinstance(effect, Effect)]


def data(bucket: SimBucket) -> dict[str, bytes]:
    return {key: found.data for key, found in bucket.state.objects.items()}


async def parts_of(*parts: bytes) -> AsyncIterator[Buffer]:
    for part in parts:
        yield part


def test_what_changed_nothing_is_told_to_after() -> None:  # SIMBUCKET-11
    seen: list[tuple[str, bool]] = []

    async def work(client: SimClient) -> None:
        client.bucket.after = lambda effect, done: seen.append((effect.kind, done))
        await client.create("x", b"", "m")
        await client.create("x", b"", "m")
        await client.delete(["x"])
        await client.delete(["x"])

    in_process(work)
    assert seen == [("create", True), ("create", False), ("delete", True), ("delete", False)]


def test_reads_show_what_was_answered_and_nothing_torn() -> None:  # SIMBUCKET-1
    async def work(client: SimClient) -> None:
        for size in (1, 100, 5):
            await client.put("t/x", bytes(size))
            found = await client.look("t/x")
            assert found is not None
            assert (found.size, found.mark) == (size, "")
            assert await client.list("t") == [Entry("x", size, False)]
            assert await client.get("t/x", 1000) == (bytes(size), found)
        assert await client.get("t/x", 4) == 5
        assert await client.get_range("t/x", 3, 10) == bytes(2)
        assert await client.get_range("t/x", 7, 10) == b""
        await client.delete(["t/x"])
        assert await client.look("t/x") is None
        assert await client.list("") == []
        for read in (client.get("t/x", 1), client.get_range("t/x", 0, 1)):
            with pytest.raises(NotFoundError, match="t/x"):
                await read

    in_process(work)


def test_memory_that_is_changed_too_early_is_noticed() -> None:  # SIMBUCKET-1
    async def work(client: SimClient) -> None:
        memory = bytearray(b"old")
        put = asyncio.ensure_future(client.put("x", memory))
        await asyncio.sleep(0)
        memory[:] = b"new"
        await put

    assert data(in_process(work)) == {"x": b"new"}


@pytest.mark.parametrize("fate", ["lost", "unanswered", "late"])
def test_memory_may_be_changed_once_the_request_has_failed(fate: Fate) -> None:  # SIMBUCKET-3
    async def work(client: SimClient) -> None:
        memory = bytearray(b"old")
        with pytest.raises(StoreError, match="not answered"):
            await client.put("x", memory)
        memory[:] = b"new"

    for seed in range(10):
        assert data(in_process(work, seed, fate)) == ({} if fate == "lost" else {"x": b"old"})


def test_a_listing_reads_page_after_page() -> None:  # SIMBUCKET-2
    shown: set[str] = set()

    async def work(client: SimClient) -> None:
        for name in ("c", "d/1", "d/2", "e"):
            await client.put(name, b"")
        listing = asyncio.ensure_future(client.list(""))
        for name in ("a", "f"):
            await client.put(name, b"")
        found = [entry.name for entry in await listing]
        assert found == sorted(set(found))
        assert {"c", "d", "e"} <= set(found)
        shown.add("".join(found))
        assert [entry.name for entry in await client.list("")] == ["a", "c", "d", "e", "f"]

    for seed in range(40):
        in_process(work, seed, page=2)
    assert "cdef" in shown  # without the one that was put first


def test_a_late_request_happens_after_its_caller_was_told_that_it_failed() -> None:  # SIMBUCKET-3
    seen: set[bool] = set()

    async def work(client: SimClient) -> None:
        with pytest.raises(StoreError):
            await client.create("x", b"late", "m")
        seen.add(await client.create("x", b"next", "n"))

    late = [data(in_process(work, seed, "late"))["x"] for seed in range(20)]
    assert set(late) == {b"late", b"next"}
    assert seen == {True, False}


def test_a_late_request_happens_after_its_process_has_died() -> None:  # SIMBUCKET-3
    async def main() -> float:
        bucket = SimBucket()
        bucket.before = told("late")
        client = bucket.process("a")
        died = 0.0

        async def work() -> None:
            nonlocal died
            with pytest.raises(StoreError):
                await client.put("x", b"")
            died = bucket.loop.time()
            bucket.kill("a")

        client.process.spawn(work())
        await asyncio.sleep(2 * LATE_S_MAX)
        assert kinds(bucket) == ["put"]
        return next(effect for effect in bucket.trace if isinstance(effect, Effect)).time_s - died

    assert max(run(seed, main()) for seed in range(30)) > LATE_S_MAX / 4


def test_a_repetition_is_told_that_it_lost_and_the_mark_tells_the_truth() -> None:  # SIMBUCKET-4
    async def work(client: SimClient) -> None:
        assert await client.create("x", b"1", "m") is False
        found = await client.look("x")
        assert found is not None
        assert found.mark == "m"
        client.bucket.before = told("repeated")
        assert await client.replace("x", b"2", found.version, "n") is False
        client.bucket.before = told("repeated", "slow down", "repeated")
        await client.put("y", b"")

    bucket = in_process(work, 1, "repeated")
    assert kinds(bucket) == ["create", "create", "replace", "replace", "put", "put", "put"]
    assert bucket.state.objects["x"].mark == "n"


def test_a_client_that_is_put_off_gives_up_in_the_end() -> None:  # SIMBUCKET-4
    hindered: list[str] = []

    async def work(client: SimClient) -> None:
        client.bucket.hindered = hindered.append
        began = client.bucket.loop.time()
        await client.put("y", b"")
        client.bucket.before = lambda _: "slow down"
        with pytest.raises(StoreError, match="503"):
            await client.put("x", b"")
        assert RETRY_S / 2 < client.bucket.loop.time() - began < 2 * RETRY_S

    assert kinds(in_process(work)) == ["put"]
    assert set(hindered) == {"a"}


def test_a_try_that_was_overtaken_may_undo_what_came_after_it() -> None:  # SIMBUCKET-4
    async def work(client: SimClient) -> None:
        await client.put("x", b"1")
        await client.put("x", b"2")

    assert {data(in_process(work, seed, "overtaken"))["x"] for seed in range(20)} == {b"1", b"2"}


def test_a_bucket_out_of_reach_comes_back() -> None:  # SIMBUCKET-5
    async def work(client: SimClient) -> None:
        bucket = client.bucket
        bucket.before = lambda _: None
        bucket.troubles = [Trouble(2.0, "lost"), Trouble(100.0, "lost", process="other"), Trouble(10.0, "slow down", 0.3)]
        while True:
            try:
                await client.put("x", b"")
                break
            except StoreError:
                assert bucket.loop.time() < 10
        assert bucket.loop.time() > 2
        for number in range(20):
            await client.put(str(number), b"")
        assert bucket.loop.time() < 60

    bucket = in_process(work)
    assert 1 <= sum("slow down" in str(line) for line in bucket.trace) < 20


# --- uploads ------------------------------------------------------------------------------------------------------------


def test_an_upload_appears_whole_and_its_parts_arrive_in_any_order() -> None:  # SIMBUCKET-6
    arrived: list[int] = []

    async def work(client: SimClient) -> None:
        state = client.bucket.state
        part = state.part

        def noted(upload: int, number: int, body: bytes) -> bool:
            arrived.append(number)
            return part(upload, number, body)

        async def watch() -> None:
            while (found := await client.look("x")) is None:
                await asyncio.sleep(0.001)
            assert found.size == 39

        state.part = noted  # type: ignore[method-assign]
        watching = asyncio.ensure_future(watch())
        await client.upload("x", parts_of(*[bytes([65 + n] * 2) for n in range(19)], b"!"), 2)
        assert client.requests.parts == 20
        await watching

    bucket = in_process(work)
    assert data(bucket) == {"x": b"".join(bytes([65 + n] * 2) for n in range(19)) + b"!"}
    assert bucket.state.uploads == {}
    assert sorted(arrived) == list(range(20)) != arrived


@pytest.mark.parametrize(
    ("kind", "fate", "appears", "stays"),
    [
        ("begin", "lost", False, False),
        ("begin", "unanswered", False, True),
        ("part", "lost", False, False),
        ("part", "repeated", True, False),
        ("complete", "lost", False, False),
        ("complete", "unanswered", True, False),
        ("complete", "denied", False, False),
    ],
)
def test_an_upload_fails_as_a_whole(kind: str, fate: Fate, appears: bool, stays: bool) -> None:  # SIMBUCKET-6
    async def work(client: SimClient) -> None:
        try:
            await client.upload("x", parts_of(b"ab", b"cd", b"e"), 2)
        except StoreError:
            assert fate != "repeated"

    bucket = in_process(work, 1, fate, kind=kind)
    assert data(bucket) == ({"x": b"abcde"} if appears else {})
    assert [upload.key for upload in bucket.state.uploads.values()] == (["x"] if stays else [])


def test_a_repeated_completion_fails_although_the_object_is_there() -> None:  # SIMBUCKET-6
    async def work(client: SimClient) -> None:
        with pytest.raises(StoreError, match="NoSuchUpload"):
            await client.upload("x", parts_of(b"ab"), 2)

    assert data(in_process(work, 1, "repeated", kind="complete")) == {"x": b"ab"}


def test_an_upload_whose_source_fails_is_aborted_unless_that_fails_too() -> None:  # SIMBUCKET-6
    async def broken() -> AsyncIterator[Buffer]:
        yield b"ab"
        raise KeyError("the source")

    async def work(client: SimClient) -> None:
        with pytest.raises(KeyError, match="the source"):
            await client.upload("x", broken(), 2)

    assert kinds(in_process(work))[-1] == "abort"
    assert in_process(work).state.uploads == {}
    left = in_process(work, 1, "lost", kind="abort").state.uploads.values()
    assert [(upload.key, upload.process) for upload in left] == [("x", "a")]


def test_a_part_is_released_once_the_server_has_it() -> None:  # BUCKET: `upload` keeps no part
    released: list[int] = []

    class Part(bytearray):
        def __del__(self) -> None:
            released.append(len(self))

    async def parts() -> AsyncIterator[Buffer]:
        for size in (4, 4, 3):
            yield Part(size)
        while len(released) < 3:
            await asyncio.sleep(0.001)

    async def work(client: SimClient) -> None:
        await client.upload("x", parts(), 4)

    assert data(in_process(work, 1, "repeated", kind="part")) == {"x": bytes(11)}


# --- removals, rights, and processes -------------------------------------------------------------------------------------


def test_a_removal_that_fails_may_have_removed_any() -> None:  # SIMBUCKET-7
    async def work(client: SimClient) -> None:
        for name in "abc":
            await client.put(name, b"")
        with pytest.raises(StoreError, match="removing"):
            await client.delete(list("abc"))

    left = {"".join(sorted(data(in_process(work, seed, "lost", kind="delete")))) for seed in range(20)}
    assert left == {"a", "b", "c"}


def test_missing_rights_are_told_at_once() -> None:  # SIMBUCKET-8
    async def work(client: SimClient) -> None:
        began = client.bucket.loop.time()
        with pytest.raises(StoreError, match="403"):
            await client.create("x", b"", "m")
        assert client.bucket.loop.time() - began < RETRY_S / 2

    assert kinds(in_process(work, 1, "denied")) == []


def test_a_power_cut_ends_processes_and_loses_nothing() -> None:  # SIMBUCKET-9
    async def main() -> None:
        bucket = SimBucket()
        clients = [bucket.process(name) for name in "ab"]
        answered: list[str] = []

        async def work(client: SimClient) -> None:
            for number in range(1000):
                key = f"{client.process.name}{number}"
                await client.put(key, b"")
                answered.append(key)

        for client in clients:
            client.process.spawn(work(client))
        await asyncio.sleep(1)
        bucket.power_cut()
        assert bucket.alive() == []
        told_before = len(answered)
        await asyncio.sleep(100)
        assert len(answered) == told_before < 1000
        assert set(answered) <= set(bucket.state.objects)

    run(1, main())


def test_a_request_of_a_killed_process_arrives_or_does_not() -> None:  # SIMBUCKET-10
    async def main() -> int:
        bucket = SimBucket()
        client = bucket.process("a")
        client.process.spawn(client.put("x", b""))
        await asyncio.sleep(0.0001)
        bucket.kill("a")
        await asyncio.sleep(100)
        return bucket.effects

    assert {run(seed, main()) for seed in range(20)} == {0, 1}


def test_a_paused_process_has_its_effect_and_learns_of_it_later() -> None:  # SIMBUCKET-10
    async def main() -> None:
        bucket = SimBucket()
        client = bucket.process("a")
        task = client.process.spawn(client.create("x", b"", "m"))
        await asyncio.sleep(0.0001)
        bucket.pause("a")
        await asyncio.sleep(100)
        assert bucket.effects == 1
        assert not task.done()
        bucket.resume("a")
        assert await task

    run(1, main())


@pytest.mark.parametrize("number", range(1, 6))
def test_after_a_kill_no_later_request_is_sent(number: int) -> None:  # SIMBUCKET-11
    async def main() -> None:
        bucket = SimBucket()
        client = bucket.process("a")
        bucket.after = lambda effect, _: bucket.kill("a") if effect.number == number else None

        async def work() -> None:
            for name in "bcdefgh":
                await client.put(name, b"")

        client.process.spawn(work())
        await asyncio.sleep(1000)
        assert bucket.effects == number

    run(number, main())


def test_only_the_owner_uses_a_client() -> None:
    async def main() -> None:
        client = SimBucket().process("a")
        with pytest.raises(RuntimeError, match="outside process"):
            await client.look("x")

    run(1, main())


def test_an_old_content_has_its_old_version_again_unless_versions_are_numbers() -> None:
    async def work(client: SimClient) -> None:
        versions = []
        for body in (b"1", b"2", b"1"):
            await client.put("x", body)
            found = await client.look("x")
            assert found is not None
            versions.append(found.version)
        assert (versions[0] == versions[2]) is (versions[0].version is None)
        assert versions[0] != versions[1]

    in_process(work)
    in_process(work, numbered=True)
