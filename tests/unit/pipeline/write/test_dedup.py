"""What did not change is referred to: DEDUP-1 to DEDUP-4 of pipeline/write/dedup.py, on the real pipelines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpointd.codec import Compression
from checkpointd.commit.decide import Decision
from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig, PersistConfig
from checkpointd.errors import StoreError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.gc.collect import remove, sweep
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.pipeline.write import dedup, persist, write_objects
from checkpointd.pipeline.write.encode import Encoded
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import Arrays, load_arrays, make_shard, objects, phases, save_checkpoint

COMPRESSIONS: tuple[Compression, ...] = ("none", "planes")


def frozen(step: int) -> Arrays:
    """Three chunks that never change, one tensor that does, one of which the second chunk changes."""
    random = np.random.default_rng(0)
    partly = random.normal(size=2500).astype(np.float32)
    partly[1500] += step
    return {
        "frozen.weight": random.normal(size=(100, 30)).astype(np.float32),
        "frozen.bias": random.normal(size=7).astype(np.float32),
        "moving": np.full(1500, step, dtype=np.float32) * random.normal(size=1500).astype(np.float32),
        "partly": partly,
    }


async def saved(store: Store, step: int, arrays: Arrays | None = None, **options: object) -> None:
    state = frozen(step) if arrays is None else arrays
    attempts = await save_checkpoint(
        store, tag=f"global_step{step}", world_size=1, tensors=lambda _: state, **{"dedup": True, **options}
    )
    assert phases(attempts) == [Phase.COMMITTED]


async def index_at(store: Store, step: int) -> Index:
    return await read_index(store, await root_view.find(store, f"global_step{step}"), 0)


def as_bytes(arrays: Arrays) -> Mapping[str, bytes]:
    return {fqn: np.ascontiguousarray(array).tobytes() for fqn, array in arrays.items()}


def referred_of(index: Index) -> dict[str, list[bool]]:
    """For each tensor, which of its chunks lie in older attempts."""
    return {t.fqn: [bool(index.objects[c.object].held_by) for c in t.chunks] for t in index.tensors}


async def test_dedup_4_a_base_that_is_forgotten_while_it_is_made_stays_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-back may find damage in the shard while a thread makes the base of the next save from its index."""
    store = MemoryStore()
    await saved(store, 1)
    index = await index_at(store, 1)
    bases = dedup.Bases(store)

    async def found_damaged_meanwhile(_: int, make: Callable[..., dedup.Base], *args: object) -> dedup.Base:
        bases.forget()
        return make(*args)

    monkeypatch.setattr(dedup, "aside", found_damaged_meanwhile)
    bases.saw(index, (1, 0), bases.forgotten)
    info = AttemptInfo(tag="global_step2", attempt=AttemptId(1, 0), rank=0, world_size=1, step=2, n=1)
    assert await bases.newest(info) is None


async def test_dedup_4_what_referred_to_a_base_before_it_was_forgotten_is_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save took its base before damage was found there, and commits after it."""
    state = WriterState(store=MemoryStore(), persist=PersistConfig(compression="none", chunk_bytes=4096, dedup=True))
    await starts.take(state.store, 1)
    checked = Attempt._check_vote
    held: list[bool] = []

    async def found_damaged_meanwhile(self: Attempt) -> None:
        if self.info.step == 2:
            state.bases.forget()
        await checked(self)

    monkeypatch.setattr(Attempt, "_check_vote", found_damaged_meanwhile)
    for step in (1, 2, 3, 4):
        info = AttemptInfo(tag=f"global_step{step}", attempt=AttemptId(1, 0), rank=0, world_size=1, step=step, n=step)
        attempt = Attempt(state, info, deadline=asyncio.get_running_loop().time() + 60.0)
        await attempt.run(shard_of(frozen(step)))
        assert attempt.phase == Phase.COMMITTED
        held.append(any(ref.held_by for ref in (await index_at(state.store, step)).objects))
    assert held == [False, True, False, True]


async def shard_of(arrays: Arrays) -> Shard:
    return make_shard(arrays)


class Unreadable(MemoryStore):
    """Fails to read chunks objects."""

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        if key.endswith(".chunks"):
            raise StoreError(f"{key}: I/O error")
        await super().get_range(key, offset, out)


@pytest.mark.parametrize("fault", ["damaged", "unreadable"])
async def test_dedup_4_what_an_earlier_process_wrote_is_not_referred_to_unread(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart from weights that came from elsewhere, because the checkpoint is damaged: the next one is whole."""
    store = Unreadable() if fault == "unreadable" else MemoryStore()
    await saved(store, 1)
    if fault == "damaged":
        index = await index_at(store, 1)
        chunk = next(entry for entry in index.tensors if entry.fqn == "frozen.weight").chunks[1]
        key = f"global_step1/00000001-0/{index.objects[chunk.object].name}"
        data = bytearray(await store.get(key))
        data[chunk.offset] ^= 1
        await store.put(key, bytes(data))
    await saved(store, 2)
    assert not any(ref.held_by for ref in (await index_at(store, 2)).objects)
    assert "is damaged at byte" in caplog.text if fault == "damaged" else "cannot be read" in caplog.text
    assert "writes everything anew" in caplog.text
    if fault == "damaged":
        assert not (await verify(store, await root_view.find(store, "global_step1"), LoadConfig())).whole
        assert (await verify(store, await root_view.find(store, "global_step2"), LoadConfig())).whole


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_unchanged_chunks_become_references_and_load(tmp_path: Path, compression: Compression) -> None:
    store = PosixStore(tmp_path)
    await saved(store, 1, compression=compression)
    await saved(store, 2, compression=compression)
    found = referred_of(await index_at(store, 2))
    assert found == {
        "frozen.weight": [True] * 3,
        "frozen.bias": [True],
        "moving": [False] * 2,
        "partly": [True, False, True],
    }
    assert await load_arrays(store, "global_step2", 0) == as_bytes(frozen(2))
    assert await load_arrays(store, "global_step1", 0) == as_bytes(frozen(1))
    assert (await verify(store, await root_view.find(store, "global_step2"), LoadConfig())).whole


async def test_dedup_1_references_are_never_chained(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for step in (1, 2, 3, 4):
        await saved(store, step)
    holders = {ref.held_by for ref in (await index_at(store, 4)).objects if ref.held_by}
    assert holders == {"global_step1/00000001-0"}


async def test_what_does_not_change_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    store, encoded = MemoryStore(), list[int]()
    await saved(store, 1, frozen(1), compression="planes")

    class Counting(Encoded):
        @staticmethod
        def of(data: NDArray[np.uint8], *others: object) -> Encoded:
            encoded.append(data.nbytes)
            raise AssertionError(f"encoded {others}")

    monkeypatch.setattr(write_objects, "Encoded", Counting)
    await saved(store, 2, frozen(1), compression="planes")
    assert not encoded


@pytest.mark.parametrize("other", ["dtype", "shape", "chunks"])
async def test_dedup_2_another_dtype_shape_or_length_of_chunks_is_no_reference(other: str) -> None:
    store, array = MemoryStore(), np.arange(2048, dtype=np.int32)
    await saved(store, 1, {"a": array})
    changed = array.view(np.uint32) if other == "dtype" else array.reshape(2, 1024) if other == "shape" else array
    await saved(store, 2, {"a": changed}, chunk_bytes=8192 if other == "chunks" else 4096)
    assert not any(ref.held_by for ref in (await index_at(store, 2)).objects)


async def test_dedup_2_an_aborted_save_is_no_base() -> None:
    store = MemoryStore()
    await saved(store, 1)
    attempts = await save_checkpoint(
        store, tag="global_step2", world_size=2, dedup=True, absent=frozenset({1}), tensors=lambda _: frozen(2)
    )
    assert phases(attempts) == [Phase.ABORTED]
    await saved(store, 3, frozen(2))
    assert {ref.held_by for ref in (await index_at(store, 3)).objects if ref.held_by} == {"global_step1/00000001-0"}


async def test_dedup_3_what_does_not_stay_for_the_save_is_written_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the attempt is announced, with another base, after the shard was written."""
    store = MemoryStore()
    await saved(store, 1)
    refer_to_anything(monkeypatch)
    await saved(store, 2)
    assert "writes everything anew" in caplog.text
    assert not any(ref.held_by for ref in (await index_at(store, 2)).objects)
    assert await load_arrays(store, "global_step2", 0) == as_bytes(frozen(2))


def refer_to_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves are announced without a base, and refer to the checkpoint before all the same."""
    monkeypatch.setattr("checkpointd.pipeline.attempt.base_of", lambda *_: "")
    monkeypatch.setattr(dedup.Base, "within", lambda base, _: base)


async def removed_by_others(store: MemoryStore, *prefixes: str) -> None:
    other = MemoryStore()  # as another process sees it
    other.__dict__.update({name: value for name, value in store.__dict__.items() if name != "_root_log"})
    assert await remove(other, {"the test": prefixes}) == ""
    await sweep(other)


async def test_log_10_a_commit_that_refers_to_what_was_removed_after_the_votes_is_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    await saved(store, 1)
    refer_to_anything(monkeypatch)
    monkeypatch.setattr(persist, "lost", nothing_lost)
    decide = Attempt._put

    async def removed_first(self: Attempt, decision: Decision) -> LoggedAttempt:
        await removed_by_others(store, "global_step1/00000001-0")
        return await decide(self, decision)

    monkeypatch.setattr(Attempt, "_put", removed_first)
    saves = await save_checkpoint(
        store, tag="global_step2", world_size=1, dedup=True, tensors=lambda _: frozen(2), timeout_s=3600.0
    )
    assert phases(saves) == [Phase.ABORTED]
    assert "refers to objects that may be gone: global_step1/00000001-0 was removed" in str(saves[0].error)


async def nothing_lost(*_: object) -> None:
    return None


async def test_a_save_after_the_removal_of_its_base_writes_everything_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A user has deleted the newest checkpoint while the job goes on."""
    state = WriterState(store=MemoryStore(), persist=PersistConfig(compression="none", chunk_bytes=4096, dedup=True))
    await starts.take(state.store, 1)
    for step in (1, 2, 3, 4):
        info = AttemptInfo(tag=f"global_step{step}", attempt=AttemptId(1, 0), rank=0, world_size=1, step=step, n=step)
        attempt = Attempt(state, info, deadline=asyncio.get_running_loop().time() + 60.0)
        await attempt.run(shard_of(frozen(step)))
        assert attempt.phase == Phase.COMMITTED
        if step == 2:
            assert await remove(state.store, {"the test": [f"global_step{n}/00000001-0" for n in (1, 2)]}) == ""
            await sweep(state.store)
    assert "writes everything anew" not in caplog.text
    held = [{ref.held_by for ref in (await index_at(state.store, step)).objects if ref.held_by} for step in (3, 4)]
    assert held == [set(), {"global_step3/00000001-0"}]


class CountingStore(MemoryStore):
    """Counts the objects whose size was asked for, by name or in a listing."""

    looks = 0

    async def stat(self, key: str) -> int | None:
        self.looks += 1
        return await super().stat(key)

    async def list(self, prefix: str) -> list[Entry]:
        entries = await super().list(prefix)
        self.looks += len(entries)
        return entries


async def looks_at_references(world_size: int) -> int:
    store = CountingStore()
    for step in (1, 2):
        attempts = await save_checkpoint(
            store, tag=f"global_step{step}", world_size=world_size, tensors=lambda _: frozen(1), dedup=True
        )
        assert phases(attempts) == [Phase.COMMITTED] * world_size
    index = await index_at(store, 2)
    assert len([ref for ref in index.objects if ref.held_by]) == 1
    store.looks = 0
    assert await dedup.lost(store, index) is None
    return store.looks


async def test_dedup_3_the_look_at_references_costs_a_rank_the_same_whatever_the_number_of_ranks() -> None:
    assert await looks_at_references(2) == await looks_at_references(16) == 1  # the object


async def looks_for_the_base(world_size: int) -> int:
    store = CountingStore()
    await save_checkpoint(store, world_size=world_size, tensors=lambda _: frozen(1))
    store.looks = 0
    info = AttemptInfo(tag="global_step2", attempt=AttemptId(1, 0), rank=1, world_size=world_size, step=2, n=2)
    base = await dedup.Bases(store).newest(info)
    assert base is not None
    assert base.step == 1
    return store.looks


async def test_a_started_rank_finds_its_base_with_as_many_looks_whatever_the_number_of_ranks() -> None:
    assert await looks_for_the_base(2) == await looks_for_the_base(64)


@pytest.mark.parametrize("gone", ["object", "size"])
async def test_dedup_3_what_is_gone_or_has_another_size_is_not_referred_to(gone: str) -> None:
    store = MemoryStore()
    for step in (1, 2):
        await saved(store, step, frozen(1))
    index = await index_at(store, 2)
    [key] = dedup.referred(index)
    if gone == "size":
        await store.put(key, b"other")
    else:
        await store.delete(key)
    assert "global_step1/00000001-0" in (await dedup.lost(store, index) or "")


async def test_a_base_that_cannot_be_read_costs_nothing_but_a_whole_save(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    await saved(store, 1)
    for path in objects(tmp_path / "global_step1", ".index"):
        path.write_bytes(b"nonsense")
    await saved(store, 2)
    assert not any(ref.held_by for ref in (await index_at(store, 2)).objects)


def with_constant(step: int, constant: int, moving: int) -> Arrays:
    """`constant` and `moving` elements of four bytes."""
    return {"constant": np.arange(constant, dtype=np.int32), "moving": np.arange(moving, dtype=np.int32) + step}


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_a_small_unchanged_part_is_settled_in_an_object_of_its_own(tmp_path: Path, compression: Compression) -> None:
    """Referring to the first save's object would keep all of it alive for a tenth of it."""
    store = PosixStore(tmp_path)
    for step in (1, 2, 3, 4):
        await saved(store, step, with_constant(step, 5000, 45000), compression=compression)
    found = [(await index_at(store, step)).objects for step in (1, 2, 3, 4)]
    assert [{ref.held_by for ref in objects if ref.held_by} for objects in found[:2]] == [set(), set()]
    older = [ref for ref in found[3] if ref.held_by]
    assert {ref.held_by for ref in older} == {"global_step2/00000001-0"}
    assert older == [ref for ref in found[2] if ref.held_by]
    assert sum(ref.size for ref in older) < 30000
    for step in (1, 2, 3, 4):
        assert await load_arrays(store, f"global_step{step}", 0) == as_bytes(with_constant(step, 5000, 45000))


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=2, max_size=4), st.sampled_from(COMPRESSIONS))
def test_any_series_of_states_loads_as_it_was_saved(series: list[list[int]], compression: Compression) -> None:
    """Each state is three tensors of two chunks, each chunk of one of a few contents."""

    def state(numbers: list[int]) -> Arrays:
        return {f"t{n}": np.repeat(np.array([number, 7 - number], dtype=np.float32), 1024) for n, number in enumerate(numbers)}

    async def run() -> None:
        store = MemoryStore()
        for step, numbers in enumerate(series, 1):
            await saved(store, step, state(numbers), compression=compression)
        for step, numbers in enumerate(series, 1):
            assert await load_arrays(store, f"global_step{step}", 0) == as_bytes(state(numbers))

    asyncio.run(run())
