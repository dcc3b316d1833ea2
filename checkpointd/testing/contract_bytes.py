"""The part of the store contract suite that is about bytes: large objects written in parts, and reading them back."""

from __future__ import annotations

import asyncio
import mmap
import random
from itertools import pairwise

import pytest

from checkpointd.errors import DamagedError, NotFoundError, StoreError
from checkpointd.store.base import Store

MIB = 1024 * 1024


class BytesContract:
    """Half of `checkpointd.testing.contract.StoreContract`; takes the same fixture `store`."""

    # --- S3: large objects ---

    @pytest.mark.parametrize("reserved", [0, 3 * MIB + 17, 8 * MIB], ids=["no hint", "exact hint", "larger hint"])
    async def test_s3_unaligned_parts_in_any_order_at_once(self, store: Store, reserved: int) -> None:
        body = random.Random(5).randbytes(3 * MIB + 17)
        parts = _cut(body, random.Random(6), 60)
        writer = await store.open_writer("t/a/00000-0.chunks", size_hint=reserved)
        await asyncio.gather(*(writer.write_at(offset, part) for offset, part in parts))
        await writer.finish(len(body))
        assert await store.get("t/a/00000-0.chunks") == body

    async def test_s3_aligned_parts_from_mapped_memory(self, store: Store) -> None:
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

    async def test_s3_aligned_memory_at_every_kind_of_offset(self, store: Store) -> None:
        """Parts that begin and end inside a block, next to parts that fill whole ones."""
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

    async def test_s3_an_empty_large_object(self, store: Store) -> None:
        writer = await store.open_writer("nothing", size_hint=MIB)
        await writer.write_at(0, b"")
        await writer.finish(0)
        assert await store.stat("nothing") == 0

    async def test_s3_finish_cuts_what_was_written(self, store: Store) -> None:
        writer = await store.open_writer("cut")
        await writer.write_at(0, bytearray(b"0123456789"))
        await writer.finish(4)
        assert await store.get("cut") == b"0123"

    async def test_s3_an_existing_key_is_refused_and_unharmed(self, store: Store) -> None:
        await store.put("taken", b"mine")
        with pytest.raises(StoreError, match="taken"):
            await store.open_writer("taken", size_hint=100)
        assert await store.get("taken") == b"mine"

    async def test_s3_one_of_many_racing_writers_gets_the_key(self, store: Store) -> None:
        opened = await asyncio.gather(*(store.open_writer("one") for _ in range(8)), return_exceptions=True)
        writers = [writer for writer in opened if not isinstance(writer, BaseException)]
        assert len(writers) == 1
        assert all(isinstance(error, StoreError) for error in opened if isinstance(error, BaseException))
        await writers[0].write_at(0, b"body")
        await writers[0].finish(4)
        assert await store.get("one") == b"body"

    async def test_s3_discard_drops_the_object_and_frees_its_key(self, store: Store) -> None:
        for _ in range(2):
            writer = await store.open_writer("again")
            await writer.write_at(0, b"torn")
            await writer.discard()
            await writer.discard()
            assert await store.stat("again") is None
            with pytest.raises(StoreError, match="again"):
                await writer.finish(4)
        assert await store.stat("again") is None

    async def test_s3_discard_after_finish_does_nothing(self, store: Store) -> None:
        writer = await store.open_writer("kept")
        await writer.write_at(0, b"whole")
        await writer.finish(5)
        await writer.discard()
        assert await store.get("kept") == b"whole"

    # --- S6 and reading ---

    async def test_s6_reading_what_is_not_there_names_it(self, store: Store) -> None:
        await store.put("there/object", b"x")
        for key in ("missing", "missing/too", "there", "there/object/below"):
            with pytest.raises(NotFoundError, match=key):
                await store.get(key)
            with pytest.raises(NotFoundError, match=key):
                await store.get_range(key, 0, memoryview(bytearray(1)))
            assert await store.stat(key) is None

    async def test_s6_get_refuses_more_than_was_allowed(self, store: Store) -> None:
        await store.put("object", b"12345")
        assert await store.get("object", size_max=5) == b"12345"
        for size_max in (4, 0):
            with pytest.raises(DamagedError, match="object") as caught:
                await store.get("object", size_max=size_max)
            assert caught.value.key == "object"

    @pytest.mark.parametrize(("offset", "size"), [(0, 1000), (0, 1), (999, 1), (500, 500), (17, 300), (0, 0), (1000, 0)])
    async def test_s6_get_range_fills_what_it_is_given(self, store: Store, offset: int, size: int) -> None:
        body = random.Random(10).randbytes(1000)
        await store.put("object", body)
        out = bytearray(size)
        await store.get_range("object", offset, memoryview(out))
        assert out == body[offset : offset + size]

    @pytest.mark.parametrize(("offset", "size"), [(0, 1001), (1000, 1), (999, 2), (5000, 1)])
    async def test_s6_get_range_past_the_end_is_damage(self, store: Store, offset: int, size: int) -> None:
        await store.put("object", bytes(1000))
        with pytest.raises(DamagedError, match="object") as caught:
            await store.get_range("object", offset, memoryview(bytearray(size)))
        assert caught.value.key == "object"

    async def test_s6_many_ranges_at_once_into_one_buffer(self, store: Store) -> None:
        body = random.Random(11).randbytes(2 * MIB + 5)
        await store.put("object", body)
        out = memoryview(bytearray(len(body)))
        ranges = _cut(body, random.Random(12), 40)
        await asyncio.gather(
            *(store.get_range("object", offset, out[offset : offset + len(part)]) for offset, part in ranges),
        )
        assert out == body


def _cut(body: bytes, rng: random.Random, parts: int) -> list[tuple[int, bytes]]:
    """`body` in parts of odd sizes, shuffled, each with its offset."""
    cuts = [0, *sorted(rng.sample(range(1, len(body)), parts - 1)), len(body)]
    cut = [(a, body[a:b]) for a, b in pairwise(cuts)]
    rng.shuffle(cut)
    return cut
