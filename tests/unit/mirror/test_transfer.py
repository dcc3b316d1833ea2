"""One object from one store to another: in blocks, each piece compared; nothing that is wrong is finished."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import DamagedError, FencedError
from checkpointd.mirror import transfer
from checkpointd.mirror.pieces import PassingCheck, StoredPiece, spans
from checkpointd.mirror.transfer import copied, is_whole
from checkpointd.store.memory import MemoryStore

KEY = "tag/00000001-0/00000-0.chunks"
DATA = np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8).tobytes()


def piece(start: int, stop: int, data: bytes = DATA, *, raw: bool = True) -> StoredPiece:
    hashed = xxhash.xxh3_128_digest(data[start:stop]) if raw else xxhash.xxh3_64_digest(data[start:stop])
    return StoredPiece(start, stop, hashed)


PIECES = (piece(0, 100), piece(100, 4000, raw=False), piece(4096, 9000), piece(9990, 10_000, raw=False))


async def nothing() -> None:
    return


async def copy(pieces: tuple[StoredPiece, ...], data: bytes = DATA, check: Any = nothing) -> MemoryStore:
    source, target = MemoryStore("source"), MemoryStore("target")
    await source.put(KEY, data)
    await copied(source, target, KEY, len(DATA), pieces, check=check, on_bytes=lambda _: None)
    return target


@pytest.mark.parametrize("block", [7, 4096, 10_000, 1 << 20])
async def test_transfer_1_what_is_whole_arrives(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", block)
    target = await copy(PIECES)
    assert await target.get(KEY) == DATA
    assert await is_whole(target, KEY, PIECES, lambda _: None)


@pytest.mark.parametrize("block", [7, 4096, 1 << 20])
@pytest.mark.parametrize("at", [0, 99, 100, 3999, 4096, 9995])
async def test_transfer_1_a_wrong_byte_in_a_piece_is_not_finished(at: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK_BYTES", block)
    wrong = bytearray(DATA)
    wrong[at] ^= 1
    source, target = MemoryStore("source"), MemoryStore("target")
    await source.put(KEY, bytes(wrong))
    with pytest.raises(DamagedError):
        await copied(source, target, KEY, len(DATA), PIECES, check=nothing, on_bytes=lambda _: None)
    assert await target.stat(KEY) is None
    await target.open_writer(KEY)  # the name is free again
    assert not await is_whole(source, KEY, PIECES, lambda _: None)


@pytest.mark.parametrize("at", [4050, 9500])
async def test_padding_between_pieces_is_nobodys(at: int) -> None:
    wrong = bytearray(DATA)
    wrong[at] ^= 1
    assert await (await copy(PIECES, bytes(wrong))).get(KEY) == bytes(wrong)


async def test_a_short_object_is_damaged() -> None:
    with pytest.raises(DamagedError):
        await copy(PIECES, DATA[:9000])
    with pytest.raises(DamagedError, match="fewer than its index names"):
        await copy((*PIECES, StoredPiece(10_000, 10_001, b"12345678")))


async def test_a_fenced_process_neither_finishes_nor_discards() -> None:
    """MIRRORCOPY-4: the object of that name may be another process's by now."""

    async def fenced() -> None:
        raise FencedError("a newer start")

    source, target = MemoryStore("source"), MemoryStore("target")
    await source.put(KEY, DATA)
    with pytest.raises(FencedError):
        await copied(source, target, KEY, len(DATA), PIECES, check=fenced, on_bytes=lambda _: None)
    assert await target.stat(KEY) is None
    assert KEY in target._open_writers


async def test_an_object_that_is_gone_is_not_whole() -> None:
    assert not await is_whole(MemoryStore(), KEY, PIECES, lambda _: None)


@given(cuts=st.lists(st.integers(0, 10_000), max_size=6), blocks=st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_pieces_are_compared_however_the_bytes_come(cuts: list[int], blocks: list[int]) -> None:
    edges = sorted({0, *cuts, len(DATA)})
    pieces = tuple(piece(a, b, raw=a % 2 == 0) for a, b in pairwise(edges))
    passing, start = PassingCheck(KEY, pieces), 0
    while start < len(DATA):
        stop = min(len(DATA), start + blocks[start % len(blocks)])
        passing.take(start, memoryview(DATA)[start:stop])
        start = stop
    assert passing.is_done


def test_far_pieces_are_read_apart() -> None:
    far = 1 << 20
    pieces = [StoredPiece(0, 10, b"1" * 8), StoredPiece(20, 30, b"1" * 8), StoredPiece(far, far + 5, b"1" * 8)]
    assert [(start, stop) for start, stop, _ in spans(pieces)] == [(0, 30), (far, far + 5)]
