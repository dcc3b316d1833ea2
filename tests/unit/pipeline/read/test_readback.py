"""READBACK-1 to READBACK-4 of pipeline/read/readback.py: what was read back stands for what goes; a bit that flips
on its way to the disk.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, LoadConfig, PersistConfig
from checkpointd.errors import StoreError
from checkpointd.layout.keys import AttemptId, read_back_name
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ReadBack, decode
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.gc.retire import retire
from checkpointd.pipeline.read import readback
from checkpointd.pipeline.read.readback import BackgroundReadBack, read_back, survivor
from checkpointd.pipeline.root import candidates, root_view, starts
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.report.verification import to_verify, verified
from checkpointd.store.base import Capabilities, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix import osdisk
from checkpointd.store.posix.osfile import OsFile
from checkpointd.store.posix.store import PosixStore
from tests.builders import Arrays, attempts_at, collect, delete_checkpoint, load_arrays, make_shard, phases, save_checkpoint

CHUNK = 256 << 10
LARGE = 4096
"""Writes of tensors; votes, outcomes and indexes are shorter here."""


def state(step: int) -> Arrays:
    return {"weight": np.random.default_rng(step).random(100_000), "step": np.array(step)}


async def saved(store: Store, *steps: int, **options: object) -> LoggedAttempt:
    for step in steps:
        tensors = {"tensors": lambda _, step=step: state(step), "tag": f"global_step{step}", "n": step, **options}
        attempts = await save_checkpoint(store, step=step, chunk_bytes=CHUNK, **tensors)
        assert phases(attempts) == [Phase.COMMITTED] * len(attempts)
    return await root_view.find(store, str(tensors["tag"]))


async def tags(store: Store) -> list[str]:
    return [c.tag for c in await root_view.checkpoints(store)]


VERIFIED, DAMAGED = "verified", "damaged"


async def records(store: Store, checkpoint: LoggedAttempt) -> set[str]:
    """Which records the log has of it."""
    one = (await root_view.state_of(store)).attempts[checkpoint.prefix]
    return {name for name, is_there in ((VERIFIED, one.verified), (DAMAGED, one.damaged)) if is_there}


async def loads(store: Store, tag: str, step: int) -> None:
    expected = {fqn: array.tobytes() for fqn, array in state(step).items()}
    assert await load_arrays(store, tag, 0) == expected


@pytest.fixture
def flipping(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether one bit of every large write flips between its digest and the disk."""
    write, flips = OsFile._write, False

    def written(self: OsFile, offset: int, part: Any) -> None:
        if flips and part.size >= LARGE:
            part = part.copy()
            part[len(part) // 2] ^= 1
        write(self, offset, part)

    def flip(on: bool) -> None:
        nonlocal flips
        flips = on

    monkeypatch.setattr(OsFile, "_write", written)
    return flip


# --- READBACK-3: what goes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [True, False])
async def test_readback_3_a_flipped_bit_and_keep_last_1_leave_one_that_loads(
    tmp_path: Path, flipping: Callable[[bool], None], caplog: pytest.LogCaptureFixture, dedup: bool
) -> None:
    rules = Retention(keep_last=1)
    async with PosixStore(tmp_path) as store:
        await saved(store, 1, retention=rules)
        flipping(True)
        damaged = await saved(store, 2, retention=rules, dedup=dedup)
        flipping(False)
        assert await tags(store) == ["global_step2", "global_step1"]
        await loads(store, "global_step1", 1)
        assert {DAMAGED} <= await records(store, damaged)
        assert "global_step2/00000001-0 was read back, and is not whole" in caplog.text
        await saved(store, 3, retention=rules, dedup=dedup)
        assert "global_step1" not in await tags(store)
        await loads(store, "global_step3", 3)


@pytest.mark.parametrize("by", ["gc", "save"])
async def test_readback_3_what_was_read_back_whole_and_passed_over_since_stands_for_nothing(tmp_path: Path, by: str) -> None:
    """It was damaged after it had been read back: the older one, which was loaded, may be the only one that is whole."""
    rules = Retention(keep_last=1)
    async with PosixStore(tmp_path) as store:
        older, newer = await saved(store, 1), await saved(store, 2)
        assert (await read_back(store, newer)).whole
        await candidates.note_passed_over(store, newer.prefix, "a chunk is damaged")
        if by == "gc":
            await collect(store, rules)
        else:
            await retire(store, await attempts_at(store), rules)
        assert await tags(store) == ["global_step2", "global_step1"]
        assert (await read_back(store, older)).whole
        await saved(store, 3, retention=rules)
        assert await tags(store) == ["global_step3", "global_step2", "global_step1"]
        assert (await read_back(store, await root_view.find(store, "global_step3"))).whole
        await collect(store, rules)
        assert await tags(store) == ["global_step3", "global_step2"]


class Flickering(MemoryStore):
    """Of the next large reads, `wrong` come with one bit that has flipped on its way."""

    wrong = 0

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        await super().get_range(key, offset, out)
        if self.wrong and len(out) >= LARGE:
            self.wrong -= 1
            out[0] ^= 1


@pytest.mark.parametrize(("wrong", "found"), [(1, "whole"), (1000, "damaged")])
async def test_readback_2_verify_that_records_damage_has_read_it_twice(wrong: int, found: str) -> None:
    store = Flickering()
    checkpoint = await saved(store, 1)
    store.wrong = wrong
    (verdict,) = await verified(store, await to_verify(store, checkpoint.tag), record=True)
    assert verdict.state == found
    assert {VERIFIED, DAMAGED} & await records(store, checkpoint) == {VERIFIED if found == "whole" else DAMAGED}


async def test_readback_3_the_newest_whole_one_stands_for_the_others() -> None:
    store = MemoryStore()
    checkpoints = [await saved(store, step) for step in (1, 2, 3)]

    async def stands(staying: list[LoggedAttempt]) -> str | None:
        found = await survivor(store, staying)
        return found and found.tag

    assert await stands(checkpoints) == "global_step3"
    assert not {VERIFIED, DAMAGED} & await records(store, checkpoints[0])
    chunks = f"{checkpoints[2].prefix}/00000-0.chunks"
    await store.put(chunks, bytes(len(await store.get(chunks))))
    assert await stands(checkpoints) == "global_step3"  # what is recorded is not read again
    await store.delete(chunks)
    assert await stands(checkpoints) == "global_step2"  # but what is gone is noticed
    assert await stands(checkpoints[:2]) == "global_step2"
    assert await survivor(store, []) is None


async def test_readback_2_a_storage_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    found = await saved(store, 1)

    async def failing(self: MemoryStore, key: str, offset: int, out: memoryview) -> None:
        raise StoreError("I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "get_range", failing)
        assert await survivor(store, [found]) is None
    assert not {VERIFIED, DAMAGED} & await records(store, found)
    assert await survivor(store, [found]) == found


@pytest.mark.parametrize("what", [".chunks", ".index", "/ballot-"])
@pytest.mark.parametrize("by", ["all", "rank"])
async def test_readback_2_a_bit_that_flips_on_its_way_here_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, what: str, by: str
) -> None:
    store, flips = MemoryStore(), 1
    found = await saved(store, 1)
    get, get_range = store.get, store.get_range

    def flipped(key: str) -> bool:
        nonlocal flips
        if flips and what in key:
            flips -= 1
            return True
        return False

    async def read(key: str, **options: Any) -> bytes:
        data = bytearray(await get(key, **options))
        if flipped(key):
            data[-1] ^= 1
        return bytes(data)

    async def read_range(key: str, offset: int, out: memoryview) -> None:
        await get_range(key, offset, out)
        if flipped(key):
            out[0] ^= 1

    monkeypatch.setattr(store, "get", read)
    monkeypatch.setattr(store, "get_range", read_range)
    if by == "all":
        assert (await read_back(store, found)).whole
    else:
        assert (await BackgroundReadBack(store)._fault(found, 0))[1] is None
    assert flips == 0
    assert DAMAGED not in await records(store, found)


# --- past the cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True], ids=["direct", "O_DIRECT refused"])
async def test_reading_back_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    async with PosixStore(tmp_path) as store:
        found = await saved(store, 1)
        path = tmp_path / found.prefix / "00000-0.chunks"
        drop(path)
        if is_cached(path):
            pytest.skip("this file system lies in the cache")
        if refused:
            monkeypatch.setattr(osdisk, "_fill_direct", refuse)
        assert (await read_back(store, found)).whole
        assert not is_cached(path)
        await loads(store, "global_step1", 1)
        assert is_cached(path)


def drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def refuse(*_: object) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def is_cached(path: Path) -> bool:
    """Whether the page cache holds any page of the file: mincore(2)."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // 4096))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with path.open("rb") as file:
        address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
    try:
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        return any(page & 1 for page in pages)
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


# --- READBACK-4: in the background ----------------------------------------------------------------------------------------


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "QUIET_S", 0.0)
    monkeypatch.setattr(readback, "SHARE", 1.0)


class Ranks:
    """Two ranks, each with a writer of its own."""

    def __init__(self, store: Store, **options: Any) -> None:
        commit = CommitConfig(timeout_s=60, poll_min_s=0.001, poll_max_s=0.01, **options)
        persist = PersistConfig(compression="none", chunk_bytes=CHUNK)
        self.store = store
        self.states = [WriterState(store=store, persist=persist, commit=commit) for _ in range(2)]

    async def save(self, step: int, unchanged_since: int | None = None) -> list[Attempt]:
        """Save `step`, with the tensors of another step if they are unchanged since then."""
        tensors = state(step if unchanged_since is None else unchanged_since)
        return await asyncio.gather(*(self._save(rank, step, tensors) for rank in range(2)))

    async def _save(self, rank: int, step: int, tensors: Arrays) -> Attempt:
        info = AttemptInfo(tag=f"global_step{step}", attempt=AttemptId(1, 0), rank=rank, world_size=2, step=step, n=step)
        attempt = Attempt(self.states[rank], info, deadline=asyncio.get_running_loop().time() + 60)

        async def staged() -> Any:
            return make_shard(tensors)

        await attempt.run(staged())
        assert attempt.phase is Phase.COMMITTED
        return attempt

    async def close(self) -> None:
        for state in self.states:
            await state.reader.close()


@contextmanager
def paused(reader: BackgroundReadBack) -> Iterator[None]:
    """A save is in flight beside the reader."""
    token = object()
    reader.pause(token)
    try:
        yield
    finally:
        reader.resume(token)


async def view_of(store: Store, step: int) -> LoggedAttempt:
    return (await attempts_at(store, f"global_step{step}"))[0]


async def test_readback_1_each_rank_reads_its_own_shard_and_the_last_one_records_the_whole() -> None:
    store = MemoryStore()
    await save_start(store)
    ranks = Ranks(store)
    with paused(ranks.states[1].reader):  # a save of rank 1 is in flight
        await ranks.save(1)

        async def one_has_read() -> bool:
            return read_back_name(0) in await root_view.sizes_of(store, "global_step1/00000001-0")

        await until(one_has_read)
        view = await view_of(store, 1)
        assert view.read_back == "no"
        assert read_back_name(1) not in await root_view.sizes_of(store, view.prefix)
        key = f"{view.prefix}/{read_back_name(0)}"
        assert decode(await store.get(key), ReadBack, key).nbytes >= 800_000

    async def whole() -> bool:
        return (await view_of(store, 1)).read_back == "whole" and not any(map(readback.read_back_rank, await held()))

    async def held() -> list[str]:
        return [name for name in await root_view.sizes_of(store, "global_step1/00000001-0") if name.endswith(".readback")]

    await until(whole)
    assert await held() == []
    await ranks.close()


class Server(MemoryStore):
    """Each read is a request, and a good one has two chunks. Notes the bytes of each read of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(alignment=1, shared=True, read_bytes=2 * CHUNK)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], Any]) -> Any:
        self.reads.append(sum(part.nbytes for part in parts))
        return await super().get_parts(key, offset, parts, then)


async def test_where_each_read_is_a_request_fewer_and_larger_ones_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "BLOCK", LoadConfig(reads=1, block_bytes=CHUNK, retry_s=30.0))
    store = Server()
    await save_start(store)
    ranks = Ranks(store)
    await ranks.save(1)

    async def whole() -> bool:
        return (await view_of(store, 1)).read_back == "whole"

    await until(whole)
    await ranks.close()
    assert max(store.reads) == 2 * CHUNK
    assert len(store.reads) == 2 * 2  # of each rank: 800,008 bytes


async def test_a_record_that_a_power_cut_tore_counts_as_not_there() -> None:
    store = MemoryStore()
    await save_start(store)
    ranks = Ranks(store)
    with paused(ranks.states[1].reader):
        await ranks.save(1)
        torn = f"{(await view_of(store, 1)).prefix}/{read_back_name(0)}"

        async def one_has_read() -> bool:
            return await store.stat(torn) is not None

        await until(one_has_read)
        await store.put(torn, b"")

    async def is_removed() -> bool:
        return await store.stat(torn) is None

    await until(is_removed)
    assert (await view_of(store, 1)).read_back == "no"
    await ranks.close()


async def save_start(store: Store) -> None:
    assert (await starts.take(store, 2)).start == 1


async def test_readback_4_a_save_in_flight_stops_reading_back_and_it_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await save_start(store)
    monkeypatch.setattr(readback, "BLOCK", readback.LoadConfig(reads=1, block_bytes=CHUNK))
    ranks, reads = Ranks(store), 0
    reader = ranks.states[0].reader
    real, saving = MemoryStore.get_range, paused(reader)
    begun = asyncio.Event()

    async def counting(self: MemoryStore, key: str, offset: int, out: memoryview) -> None:
        nonlocal reads
        if "/00000-" in key:
            reads += 1
            if reads == 1:
                saving.__enter__()
                begun.set()
        await real(self, key, offset, out)

    monkeypatch.setattr(MemoryStore, "get_range", counting)
    await ranks.save(1)
    async with asyncio.timeout(60):
        await begun.wait()

    async def other_has_read() -> bool:
        return read_back_name(1) in await root_view.sizes_of(store, "global_step1/00000001-0")

    await until(other_has_read)
    assert reads == 1
    saving.__exit__(None, None, None)

    async def whole() -> bool:
        return (await view_of(store, 1)).read_back == "whole"

    await until(whole)
    assert reads > 1
    await ranks.close()


async def test_readback_4_closing_gives_it_up() -> None:
    store = MemoryStore()
    await save_start(store)
    ranks = Ranks(store)
    with paused(ranks.states[0].reader):
        await ranks.save(1)
        async with asyncio.timeout(60):
            await ranks.close()
    assert (await view_of(store, 1)).read_back == "no"


async def test_readback_4_without_it_nothing_is_read_in_the_background() -> None:
    store = MemoryStore()
    await save_start(store)
    ranks = Ranks(store, read_back=False)
    await ranks.save(1)
    assert ranks.states[0].reader._task is None


async def test_damage_is_recorded_and_the_next_save_of_no_rank_refers_to_it(
    tmp_path: Path, flipping: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One rank reads its shard and records the damage. The other learns of that before it has read its own."""
    async with PosixStore(tmp_path) as store:
        await save_start(store)
        ranks = Ranks(store)
        flipping(True)
        with paused(ranks.states[1].reader):  # a save of rank 1 is in flight
            await ranks.save(1)

            async def recorded() -> bool:
                return (await view_of(store, 1)).read_back == "damaged"

            await until(recorded)
        assert "has read its shard back, and it is damaged" in caplog.text
        flipping(False)
        assert ranks.states[1].reader._task is not None
        await ranks.states[1].reader._task
        await ranks.save(2, unchanged_since=1)
        assert (await root_view.find(store, "global_step2")).commit.holders == ()
        await ranks.close()


async def test_what_went_meanwhile_is_no_damage() -> None:
    store = MemoryStore()
    found = await saved(store, 1)
    await saved(store, 2)
    reader = BackgroundReadBack(store)
    with paused(reader):
        reader.committed(found, 0)
        await delete_checkpoint(store, "global_step1")
    assert reader._task is not None
    await reader._task
    assert (await view_of(store, 1)).read_back == "no"
