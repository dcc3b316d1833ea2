"""Reading chunks: which are read together, how much is held at once, and that nothing unverified is handed over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import encode
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.config import LoadConfig
from checkpointd.errors import CodecError, FormatError
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.indexes import Chunk, Index, TensorEntry
from checkpointd.layout.manifest import ObjectRef
from checkpointd.pipeline.read.chunks import Budget, group_chunks
from checkpointd.pipeline.read.decode import decoded
from checkpointd.pipeline.read.index import entries_by_fqn
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd.pipeline.shard import Bytes
from checkpointd.store.base import Capabilities
from checkpointd.store.memory import MemoryStore

T = TypeVar("T")

PREFIX, NAME = "tag/00000001-0", "00000-0.chunks"
GAP_BYTES = 64 << 10


def entry(fqn: str, *chunks: Chunk) -> TensorEntry:
    count = sum(chunk.raw for chunk in chunks)
    return TensorEntry(fqn, "uint8", (count,), whole((count,)), "rank", chunks)


def index(size: int, *entries: TensorEntry) -> Index:
    return Index(
        tag="tag",
        attempt="00000001-0",
        rank=0,
        world_size=1,
        step=1,
        objects=(ObjectRef(name=NAME, size=size),),
        tensors=entries,
        aliases=(),
        excluded=(),
        tree=b"\xc0",
    )


def stored(data: bytes, offset: int = 0, codec: str = "raw") -> tuple[bytes, Chunk]:
    """The stored bytes of `data` and the chunk that describes them."""
    part = bytes(encode(data, codec=codec, itemsize=1, kind="other"))
    return part, Chunk(0, offset, len(part), len(data), codec, None if codec == "raw" else xxh3_64(part), xxh3_128(data))


def wants(chunk: Chunk, start: int) -> ChunkRead:
    return ChunkRead(f"{PREFIX}/00000-{chunk.object}.chunks", 0, entry("t", chunk), chunk, start)


async def store_of(data: bytes) -> MemoryStore:
    store = MemoryStore()
    await store.put(f"{PREFIX}/{NAME}", data)
    return store


# --- which chunks are read together ------------------------------------------------------------------------------------


@st.composite
def wanted(draw: st.DrawFn) -> list[ChunkRead]:
    """Chunks of two objects, side by side or with gaps, now and then the very same bytes twice, in any order."""
    found: list[Chunk] = []
    for number in range(2):
        offset = 0
        for _ in range(draw(st.integers(0, 8))):
            offset += draw(st.sampled_from([0, 0, 100, GAP_BYTES, GAP_BYTES + 1]))
            size = draw(st.integers(1, 300_000))
            found += [Chunk(number, offset, size, size, "raw", None, bytes(16))] * draw(st.sampled_from([1, 1, 1, 2]))
            offset += size
    return [wants(chunk, n) for n, chunk in enumerate(draw(st.permutations(found)))]


@given(wanted(), st.sampled_from([1, 100_000, 1 << 20]))
def test_every_chunk_is_read_once_inside_its_group(items: list[ChunkRead], block_bytes: int) -> None:
    groups = group_chunks(items, block_bytes, GAP_BYTES)
    assert sorted(item.start for group in groups for item in group.wanted) == list(range(len(items)))
    for group in groups:
        chunks = [item.chunk for item in group.wanted]
        assert {item.key for item in group.wanted} == {group.key}
        assert (group.start, group.stop) == (min(c.offset for c in chunks), max(c.offset + c.stored for c in chunks))


@given(wanted(), st.sampled_from([1, 100_000, 1 << 20]))
def test_no_group_reads_across_a_wide_gap(items: list[ChunkRead], block_bytes: int) -> None:
    for group in group_chunks(items, block_bytes, GAP_BYTES):
        spans = sorted((item.chunk.offset, item.chunk.offset + item.chunk.stored) for item in group.wanted)
        for (_, stop), (start, _) in pairwise(spans):
            assert start - stop <= GAP_BYTES


# --- what is held at once ----------------------------------------------------------------------------------------------


async def test_the_budget_lets_in_as_many_as_fit_and_a_giant_alone() -> None:
    budget, inside, most = Budget(100), [0], [0]

    async def take(nbytes: int) -> None:
        async with budget.hold(nbytes):
            inside[0] += nbytes
            most[0] = max(most[0], inside[0])
            assert inside[0] <= max(100, nbytes)
            for _ in range(5):
                await asyncio.sleep(0)
            inside[0] -= nbytes

    await asyncio.gather(*(take(n) for n in (40, 60, 30, 1000, 100, 1, 99, 5000, 50, 50)))
    assert most[0] == 5000
    async with budget.hold(100):
        pass


async def test_the_budget_gets_back_what_a_failed_or_cancelled_work_held() -> None:
    budget = Budget(100)
    with pytest.raises(ValueError, match="broken"):
        async with budget.hold(80):
            raise ValueError("broken")
    async with budget.hold(100):
        waiting = asyncio.ensure_future(budget.hold(1).__aenter__())
        for _ in range(5):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with budget.hold(100):
        pass


class CountingStore(MemoryStore):
    """Takes some turns of the loop for every read, and counts how many are under way at once."""

    at_once = most = 0

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        for _ in range(10):
            await asyncio.sleep(0)
        await super().get_range(key, offset, out)
        self.at_once -= 1


@pytest.mark.parametrize(("budget_mib", "at_once"), [(1, 1), (5, 2), (64, 6)])
async def test_as_many_chunks_are_read_at_once_as_the_budget_has_room_to_decode(budget_mib: int, at_once: int) -> None:
    """Each of six chunks needs a little more than 2 MiB: its stored bytes, and 1 MiB as decoded and as handed over."""
    parts, offset = [], 0
    for _ in range(6):
        parts.append(stored(bytes(1 << 20), offset, "zstd"))
        offset += len(parts[-1][0])
    store = CountingStore()
    await store.put(f"{PREFIX}/{NAME}", b"".join(part for part, _ in parts))
    config = LoadConfig(reads=6, block_bytes=1, budget_bytes=budget_mib << 20)
    tensors = index(offset, entry("t", *(chunk for _, chunk in parts)))
    assert await read_tensors(store, PREFIX, tensors, {"t": None}, config) == []
    assert store.most == at_once


# --- verified before it is seen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
@pytest.mark.parametrize("change", ["stored byte", "checksum", "digest", "codec", "raw size"])
def test_read_1_a_chunk_whose_parts_disagree_is_refused(codec: str, change: str) -> None:
    part, chunk = stored(bytes(range(200)) * 5, codec=codec)
    changes: dict[str, dict[str, Any]] = {
        "stored byte": {},
        "checksum": {"checksum": None if chunk.checksum is None else chunk.checksum ^ 1},
        "digest": {"digest": bytes(16)},
        "codec": {"codec": "brotli"},
        "raw size": {"raw": chunk.raw + 1},
    }
    data = bytearray(part)
    data[-1] ^= change == "stored byte"
    if (codec, change) == ("raw", "checksum"):  # a chunk that is stored raw is checked by its digest alone
        assert decoded(msgspec.structs.replace(chunk, **changes[change]), np.frombuffer(part, np.uint8)).tobytes() == part
        return
    with pytest.raises(CodecError):
        decoded(msgspec.structs.replace(chunk, **changes[change]), np.frombuffer(bytes(data), np.uint8))


async def test_read_1_only_whole_chunks_reach_the_sink_and_every_other_is_named() -> None:
    parts = [stored(bytes([n]) * 100, n * 100) for n in range(4)]
    data = bytearray(b"".join(part for part, _ in parts))
    data[150] ^= 1
    data[350] ^= 1
    found = np.full(400, 0xEE, dtype=np.uint8)

    def sink(start: int, raw: Bytes) -> None:
        found[start : start + raw.nbytes] = raw

    store = await store_of(bytes(data))
    tensors = index(400, entry("a", *(chunk for _, chunk in parts[:3])), entry("b", parts[3][1]))
    damage = await read_tensors(store, PREFIX, tensors, {"a": sink, "b": None}, LoadConfig(block_bytes=1))
    assert [(error.key, error.fqn, error.rank) for error in damage] == [(f"{PREFIX}/{NAME}", fqn, 0) for fqn in "ab"]
    assert ["byte 100" in str(damage[0]), "byte 300" in str(damage[1])] == [True, True]
    assert found.tobytes() == bytes(100) + b"\xee" * 100 + b"\x02" * 100 + b"\xee" * 100


class ServerStore(CountingStore):
    """A store whose reads are requests: it asks for eight at once, of 64 KiB."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(alignment=1, shared=True, at_once=8, read_bytes=64 << 10)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        self.reads.append(sum(part.nbytes for part in parts))
        return await super().get_parts(key, offset, parts, then)

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []


@pytest.mark.parametrize(
    ("budget_kib", "read_kib", "at_once"),
    [(4096, 64, 8), (1024, 64, 8), (512, 32, 8), (256, 16, 8)],
    ids=["ample", "just enough", "smaller reads", "smaller still"],
)
async def test_read_3_a_store_gets_larger_reads_and_more_of_them_as_far_as_the_budget_goes(
    budget_kib: int, read_kib: int, at_once: int
) -> None:
    """A read of raw chunks takes its size in the buffer, and as much in the store."""
    parts, offset = [], 0
    for _ in range(256):
        parts.append(stored(bytes(8 << 10), offset))
        offset += 8 << 10
    store = ServerStore()
    await store.put(f"{PREFIX}/{NAME}", b"".join(part for part, _ in parts))
    config = LoadConfig(reads=1, block_bytes=8 << 10, budget_bytes=budget_kib << 10)
    tensors = index(offset, entry("t", *(chunk for _, chunk in parts)))
    assert await read_tensors(store, PREFIX, tensors, {"t": None}, config) == []
    assert set(store.reads) == {read_kib << 10}
    assert store.most == at_once
    assert store.most * 2 * max(store.reads) <= config.budget_bytes


def test_tensors_in_parts_are_refused_by_a_reader_of_whole_ones() -> None:
    chunk = Chunk(0, 0, 8, 8, "raw", None, bytes(16))
    entries = index(8, entry("a", chunk))
    assert list(entries_by_fqn(entries)) == ["a"]
    for part in (
        TensorEntry("a", "uint8", (2, 8), Box((1, 0), (1, 8)), "rank", (chunk,)),
        TensorEntry("a", "uint8", (8,), whole((8,)), "global", (chunk,)),
    ):
        with pytest.raises(FormatError, match="rank 0 of tag stored only a part of a, which is its own"):
            entries_by_fqn(index(8, part))
