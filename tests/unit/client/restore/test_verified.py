"""Stored files that are verified while torch.load reads them. Invariants: VERIFIEDFILE-3, VERIFIEDFILE-1,
VERIFIEDFILE-2, FILE-6.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointd.codec.checksum import xxh3_128
from checkpointd.errors import DamagedError, UnreadableError
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Chunk, TensorEntry
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd_client.capture.torch_files import placeholders_of
from checkpointd_client.restore.verified import StoredFile, VerifiedFile

CONTENT = {
    "small": [torch.arange(number + 1) for number in range(300)],
    "large": torch.randn(1 << 20),
    "empty": torch.empty(0),
    "shared": torch.ones(100_000).view(100, 1000)[3:7],
    "text": "x" * 100_000,
}


class Stored:
    """A file of torch.save, in chunks, that counts how often each of its bytes is read."""

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        path = folder / "states.pt"
        torch.save(CONTENT, path)
        self.data = bytearray(path.read_bytes())
        self.reads: Counter[int] = Counter()
        self.fails = False
        with path.open("rb") as opened:
            rooms = sorted((room.offset, room.offset + room.size) for room in placeholders_of(opened))
        pieces, at = list[tuple[int, int, str]](), 0
        for start, stop in [*rooms, (len(self.data), len(self.data))]:
            pieces += [(at, start, "around"), (start, stop, f"room {start}")]
            at = stop
        parts = [
            self._part(low, min(low + chunk_bytes, stop), fqn)
            for start, stop, fqn in pieces
            for low in range(start, stop, chunk_bytes)
        ]
        self.file = StoredFile("states.pt", len(self.data), "around", tuple(parts))

    def _part(self, start: int, stop: int, fqn: str) -> ChunkRead:
        data = self.data[start:stop]
        chunk = Chunk(0, start, len(data), len(data), "raw", None, xxh3_128(data))
        box = Box((0,), (len(data),))
        return ChunkRead("key", 0, TensorEntry(fqn, "uint8", box.sizes, box, "rank", (chunk,)), chunk, 0)

    def read(self, wanted: Sequence[ChunkRead]) -> list[DamagedError]:
        if self.fails:
            raise UnreadableError("the storage does not answer")
        damage = []
        for part in wanted:
            data = self.data[part.chunk.offset : part.chunk.end]
            self.reads[part.chunk.offset] += 1
            if part.place is not None:
                part.place.data[:] = np.frombuffer(data, dtype=np.uint8)
            if xxh3_128(data) != part.chunk.digest:
                damage.append(DamagedError(f"damaged at byte {part.chunk.offset}"))
        return damage

    def opened(self) -> VerifiedFile:
        return VerifiedFile(self.file, self.read)

    def each_once(self) -> bool:
        return self.reads == Counter(part.chunk.offset for part in self.file.parts)


def load(file: VerifiedFile) -> dict[str, object]:
    found: dict[str, object] = torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]  # a file
    return found


@pytest.mark.parametrize("chunk_bytes", [3001, 1 << 20, 4 << 20])
def test_torch_loads_what_was_saved_and_each_byte_is_read_once(tmp_path: Path, chunk_bytes: int) -> None:
    stored = Stored(tmp_path, chunk_bytes)
    file = stored.opened()
    found = load(file)
    assert found.pop("text") == CONTENT["text"]
    torch.testing.assert_close(found, {key: value for key, value in CONTENT.items() if key != "text"}, rtol=0, atol=0)
    assert file.finish() == []
    assert stored.each_once()


@pytest.mark.parametrize("chunk_bytes", [9973, 1 << 20])
def test_whatever_is_asked_for_in_whatever_order(tmp_path: Path, chunk_bytes: int) -> None:
    stored = Stored(tmp_path, chunk_bytes)
    file, plain, chosen = stored.opened(), io.BytesIO(stored.data), random.Random(chunk_bytes)
    for _ in range(60):
        at, size = chosen.randrange(len(stored.data) + 10), chosen.choice([1, 30, 4096, 300_000, 2_000_000])
        for one in file, plain:
            one.seek(at)
        assert file.read(size) == plain.read(size), (at, size)
        assert file.tell() == plain.tell()
    assert file.finish() == []


def test_what_is_not_asked_for_is_verified_too(tmp_path: Path) -> None:
    stored = Stored(tmp_path, 1 << 20)
    assert stored.opened().finish() == []
    assert stored.each_once()


@pytest.mark.parametrize("where", ["around", "room", "unread"])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, where: str) -> None:
    stored = Stored(tmp_path, 1 << 20)
    part = [part for part in stored.file.parts if part.entry.fqn.startswith("around" if where == "around" else "room")][-1]
    stored.data[part.chunk.end - 1] ^= 1
    file = stored.opened()
    if where == "around":
        assert file.damage, "before anything is unpickled"
    elif where == "room":
        load(file)
    assert [str(error) for error in file.finish()] == [f"damaged at byte {part.chunk.offset}"]


def test_a_storage_that_fails_ends_the_load_and_is_told(tmp_path: Path) -> None:
    stored = Stored(tmp_path, 1 << 20)
    file = stored.opened()
    stored.fails = True
    with pytest.raises(RuntimeError):
        load(file)
    with pytest.raises(UnreadableError, match="does not answer"):
        file.finish()
