"""The store contract as a pytest suite: `checkpointd.store.base` states the invariants, and these tests check them.

The test module of a back end needs only this:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self) -> AsyncIterator[Store]:
            async with MyStore(...) as store:
                yield store

The store is empty at the start of every test. Each test names the invariants that it checks. Durability shows only in a power
cut, so each back end tests it itself. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from checkpointd.errors import ClosedError, DamagedError, NotFoundError, StoreError, UnreadableError, UsageError
from checkpointd.store.base import Entry, Store

MIB = 1024 * 1024


class BytesContract:
    """Half of `checkpointd.testing.contract.StoreContract`; takes the same fixture `store`."""

    # --- STORE-3: large objects ---

    @pytest.mark.parametrize("reserved", [0, 3 * MIB + 17, 8 * MIB], ids=["no hint", "exact hint", "larger hint"])
    async def test_store_3_unaligned_parts_in_any_order_at_once(self, store: Store, reserved: int) -> None:
        body = random.Random(5).randbytes(3 * MIB + 17)
        parts = _cut(body, random.Random(6), 60)
        writer = await store.open_writer("t/a/00000-0.chunks", size_hint=reserved)
        await asyncio.gather(*(writer.write_at(offset, part) for offset, part in parts))
        await writer.finish(len(body))
        assert await store.get("t/a/00000-0.chunks") == body

    async def test_store_3_aligned_parts_from_mapped_memory(self, store: Store) -> None:
        size, part = 4 * MIB, 256 * 1024
        arena = mmap.mmap(-1, size)
        arena.write(random.Random(7).randbytes(size))
        with memoryview(arena) as view:
            writer = await store.open_writer("image", size_hint=size)
            offsets = list(range(0, size, part))
            random.Random(8).shuffle(offsets)
            await asyncio.gather(*(writer.write_at(offset, view[offset : offset + part]) for offset in offsets))
            await writer.finish(size - 100)
        assert await store.get("image") == arena[: size - 100]

    async def test_store_3_aligned_memory_at_every_kind_of_offset(self, store: Store) -> None:
        """Parts that begin and end inside a block, next to parts that fill whole blocks."""
        size = MIB
        arena = mmap.mmap(-1, size)
        arena.write(random.Random(9).randbytes(size))
        cuts = [0, 1, 4095, 4096, 4097, 8192, 300_001, 300_002, 700_416, 704_512, 1_000_000, size]
        for shift in (0, 1, 4096):
            key = f"shifted/{shift}"
            with memoryview(arena) as view:
                writer = await store.open_writer(key)
                await writer.write_at(0, bytes(shift))
                await asyncio.gather(
                    *(writer.write_at(shift + a, view[a:b]) for a, b in pairwise(cuts)),
                )
                await writer.finish(shift + size)
            assert await store.get(key) == bytes(shift) + arena[:]

    async def test_what_is_read_past_the_cache_is_what_was_written(self, store: Store) -> None:
        body = random.Random(10).randbytes(2 * MIB + 4097)
        writer = await store.open_writer("t/a/00000-0.chunks")
        await writer.write_at(0, body)
        await writer.finish(len(body))
        await store.put("small", b"0123456789")
        uncached = store.uncached
        assert await uncached.get("small") == b"0123456789"
        assert await uncached.get("t/a/00000-0.chunks", size_max=len(body)) == body
        with pytest.raises(DamagedError):
            await uncached.get("small", size_max=9)
        for start, stop in (
            (0, len(body)),
            (1, 4096),
            (4095, 4097),
            (MIB - 1, 2 * MIB + 1),
            (len(body) - 1, len(body)),
            (5, 5),
        ):
            out = bytearray(stop - start)
            await uncached.get_range("t/a/00000-0.chunks", start, memoryview(out))
            assert out == body[start:stop]
        with pytest.raises(DamagedError, match="ends before byte"):
            await uncached.get_range("t/a/00000-0.chunks", len(body) - 10, memoryview(bytearray(11)))
        with pytest.raises(NotFoundError):
            await uncached.get("nothing")

    async def test_store_3_an_empty_large_object(self, store: Store) -> None:
        writer = await store.open_writer("nothing", size_hint=MIB)
        await writer.write_at(0, b"")
        await writer.finish(0)
        assert await store.stat("nothing") == 0

    async def test_store_3_finish_cuts_what_was_written(self, store: Store) -> None:
        writer = await store.open_writer("cut")
        await writer.write_at(0, bytearray(b"0123456789"))
        await writer.finish(4)
        assert await store.get("cut") == b"0123"

    async def test_store_3_an_existing_key_is_refused_and_unharmed(self, store: Store) -> None:
        await store.put("taken", b"mine")
        with pytest.raises(StoreError, match="taken"):
            await store.open_writer("taken", size_hint=100)
        assert await store.get("taken") == b"mine"

    async def test_store_3_one_of_many_racing_writers_gets_the_key(self, store: Store) -> None:
        opened = await asyncio.gather(*(store.open_writer("one") for _ in range(8)), return_exceptions=True)
        writers = [writer for writer in opened if not isinstance(writer, BaseException)]
        assert len(writers) == 1
        assert all(isinstance(error, StoreError) for error in opened if isinstance(error, BaseException))
        await writers[0].write_at(0, b"body")
        await writers[0].finish(4)
        assert await store.get("one") == b"body"

    async def test_store_3_discard_drops_the_object_and_frees_its_key(self, store: Store) -> None:
        for _ in range(2):
            writer = await store.open_writer("again")
            await writer.write_at(0, b"torn")
            await writer.discard()
            await writer.discard()
            assert await store.stat("again") is None
            with pytest.raises(StoreError, match="again"):
                await writer.finish(4)
        assert await store.stat("again") is None

    async def test_store_3_discard_after_finish_does_nothing(self, store: Store) -> None:
        writer = await store.open_writer("kept")
        await writer.write_at(0, b"whole")
        await writer.finish(5)
        await writer.discard()
        assert await store.get("kept") == b"whole"

    # --- STORE-2: large objects replaced whole ---

    @pytest.mark.parametrize("size", [0, 700, 300_001], ids=["empty", "small", "large"])
    async def test_store_2_a_large_object_is_replaced_when_its_writer_ends(self, store: Store, size: int) -> None:
        body = random.Random(11).randbytes(size)
        for old in (None, b"old" * 50_000):
            if old is not None:
                await store.put("t/large", old)
            writer = await store.open_replacement("t/large", size_hint=size)
            await writer.write_at(0, body)
            assert await store.stat("t/large") == (None if old is None else len(old))
            await writer.finish(size)
            assert await store.get("t/large") == body

    async def test_store_2_a_replacement_that_is_discarded_leaves_the_object(self, store: Store) -> None:
        await store.put("t/large", b"old")
        for _ in range(2):
            writer = await store.open_replacement("t/large")
            await writer.write_at(0, b"new")
            await writer.discard()
            with pytest.raises(StoreError, match="large"):
                await writer.finish(3)
        assert await store.get("t/large") == b"old"

    # --- STORE-6 and reading ---

    async def test_store_6_reading_what_is_not_there_names_it(self, store: Store) -> None:
        await store.put("there/object", b"x")
        for key in ("missing", "missing/too", "there", "there/object/below"):
            with pytest.raises(NotFoundError, match=key):
                await store.get(key)
            with pytest.raises(NotFoundError, match=key):
                await store.get_range(key, 0, memoryview(bytearray(1)))
            assert await store.stat(key) is None

    async def test_store_6_get_refuses_more_than_was_allowed(self, store: Store) -> None:
        await store.put("object", b"12345")
        assert await store.get("object", size_max=5) == b"12345"
        for size_max in (4, 0):
            with pytest.raises(DamagedError, match="object") as caught:
                await store.get("object", size_max=size_max)
            assert caught.value.key == "object"

    @pytest.mark.parametrize("count", [0, 1, 3, 200])
    async def test_store_6_many_objects_are_read_as_one_by_one(self, store: Store, count: int) -> None:
        keys = [f"tag/{number % 3}/{number:05d}" for number in range(count)]
        for number, key in enumerate(keys):
            if number % 7 != 1:
                await store.put(key, bytes(1 + number))
        found = await store.get_each(keys, size_max=150)
        for number, (key, one) in enumerate(zip(keys, found, strict=True)):
            if number % 7 == 1:
                assert isinstance(one, NotFoundError)
                assert key in str(one)
            elif number >= 150:
                assert isinstance(one, DamagedError)
                assert one.key == key
            else:
                assert one == bytes(1 + number)
        with pytest.raises(UsageError, match="not a key"):
            await store.get_each([*keys, "../outside"])

    @pytest.mark.parametrize(("offset", "size"), [(0, 1000), (0, 1), (999, 1), (500, 500), (17, 300), (0, 0), (1000, 0)])
    async def test_store_6_get_range_fills_what_it_is_given(self, store: Store, offset: int, size: int) -> None:
        body = random.Random(10).randbytes(1000)
        await store.put("object", body)
        out = bytearray(size)
        await store.get_range("object", offset, memoryview(out))
        assert out == body[offset : offset + size]

    @pytest.mark.parametrize(("offset", "size"), [(0, 1001), (1000, 1), (999, 2), (5000, 1)])
    async def test_store_6_get_range_past_the_end_is_damage(self, store: Store, offset: int, size: int) -> None:
        await store.put("object", bytes(1000))
        with pytest.raises(DamagedError, match="object") as caught:
            await store.get_range("object", offset, memoryview(bytearray(size)))
        assert caught.value.key == "object"

    async def test_store_6_many_ranges_at_once_into_one_buffer(self, store: Store) -> None:
        body = random.Random(11).randbytes(2 * MIB + 5)
        await store.put("object", body)
        out = memoryview(bytearray(len(body)))
        ranges = _cut(body, random.Random(12), 40)
        await asyncio.gather(
            *(store.get_range("object", offset, out[offset : offset + len(part)]) for offset, part in ranges),
        )
        assert out == body

    @pytest.mark.parametrize("count", [1, 3, 2500])
    async def test_one_read_fills_many_parts(self, store: Store, count: int) -> None:
        """More than a system call takes at once, and an empty one among them."""
        body = bytes(n % 251 for n in range(20_000))
        await store.put("object", body)
        parts = [memoryview(bytearray(1 + number % 7)) for number in range(count)]
        parts.insert(count // 2, memoryview(bytearray(0)))
        size = sum(part.nbytes for part in parts)
        found = await store.get_parts("object", 11, parts, lambda: b"".join(parts))
        assert found == body[11 : 11 + size]
        with pytest.raises(DamagedError, match="ends before byte"):
            await store.get_parts("object", len(body) - size + 1, parts, lambda: pytest.fail("there are too few bytes"))
        with pytest.raises(NotFoundError):
            await store.get_parts("other", 0, parts, lambda: pytest.fail("there is nothing"))

    @pytest.mark.parametrize("error", [OSError(28, "no space"), UnreadableError("no space"), NotFoundError("no space")])
    async def test_an_error_of_what_follows_a_read_is_not_one_of_the_storage(self, store: Store, error: Exception) -> None:
        await store.put("object", bytes(10))
        calls = 0

        def full() -> None:
            nonlocal calls
            calls += 1
            raise error

        with pytest.raises(type(error), match="no space") as caught:
            await store.get_parts("object", 0, [memoryview(bytearray(10))], full)
        assert caught.value is error
        assert calls == 1

    async def test_a_read_that_is_cancelled_ends_after_what_follows_it(self, store: Store) -> None:
        await store.put("object", bytes(10))
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            go_on.wait()
            ended.set()

        call = asyncio.ensure_future(store.get_parts("object", 0, [memoryview(bytearray(10))], slow))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended.is_set()


def _cut(body: bytes, rng: random.Random, parts: int) -> list[tuple[int, bytes]]:
    """`body` in parts of odd sizes, shuffled, each with its offset."""
    cuts = [0, *sorted(rng.sample(range(1, len(body)), parts - 1)), len(body)]
    cut = [(a, body[a:b]) for a, b in pairwise(cuts)]
    rng.shuffle(cut)
    return cut


RACERS = 32

ODD_KEYS = (
    "with space/and  two",
    "tab\there",
    "line\nbreak",
    "back\\slash",
    "quote'and\"quote",
    "per%20cent/%2e%2e",
    "…/多字节/ключ/🜁",
    "a..b/..c/d..",
    ".hidden/.file",
    "-rf",
    "*?[x]",
    "UPPER/upper",
    "upper/UPPER",
    "n" * 200 + "/" + "m" * 200,
)
BAD_KEYS = ("", "/", "/absolute", "a//b", "a/", "..", "../up", "a/../b", "a/..", "./a", "a/./b", "a\0b", "\ud800")


class StoreContract(BytesContract):
    """Subclass this, and override `store`."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    async def store(self) -> Store:
        """An empty store of the back end under test."""
        raise NotImplementedError("override the fixture `store`")

    # --- STORE-1: one winner ---

    async def test_store_1_first_create_wins_and_later_ones_change_nothing(self, store: Store) -> None:
        assert await store.put_if_absent("tag/attempt/outcome", b"first") is True
        assert await store.put_if_absent("tag/attempt/outcome", b"second, longer") is False
        assert await store.put_if_absent("tag/attempt/outcome", b"first") is False
        assert await store.get("tag/attempt/outcome") == b"first"

    async def test_store_1_one_of_many_racing_creators_wins_whole(self, store: Store) -> None:
        bodies = [bytes([n]) * (1000 + 37 * n) for n in range(RACERS)]
        won = await asyncio.gather(*(store.put_if_absent("race/new/outcome", body) for body in bodies))
        assert won.count(True) == 1
        assert await store.get("race/new/outcome") == bodies[won.index(True)]

    async def test_store_1_a_reader_sees_a_created_object_whole_or_not_at_all(self, store: Store) -> None:
        bodies = [bytes([n]) * (200_000 + n) for n in range(4)]
        seen = _watching(store, "race/outcome")
        await asyncio.gather(*(store.put_if_absent("race/outcome", body) for body in bodies))
        assert await seen() <= {None, *bodies}

    async def test_store_1_an_empty_object_is_an_object(self, store: Store) -> None:
        assert await store.put_if_absent("empty", b"") is True
        assert await store.put_if_absent("empty", b"x") is False
        assert await store.get("empty") == b""
        assert await store.stat("empty") == 0

    async def test_store_1_an_object_that_need_not_be_durable_is_created_once_as_well(self, store: Store) -> None:
        bodies = [bytes([n]) * (1000 + 37 * n) for n in range(RACERS)]
        won = await asyncio.gather(*(store.put_if_absent("race/vote", body, durable=False) for body in bodies))
        assert won.count(True) == 1
        assert await store.get("race/vote") == bodies[won.index(True)]
        assert await store.put_if_absent("race/vote", b"") is False
        await store.settle("race/vote")
        assert await store.get("race/vote") == bodies[won.index(True)]

    # --- STORE-2: replaced whole ---

    async def test_store_2_put_creates_and_replaces(self, store: Store) -> None:
        for body in (b"one", b"", b"three and longer", b"4"):
            await store.put("latest", body)
            assert await store.get("latest") == body

    async def test_store_2_a_reader_sees_the_old_bytes_or_the_new(self, store: Store) -> None:
        bodies = [bytes([n]) * (100_000 + 4096 * (n % 3) + n) for n in range(20)]
        await store.put("latest", bodies[0])
        seen = _watching(store, "latest")
        for body in bodies:
            await store.put("latest", body)
        assert await seen() <= set(bodies)
        assert await store.get("latest") == bodies[-1]

    async def test_store_2_racing_puts_leave_one_of_them_whole(self, store: Store) -> None:
        bodies = [bytes([n]) * (5000 + n) for n in range(RACERS)]
        await asyncio.gather(*(store.put("p/latest", body) for body in bodies))
        assert await store.get("p/latest") in bodies

    @pytest.mark.parametrize(
        "other", [b"", b"ol", b"olD", b"old+", b"o" * 100_000], ids=["empty", "less", "as long", "more", "much"]
    )
    async def test_store_2_put_if_match_compares_the_whole_content(self, store: Store, other: bytes) -> None:
        await store.put("latest", b"old")
        assert await store.put_if_match("latest", other, b"new") is False
        assert await store.get("latest") == b"old"
        assert await store.put_if_match("latest", b"old", b"new") is True
        assert await store.get("latest") == b"new"

    async def test_store_2_put_if_match_tells_absent_from_empty(self, store: Store) -> None:
        assert await store.put_if_match("a/latest", b"", b"x") is False
        assert await store.stat("a/latest") is None
        assert await store.put_if_match("a/latest", None, b"") is True
        assert await store.put_if_match("a/latest", None, b"x") is False
        assert await store.put_if_match("a/latest", b"", b"x") is True

    async def test_store_2_no_update_is_lost_between_racing_put_if_match(self, store: Store) -> None:
        rounds = 5

        async def count_up() -> None:
            for _ in range(rounds):
                while True:
                    seen = await store.get("counter")
                    if await store.put_if_match("counter", seen, str(int(seen) + 1).encode()):
                        break

        await store.put("counter", b"0")
        await asyncio.gather(*(count_up() for _ in range(8)))
        assert await store.get("counter") == str(8 * rounds).encode()

    async def test_store_1_store_2_creating_by_both_ways_has_one_winner(self, store: Store) -> None:
        for turn in range(10):
            key = f"both/{turn}"
            won = await asyncio.gather(store.put_if_absent(key, b"a"), store.put_if_match(key, None, b"b"))
            assert sorted(won) == [False, True]
            assert await store.get(key) == (b"a" if won[0] else b"b")

    # --- STORE-4: settle ---

    async def test_store_4_settle_of_what_is_there_and_what_is_not(self, store: Store) -> None:
        await store.put_if_absent("t/a/outcome", b"commit")
        await store.settle("t/a/outcome")
        assert await store.get("t/a/outcome") == b"commit"
        for key in ("t/a/vote", "t/a", "other"):
            with pytest.raises(NotFoundError, match=key):
                await store.settle(key)

    # --- STORE-5: delete ---

    async def test_store_5_delete_removes_one_object_and_no_other(self, store: Store) -> None:
        for name in ("a", "b", "c/d"):
            await store.put(f"tag/{name}", name.encode())
        await store.delete("tag/a")
        assert await store.stat("tag/a") is None
        assert await store.get("tag/b") == b"b"
        assert await store.get("tag/c/d") == b"c/d"
        await store.delete("tag/c/d", durable=False)
        assert await store.stat("tag/c/d") is None
        assert await store.get("tag/b") == b"b"

    @pytest.mark.parametrize("count", [0, 1, 3, 200])
    async def test_store_5_many_objects_are_removed_and_no_other(self, store: Store, count: int) -> None:
        keys = [f"tag/{number % 3}/{number:05d}" for number in range(count)]
        for key in (*keys[1:], "tag/1/other", "other"):
            await store.put(key, b"x")
        await store.delete_each(keys)
        assert [await store.stat(key) for key in keys] == [None] * count
        assert await store.list("tag/1") == [_object("other", 1)]
        assert await store.get("other") == b"x"
        with pytest.raises(UsageError, match="not a key"):
            await store.delete_each(["other", "../outside"])

    async def test_store_5_delete_of_nothing_succeeds(self, store: Store) -> None:
        await store.put("tag/a", b"x")
        for key in ("tag/b", "none/at/all", "tag", "tag/a/below"):
            await store.delete(key)
        assert await store.get("tag/a") == b"x"

    async def test_store_5_a_deleted_key_can_be_created_again(self, store: Store) -> None:
        for turn in range(3):
            assert await store.put_if_absent("t/a/outcome", bytes([turn])) is True
            await store.delete("t/a/outcome")
        assert await store.list("t/a") == []

    async def test_store_5_creators_and_deleters_share_a_prefix(self, store: Store) -> None:
        """Removing an empty directory never removes the place of a new object."""

        async def come_and_go(name: str) -> None:
            for turn in range(10):
                assert await store.put_if_absent(f"deep/er/{name}", bytes([turn]))
                assert await store.get(f"deep/er/{name}") == bytes([turn])
                await store.delete(f"deep/er/{name}")
                writer = await store.open_writer(f"deep/est/{name}")
                await writer.finish(0)
                await store.delete(f"deep/est/{name}")

        await asyncio.gather(*(come_and_go(str(n)) for n in range(8)))
        assert await store.list("deep/er") == []
        assert await store.put_if_absent("deep/er/last", b"")

    async def test_store_5_sweep_removes_no_object(self, store: Store) -> None:
        await store.put("t/a/outcome", b"commit")
        await store.put(".checkpointd/starts/00000001", b"me")
        assert await store.sweep() == 0
        assert await store.get("t/a/outcome") == b"commit"
        assert await store.get(".checkpointd/starts/00000001") == b"me"

    # --- names ---

    async def test_list_shows_the_children_of_one_prefix_in_order(self, store: Store) -> None:
        for key in ("b/2", "b/1/x", "b/1/y", "b/10", "bb/3", "a", "c/d/e/f"):
            await store.put(key, key.encode())
        assert await store.list("") == [_prefix(n) if n != "a" else _object("a", 1) for n in ("a", "b", "bb", "c")]
        assert await store.list("b") == [_prefix("1"), _object("10", 4), _object("2", 3)]
        assert await store.list("b/1") == [_object("x", 5), _object("y", 5)]
        assert await store.list("c/d") == [_prefix("e")]

    async def test_list_of_nothing_is_empty(self, store: Store) -> None:
        assert await store.list("") == []
        assert await store.list("missing/prefix") == []
        await store.put("object", b"x")
        assert await store.list("object") == []
        assert await store.list("obj") == []
        assert await store.list("object/below") == []

    async def test_list_shows_objects_and_nothing_of_the_stores_own(self, store: Store) -> None:
        await store.put_if_match("t/latest", None, b"1")
        writer = await store.open_writer("t/large")
        await writer.finish(0)
        assert [entry.name for entry in await store.list("")] == ["t"]
        assert [entry.name for entry in await store.list("t")] == ["large", "latest"]
        await store.put(".checkpointd/starts/00000001", b"me")
        assert [entry.name for entry in await store.list("")] == [".checkpointd", "t"]
        assert await store.list(".checkpointd") == [_prefix("starts")]

    async def test_odd_keys_name_objects_like_any_other(self, store: Store) -> None:
        for number, key in enumerate(ODD_KEYS):
            assert await store.put_if_absent(key, str(number).encode()) is True
        for number, key in enumerate(ODD_KEYS):
            assert await store.get(key) == str(number).encode()
            parent, _, name = key.rpartition("/")
            assert name in [entry.name for entry in await store.list(parent)]
        for key in ODD_KEYS:
            await store.delete(key)
        assert [await store.stat(key) for key in ODD_KEYS] == [None] * len(ODD_KEYS)

    @pytest.mark.parametrize("key", BAD_KEYS)
    async def test_bad_keys_are_refused_by_every_call(self, store: Store, key: str) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put_if_absent(key, b""),
            lambda: store.put(key, b""),
            lambda: store.put_if_match(key, None, b""),
            lambda: store.open_writer(key),
            lambda: store.open_replacement(key),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, memoryview(bytearray(1))),
            lambda: store.stat(key),
            lambda: store.delete(key),
            lambda: store.settle(key),
        ]
        if key:
            calls.append(lambda: store.list(key))
        for call in calls:
            with pytest.raises(UsageError):
                await call()
        assert await store.list("") == []

    # --- the store itself ---

    async def test_it_says_where_it_is_and_what_it_can_do(self, store: Store) -> None:
        assert store.url
        assert store.capabilities.alignment >= 1

    async def test_a_closed_store_refuses_every_call(self, store: Store) -> None:
        await store.put("object", b"x")
        await store.close()
        await store.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put("object", b""),
            lambda: store.get("object"),
            lambda: store.list(""),
            lambda: store.sweep(),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="closed"):
                await call()


def _object(name: str, size: int) -> Entry:
    return Entry(name, size, False)


def _prefix(name: str) -> Entry:
    return Entry(name, 0, True)


def _watching(store: Store, key: str) -> Callable[[], Awaitable[set[bytes | None]]]:
    """Read `key` in a loop. The returned function ends the loop and returns the values that were seen (None: absent)."""
    seen: set[bytes | None] = set()
    ended = asyncio.Event()

    async def watch() -> None:
        while not ended.is_set():
            seen.add(await _get_or_none(store, key))
            await asyncio.sleep(0)

    task = asyncio.create_task(watch())

    async def end() -> set[bytes | None]:
        ended.set()
        await task
        return seen

    return end


async def _get_or_none(store: Store, key: str) -> bytes | None:
    try:
        return await store.get(key)
    except NotFoundError:
        return None
