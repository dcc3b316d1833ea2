"""Stage 4 of a load: read chunks, each once, into the memory of their tensors or into buffers, and verify them there.

Neighbours are read together by one call. It reads chunks that are stored raw straight into their places, if these are known,
and the others into a buffer. Where each read is a request, a run of such chunks may be long. It is read in pieces that begin at
multiples of a piece's size, as the parts do in which the object was uploaded: a server then finds a piece in one part.

Invariants
  READ-1  A byte of a chunk reaches a sink only after its codec and its digest were checked. A place is filled before the check;
      if it holds wrong bytes, the damage names the chunk, or the object whose read failed and the tensors that it was for.
  READ-2  Reads never exceed the sizes in the index, which was verified by its digest.
  READ-3  Memory stays below `budget_bytes`, or below the need of the largest chunk, for shards of any size. Buffers are used
      again, and chunks that are read into their places take none.
  READ-4  A call reads a byte of a chunk once, and computes one digest of it. If it was encoded, it also computes a checksum of
      what was stored.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np

from checkpointd.codec.checksum import xxh3_128
from checkpointd.config import LoadConfig
from checkpointd.errors import CodecError, DamagedError, NotFoundError
from checkpointd.layout.indexes import Chunk
from checkpointd.phrases import listed
from checkpointd.pipeline.read.bases import read_bases
from checkpointd.pipeline.read.decode import decoded
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd.pipeline.read.shared_reads import Circle, Sharing, Turn, take_turns
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

GAP_BYTES_MAX = 1 << 20
"""Chunks this far apart are never read together, whatever the store says that a read costs."""
IN_PLACE_BYTES_MIN = 16 << 10
"""Smaller chunks are read into a buffer and copied: a place of its own costs as much processor time as such a copy."""
READS_IN_BUDGET = 16
"""Reads are no larger than lets so many fit into the budget."""
NAMED = 3
"""The most tensors that the damage of an object names."""
_NO_BUFFER = np.empty(0, dtype=np.uint8)
_IN_BETWEEN = np.empty(GAP_BYTES_MAX, dtype=np.uint8)
"""Gets the bytes between chunks that are read into their places. Nobody reads it."""


@dataclass(slots=True)
class ReadGroup:
    """Chunks of one object that are read together, in the order of their offsets."""

    key: str
    start: int
    stop: int
    wanted: list[ChunkRead]
    in_place: set[int] = field(default_factory=set)
    """Which of `wanted` are read straight into their places, by number."""
    is_run: bool = False
    """Whether all of `wanted` may be read into their places, however small they are."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def buffered(self) -> int:
        """The bytes of the buffer that the group needs."""
        return self.size if len(self.in_place) < len(self.wanted) else 0

    def takes(self, chunk: Chunk, is_placed: bool, block_bytes: int, gap_bytes: int) -> bool:
        """Whether `chunk`, which begins no earlier than these, is read together with them."""
        if chunk.offset - self.stop > min(gap_bytes, GAP_BYTES_MAX):
            return False
        return (self.is_run and is_placed) or chunk.end <= self.stop or chunk.end - self.start <= block_bytes

    def parts(self, buffer: Bytes) -> list[Bytes]:
        """The memory that the group is read into, in the order of the object: places, and parts of `buffer` between them."""
        found: list[Bytes] = []
        at, last = self.start, None
        for number in sorted(self.in_place):
            chunk, place = self.wanted[number].chunk, self.wanted[number].place
            assert place is not None
            if chunk.offset > at:
                found.append(self._between(buffer, at, chunk.offset))
            elif last is not None and last.is_followed_by(place):
                found.pop()
                place = replace(last, nbytes=last.nbytes + place.nbytes)
            found.append(place.data)
            at, last = chunk.end, place
        if at < self.stop:
            found.append(self._between(buffer, at, self.stop))
        return found

    def pieces(self, nbytes: int) -> list[Piece]:
        """The pieces of a run, cut at the multiples of `nbytes` in the object; none that lies in a gap."""
        found: list[Piece] = []
        parts, first = _Cutter(self.parts(_NO_BUFFER)), 0
        for start, stop in pairwise([self.start, *range((self.start // nbytes + 1) * nbytes, self.stop, nbytes), self.stop]):
            while self.wanted[first].chunk.end <= start:
                first += 1
            last = first
            while last < len(self.wanted) and self.wanted[last].chunk.offset < stop:
                last += 1
            memory = parts.next(stop - start)
            if first < last:
                found.append(Piece(start, stop, memory, range(first, last)))
        return found

    def _between(self, buffer: Bytes, start: int, stop: int) -> Bytes:
        return buffer[start - self.start : stop - self.start] if self.buffered else _IN_BETWEEN[: stop - start]

    @property
    def nbytes(self) -> int:
        """The memory that reading the group takes: its buffer, the bases, and two copies of a chunk while it is decoded."""
        decoded_max = max(w.chunk.raw if w.chunk.codec != "raw" else 0 for w in self.wanted)
        return self.buffered + 2 * decoded_max + sum(w.chunk.raw for w in self.wanted if w.chunk.base is not None)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a run that is one request: the bytes `[start, stop)` of the object, and the memory that they are read into.

    `chunks`: those of which it has bytes, by number.
    """

    start: int
    stop: int
    memory: list[Bytes]
    chunks: range


class _Cutter:
    """Cuts pieces of memory from `parts`, one after the other."""

    def __init__(self, parts: Iterable[Bytes]) -> None:
        self._parts, self._rest = iter(parts), _NO_BUFFER

    def next(self, nbytes: int) -> list[Bytes]:
        found: list[Bytes] = []
        while nbytes:
            if not self._rest.size:
                self._rest = next(self._parts)
            found.append(self._rest[:nbytes])
            self._rest, nbytes = self._rest[nbytes:], nbytes - found[-1].size
        return found


async def read_chunks(
    store: Store,
    wanted: Iterable[ChunkRead],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
    sharing: Sharing | None = None,
) -> list[DamagedError]:
    """Read and verify `wanted`, and fill their places and sinks. `on_bytes` is called with the bytes of each read. `sharing`:
    ranks that read the same divide the reading among themselves.

    Returns all damage, in the order of the objects. Whole chunks reach their places and sinks even if others are damaged, and
    a damaged chunk may be left in its place, so a caller that must fill all or nothing verifies first. Raises UnreadableError
    if the storage fails. A missing object counts as damage, so use a store that raises NotFoundError only if that is proved
    (`store/patient.py`).
    """
    wanted, block_bytes, gap_bytes = [*wanted], bytes_together(store, config), store.capabilities.gap_bytes
    width = max(config.reads, store.capabilities.at_once)
    damage = Damage()
    groups: list[ReadGroup] | None = None
    if sharing is not None:
        shared = group_chunks(wanted, block_bytes, gap_bytes)
        if (circle := await sharing.join(_print(shared))) is not None:
            groups, reader = shared, _GroupReader(store, config, on_bytes, damage)
            turns = [partial(reader.begin, group, number, circle) for number, group in enumerate(groups)]
            await take_turns(circle, turns, width)
    if groups is None:
        groups = group_chunks(wanted, block_bytes, gap_bytes, has_runs=store.capabilities.read_bytes > 0)
    reader = _GroupReader(store, config, on_bytes, damage)
    works = [work for number, group in enumerate(groups) if (number, 0) not in damage for work in reader.works(group, number)]
    await run_workers(works, width)
    return [error for _, found in sorted(damage.items()) for error in found]


Damage = dict[tuple[int, int], list[DamagedError]]
"""The number of a group and of a piece of it (0 of a whole group) -> the damage found there, as soon as it was read."""


@dataclass(slots=True)
class _GroupReader:
    """Reads groups within one budget of memory, and notes the damage of each that is done."""

    store: Store
    config: LoadConfig
    on_bytes: Callable[[int], None]
    damage: Damage
    budget: Budget = field(init=False)
    buffers: _Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.budget = Budget(self.config.budget_bytes)
        self.buffers = _Buffers(bytes_together(self.store, self.config))

    def memory(self, group: ReadGroup) -> int:
        """The memory that `group` takes here and in the store."""
        return group.nbytes + (group.size if self.store.capabilities.read_bytes else 0)

    def works(self, group: ReadGroup, number: int) -> list[Callable[[], Awaitable[None]]]:
        """What reads, verifies and delivers `group`: one call for each piece of a long run."""
        block_bytes = bytes_together(self.store, self.config)
        if not group.is_run or group.size <= block_bytes:
            return [partial(self.read, group, number)]
        pieces = group.pieces(block_bytes)
        run = _Run(group, pieces)
        return [partial(self.read_piece, run, piece, (number, at)) for at, piece in enumerate(pieces)]

    async def read(self, group: ReadGroup, number: int) -> None:
        """Read, verify and deliver `group`."""
        async with self.budget.hold(self.memory(group)), self.buffer(group) as buffer:
            self.damage[number, 0] = await self.read_into(group, buffer)

    async def read_piece(self, run: _Run, piece: Piece, number: tuple[int, int]) -> None:
        """Read `piece` of `run`, then verify and deliver the chunks that are there now."""
        parts, nbytes = [part.data for part in piece.memory], piece.stop - piece.start
        async with self.budget.hold(nbytes):
            try:
                self.damage[number] = await self.store.get_parts(run.group.key, piece.start, parts, partial(run.deliver, piece))
            except (NotFoundError, DamagedError) as error:
                self.damage[number] = run.lose(piece, error)
            else:
                self.on_bytes(nbytes)

    async def begin(self, group: ReadGroup, number: int, circle: Circle) -> Turn:
        """Take memory for `group`, and begin to read it if it is this rank's turn."""
        source = number % circle.size
        is_own = source == circle.place
        # SHARE-2. A rank sends one piece of memory.
        if not is_own or group.buffered or len(group.parts(_NO_BUFFER)) > 1:
            group = replace(group, in_place=set())
        held = AsyncExitStack()
        await held.enter_async_context(self.budget.hold(self.memory(group)))
        buffer = await held.enter_async_context(self.buffer(group))
        [memory] = group.parts(buffer)

        async def finish() -> None:
            found = await self.deliver(group, buffer)
            if found and not is_own:
                log.warning("%s is read again: what came from another rank is wrong: %s", group.key, found[0])
                found = await self.read_into(group, buffer)  # SHARE-1
            self.damage[number, 0] = found

        reading = asyncio.create_task(self.store.get_range(group.key, group.start, memory.data)) if is_own else None
        return Turn(source, memory, reading, held, finish)

    @asynccontextmanager
    async def buffer(self, group: ReadGroup) -> AsyncIterator[Bytes]:
        """A buffer of the size that `group` needs."""
        if not group.buffered:
            yield _NO_BUFFER
            return
        buffer = self.buffers.take(group.buffered)
        try:
            yield buffer
        finally:
            self.buffers.give_back(buffer)

    async def read_into(self, group: ReadGroup, buffer: Bytes) -> list[DamagedError]:
        """Read `group` into its places and `buffer`, verify it and pass it on."""
        bases, lost = await read_bases(self.store, group.wanted, self.on_bytes)
        parts = [part.data for part in group.parts(buffer)]
        try:
            found = await self.store.get_parts(group.key, group.start, parts, partial(_deliver, group, buffer, bases))
        except (NotFoundError, DamagedError) as error:
            return [_lost(group, error)]
        self.on_bytes(group.size)
        return lost + found

    async def deliver(self, group: ReadGroup, buffer: Bytes) -> list[DamagedError]:
        """Verify and pass on the chunks of `group`, which was read into its places and `buffer`."""
        bases, lost = await read_bases(self.store, group.wanted, self.on_bytes)
        found = await asyncio.get_running_loop().run_in_executor(None, _deliver, group, buffer, bases)
        self.on_bytes(group.size)
        return lost + found


class _Run:
    """A run that is read in pieces, several at once: which of its chunks are whole, and which are lost."""

    def __init__(self, group: ReadGroup, pieces: Iterable[Piece]) -> None:
        self.group = group
        self._missing = Counter(number for piece in pieces for number in piece.chunks)
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    def deliver(self, piece: Piece) -> list[DamagedError]:
        """Verify the chunks that are whole with `piece`, which was read just now, and pass them on. Called on a thread."""
        with self._lock:
            self._missing.subtract(piece.chunks)
            whole = [number for number in piece.chunks if not self._missing[number]]
        return _deliver(self.group, _NO_BUFFER, {}, whole)

    def lose(self, piece: Piece, error: NotFoundError | DamagedError) -> list[DamagedError]:
        """The damage of the chunks of `piece`, which cannot be read, but for those that another lost piece has named."""
        lost = [number for number in piece.chunks if number not in self._lost]
        self._lost.update(lost)
        wanted = [self.group.wanted[number] for number in lost]
        return [_lost(replace(self.group, wanted=wanted), error)] if wanted else []


def bytes_together(store: Store, config: LoadConfig) -> int:
    """The most bytes of neighbouring chunks that are read together: more where each read is a request."""
    return max(config.block_bytes, min(store.capabilities.read_bytes, config.budget_bytes // READS_IN_BUDGET))


def _print(groups: Iterable[ReadGroup]) -> bytes:
    """The digest of what is read: equal for ranks that read the same groups."""
    reads = [(g.key, g.start, g.stop, [(w.chunk.offset, w.chunk.digest) for w in g.wanted]) for g in groups]
    return xxh3_128(msgspec.msgpack.encode(reads))


def group_chunks(wanted: Iterable[ChunkRead], block_bytes: int, gap_bytes: int, *, has_runs: bool = False) -> list[ReadGroup]:
    """Chunks at most `gap_bytes` apart that are read together, at most `block_bytes`; a larger chunk is read alone.

    `has_runs`: chunks that may all be read into their places make a run of any length.
    """
    groups: list[ReadGroup] = []
    items = sorted(wanted, key=lambda w: (w.key, w.chunk.offset))
    for item, is_placed in zip(items, _placed(items), strict=True):
        last, chunk = groups[-1] if groups else None, item.chunk
        if last is None or last.key != item.key or not last.takes(chunk, is_placed, block_bytes, gap_bytes):
            last = ReadGroup(item.key, chunk.offset, chunk.end, [], is_run=has_runs)
            groups.append(last)
        last.stop = max(last.stop, chunk.end)
        last.is_run &= is_placed
        if is_placed:
            last.in_place.add(len(last.wanted))
        last.wanted.append(item)
    for group in groups:
        if not group.is_run:
            group.in_place = {n for n in group.in_place if group.wanted[n].chunk.raw >= IN_PLACE_BYTES_MIN}
    return groups


def _placed(items: Sequence[ChunkRead]) -> list[bool]:
    """Which of `items`, in the order of their offsets, may be read straight into their places: none that shares bytes."""
    found, furthest = [False] * len(items), 0
    for number, item in enumerate(items):
        chunk, before = item.chunk, items[furthest]
        if number and before.key == item.key and chunk.offset < before.chunk.end:
            found[furthest] = False
        else:
            found[number] = chunk.codec == "raw" and chunk.stored == chunk.raw > 0 and item.place is not None
        if before.key != item.key or chunk.end >= before.chunk.end:
            furthest = number
    return found


def _lost(group: ReadGroup, error: NotFoundError | DamagedError) -> DamagedError:
    """The damage of `group`. It names all its tensors, since the read may have filled the places of some before it failed."""
    names = [*dict.fromkeys(item.entry.fqn for item in group.wanted)]
    rank = group.wanted[0].rank
    return DamagedError(f"{error} (rank {rank}, {listed(names, NAMED)})", key=group.key, fqn=names[0], rank=rank)


def _deliver(
    group: ReadGroup, buffer: Bytes, bases: Mapping[int, Bytes], numbers: Iterable[int] | None = None
) -> list[DamagedError]:
    """Verify each chunk of `group`, which was read into its place or `buffer`, and pass whole ones to their places and sinks.

    Only those of `numbers` if they are given. Deltas without a base are left out.
    """
    damage = []
    for number in range(len(group.wanted)) if numbers is None else numbers:
        item = group.wanted[number]
        if item.chunk.base is not None and number not in bases:
            continue
        at, place = item.chunk.offset - group.start, None if item.place is None else item.place.data
        stored = place if number in group.in_place and place is not None else buffer[at : at + item.chunk.stored]
        try:
            raw = decoded(item.chunk, stored, place, base=bases.get(number))
        except CodecError as error:
            fqn, rank = item.entry.fqn, item.rank
            message = f"{group.key} is damaged at byte {item.chunk.offset}: {error} (rank {rank}, {fqn})"
            damage.append(DamagedError(message, key=group.key, fqn=fqn, rank=rank))
            continue
        for sink in item.sinks:
            sink(item.start, raw)
    return damage


class _Buffers:
    """Buffers of `nbytes`, which are used again: new memory costs as much time as the read. A larger one is made each time."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """A buffer of `nbytes`."""
        if nbytes > self._nbytes:
            return np.empty(nbytes, dtype=np.uint8)
        buffer = self._free.pop() if self._free else np.empty(self._nbytes, dtype=np.uint8)
        return buffer[:nbytes]

    def give_back(self, buffer: Bytes) -> None:
        """Let `buffer` be used again. Nothing may read or write it any more."""
        if isinstance(buffer.base, np.ndarray):
            self._free.append(buffer.base)


class Budget:
    """A budget of `total` bytes. A request for more waits until all bytes are free, and takes them."""

    def __init__(self, total: int) -> None:
        self._total = self._left = total
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are free, take them, and give them back at the end of the block."""
        share = min(nbytes, self._total)
        async with self._change:
            await self._change.wait_for(lambda: self._left >= share)
            self._left -= share
        try:
            yield
        finally:
            self._left += share
            async with self._change:
                self._change.notify_all()
