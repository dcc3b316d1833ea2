"""Runs of chunks that are read into their places, in pieces, where each read is a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec.checksum import xxh3_128
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError
from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Chunk, TensorEntry
from checkpointd.pipeline.read.chunks import group_chunks, read_chunks
from checkpointd.pipeline.read.plan import ChunkRead, Place
from checkpointd.pipeline.shard import Bytes
from checkpointd.store.base import Capabilities
from checkpointd.store.memory import MemoryStore

T = TypeVar("T")

KEY = "tag/00000001-0/00000-0.chunks"
PIECE, GAP = 1000, 300
CONFIG = LoadConfig(reads=3, block_bytes=PIECE, budget_bytes=16 * PIECE)


class Server(MemoryStore):
    """Each read is a request, which is noted: its first byte, and the byte after its last."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, int]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(alignment=1, shared=True, at_once=3, gap_bytes=GAP, read_bytes=PIECE)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        self.requests.append((offset, offset + sum(part.nbytes for part in parts)))
        return await super().get_parts(key, offset, parts, then)


class Loaded:
    """An object of chunks, and the memory that they are loaded into. `copies`: how often each is wanted; `gaps` lie before."""

    def __init__(self, sizes: Sequence[int], gaps: Sequence[int] = (), copies: Sequence[int] = ()) -> None:
        self.data = np.random.default_rng(1).integers(0, 256, sum(sizes) + sum(gaps), dtype=np.uint8)
        self.wanted: list[ChunkRead] = []
        self.chunks: list[Chunk] = []
        at = 0
        for number, size in enumerate(sizes):
            at += gaps[number] if gaps else 0
            part = self.data[at : at + size]
            self.chunks.append(Chunk(0, at, size, size, "raw", None, xxh3_128(part)))
            for _ in range(copies[number] if copies else 1):
                self.wanted.append(self._wanted(number, self.chunks[-1]))
            at += size
        self.server, self.bytes_read = Server(), 0

    @staticmethod
    def _wanted(number: int, chunk: Chunk) -> ChunkRead:
        entry = TensorEntry(f"t{number}", "uint8", (chunk.raw,), whole((chunk.raw,)), "rank", (chunk,))
        return ChunkRead(KEY, 0, entry, chunk, 0, (), Place(np.zeros(chunk.raw, np.uint8), 0, chunk.raw))

    async def load(self, data: Bytes | None = None) -> list[DamagedError]:
        """Load from an object of these bytes, or of the right ones."""
        await self.server.put(KEY, (self.data if data is None else data).tobytes())
        return await read_chunks(self.server, self.wanted, CONFIG, self._count)

    def _count(self, nbytes: int) -> None:
        self.bytes_read += nbytes

    def whole(self) -> list[str]:
        """The tensors whose memory has the right bytes, once for each copy."""
        return [w.entry.fqn for w in self.wanted if w.place is not None and xxh3_128(w.place.data) == w.chunk.digest]


@st.composite
def objects(draw: st.DrawFn) -> Loaded:
    sizes = draw(st.lists(st.sampled_from([1, 3, 200, 999, 1000, 1001, 3500]), min_size=1, max_size=12))
    gaps = draw(st.lists(st.integers(0, 400), min_size=len(sizes), max_size=len(sizes)))
    copies = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=len(sizes), max_size=len(sizes)))
    return Loaded(sizes, gaps, copies)


@given(objects())
async def test_every_chunk_reaches_its_places_and_no_byte_is_read_twice(loaded: Loaded) -> None:
    assert await loaded.load() == []
    assert loaded.whole() == [w.entry.fqn for w in loaded.wanted]
    read = sorted(loaded.server.requests)
    assert loaded.bytes_read == sum(stop - start for start, stop in read)
    assert all(stop <= following for (_, stop), (following, _) in pairwise(read))
    for chunk in loaded.chunks:
        assert sum(max(0, min(stop, chunk.end) - max(start, chunk.offset)) for start, stop in read) == chunk.stored


async def test_a_run_is_cut_where_the_parts_of_its_object_begin() -> None:
    """The chunks begin and end anywhere."""
    loaded = Loaded([700] * 20)
    assert await loaded.load() == []
    assert sorted(loaded.server.requests) == [(at, at + PIECE) for at in range(0, 14_000, PIECE)]


def test_chunks_without_a_place_of_their_own_make_no_run() -> None:
    """Of the sixth chunk, two copies are wanted. It is read once, into a buffer."""
    loaded = Loaded([400] * 12, copies=[1] * 5 + [2] + [1] * 6)
    groups = group_chunks(loaded.wanted, PIECE, GAP, has_runs=True)
    assert [(group.is_run, group.start, group.stop) for group in groups] == [
        (True, 0, 2000),
        (False, 2000, 2800),
        (True, 2800, 4800),
    ]
    assert [len(group.wanted) for group in groups] == [5, 3, 5]


async def test_read_1_a_damaged_chunk_of_a_run_is_named_and_holds_up_no_other() -> None:
    loaded = Loaded([700] * 10)
    data = loaded.data.copy()
    data[[1500, 4300]] ^= 1
    damage = await loaded.load(data)
    assert [(error.fqn, error.key) for error in damage] == [("t2", KEY), ("t6", KEY)]
    assert loaded.whole() == ["t0", "t1", "t3", "t4", "t5", "t7", "t8", "t9"]


async def test_of_an_object_that_was_cut_off_those_chunks_are_lost_that_need_what_is_missing() -> None:
    """The third piece cannot be read, nor those after it. The chunks that lie before are whole."""
    loaded = Loaded([700] * 6)
    damage = await loaded.load(loaded.data[:2500])
    assert loaded.whole()[:2] == ["t0", "t1"]
    assert [error.fqn for error in damage] == ["t2", "t5"]
    assert all("ends before byte" in str(error) for error in damage)
    assert "t2, t3, t4" in str(damage[0])


async def test_an_object_that_is_gone_is_damage_of_all_its_chunks() -> None:
    loaded = Loaded([1500] * 3)
    damage = await read_chunks(loaded.server, loaded.wanted, CONFIG)
    assert [error.fqn for error in damage] == ["t0", "t1", "t2"]
    assert loaded.whole() == []
