"""Deltas from the last checkpoint in full: DELTA-1 to DELTA-4 of pipeline/write/encode.py, on the real pipelines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from checkpointd.commit.retention import Retention
from checkpointd.config import LoadConfig, PersistConfig
from checkpointd.errors import DamagedError, UsageError
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.gc.collect import references
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.write.dedup import referred
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import Arrays, collect, delete_checkpoint, load_arrays, phases, plan_save, save_checkpoint
from tests.format_reader import index_of, tensors_of

ELEMENTS = 120_000
"""Two chunks of float32."""
CHUNK_BYTES = 256 << 10


def drifting(step: int) -> Arrays:
    """Weights that move a little in each step, noise, a constant, and a tensor too small for a delta."""
    random = np.random.default_rng(0)
    weights = (random.standard_normal(ELEMENTS) * 0.02).astype(np.float32)
    for number in range(step):
        weights = weights + (np.random.default_rng(number).standard_normal(ELEMENTS) * 1e-8).astype(np.float32)
    return {
        "weights": weights,
        "noise": np.random.default_rng(1000 + step).integers(0, 1 << 32, ELEMENTS, dtype=np.uint32).view(np.int32),
        "constant": np.arange(ELEMENTS, dtype=np.int32),
        "small": np.full(100, step, dtype=np.float32),
    }


async def saved(store: Store, step: int, **options: object) -> None:
    chosen = {"dedup": True, "full_every": 3, "compression": "planes", "chunk_bytes": CHUNK_BYTES, **options}
    attempts = await save_checkpoint(store, tag=f"global_step{step}", world_size=1, tensors=lambda _: drifting(step), **chosen)
    assert phases(attempts) == [attempts[0].phase.COMMITTED]


async def index_at(store: Store, step: int) -> Index:
    return await read_index(store, await root_view.find(store, f"global_step{step}"), 0)


def deltas_of(index: Index) -> dict[str, list[bool]]:
    return {t.fqn: [chunk.base is not None for chunk in t.chunks] for t in index.tensors}


def holders(index: Index) -> set[str]:
    return {index.objects[c.base.object].held_by for t in index.tensors for c in t.chunks if c.base is not None}


def as_bytes(step: int) -> dict[str, bytes]:
    return {fqn: array.tobytes() for fqn, array in drifting(step).items()}


async def test_weights_become_deltas_and_load_as_they_were(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for step in (1, 2):
        await saved(store, step)
    index = await index_at(store, 2)
    assert deltas_of(index) == {"weights": [True] * 2, "noise": [False] * 2, "constant": [False] * 2, "small": [False]}
    full, delta = [[c.stored for c in (await index_at(store, step)).tensors[0].chunks] for step in (1, 2)]
    assert sum(delta) < 0.4 * 4 * ELEMENTS < 0.5 * sum(full)
    assert await load_arrays(store, "global_step2", 0) == as_bytes(2)
    assert (await verify(store, await root_view.find(store, "global_step2"), LoadConfig())).whole
    assert (await read_back(store, await root_view.find(store, "global_step2"))).whole
    folder, found = index_of(tmp_path, "global_step2", 0)
    assert {fqn: data for fqn, (_, _, data) in tensors_of(folder, found).items()} == as_bytes(2)


async def test_delta_1_and_4_every_third_checkpoint_is_in_full_and_the_others_need_only_that() -> None:
    store = MemoryStore()
    for step in range(1, 8):
        await saved(store, step)
    indexes = {step: await index_at(store, step) for step in range(1, 8)}
    assert [indexes[step].since_full for step in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert [holders(indexes[step]) for step in range(1, 8)] == [
        set(), *[{"global_step1/00000001-0"}] * 2, set(), *[{"global_step4/00000001-0"}] * 2, set()
    ]  # fmt: skip
    for step in range(1, 8):
        assert await load_arrays(store, f"global_step{step}", 0) == as_bytes(step)


async def test_delta_1_chunks_of_another_size_than_those_before_are_stored_in_full() -> None:
    """As after a start with another `chunk_bytes`: chunks that begin at the same byte are no bases of each other."""
    store = MemoryStore()
    await saved(store, 1)
    await saved(store, 2, chunk_bytes=CHUNK_BYTES // 2)
    assert deltas_of(await index_at(store, 2))["weights"] == [False] * 4
    assert await load_arrays(store, "global_step2", 0) == as_bytes(2)


async def test_delta_4_what_is_unchanged_since_a_delta_is_written_in_full_again() -> None:
    store = MemoryStore()

    async def again(step: int) -> None:
        options = {"dedup": True, "full_every": 3, "compression": "planes", "chunk_bytes": CHUNK_BYTES}
        await save_checkpoint(store, tag=f"global_step{step}", world_size=1, tensors=lambda _: drifting(2), **options)

    await saved(store, 1)
    for step in (2, 3, 4):
        await again(step)
    deltas = [deltas_of(await index_at(store, step))["weights"] for step in (2, 3, 4)]
    assert deltas == [[True] * 2, [True] * 2, [False] * 2]
    refers = [set(referred(await index_at(store, step))) for step in (2, 3)]
    assert refers[0] < refers[1]  # the delta itself is referred to, with its base
    for step in (3, 4):
        assert await load_arrays(store, f"global_step{step}", 0) == as_bytes(2)


async def base_of(store: Store, step: int) -> tuple[str, int]:
    """The object and the first byte of the base of a delta in the checkpoint of `step`."""
    index = await index_at(store, step)
    base = index.tensors[0].chunks[0].base
    assert base is not None
    return index.objects[base.object].key(""), base.offset


async def spoil(store: Store, key: str, offset: int) -> None:
    data = bytearray(await store.get(key))
    data[offset + 100] ^= 1
    await store.put(key, bytes(data))


async def test_a_damaged_base_makes_its_deltas_damaged_and_is_named() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        await saved(store, step)
    key, offset = await base_of(store, 2)
    await spoil(store, key, offset)
    for step in (2, 3):
        verdict = await verify(store, await root_view.find(store, f"global_step{step}"), LoadConfig())
        assert [damage.key for damage in verdict.damage] == [key]
        assert f"{key} is damaged at byte {offset}" in verdict.damage[0].message
        assert f"global_step{step}/00000001-0/00000-1.chunks at byte" in verdict.damage[0].message
        assert "is a delta of it (rank 0, weights)" in verdict.damage[0].message
        with pytest.raises(DamagedError, match="is a delta of it"):
            await load_arrays(store, f"global_step{step}", 0)
        assert not (await read_back(store, await root_view.find(store, f"global_step{step}"))).whole


async def test_delta_2_a_chunk_whose_base_is_damaged_is_stored_in_full(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await saved(store, 1, dedup=False)
    chunk = (await index_at(store, 1)).tensors[0].chunks[0]
    await spoil(store, "global_step1/00000001-0/00000-1.chunks", chunk.offset)
    await saved(store, 2, dedup=False)
    assert deltas_of(await index_at(store, 2))["weights"] == [False, True]
    assert "stores a chunk of weights in full" in caplog.text
    assert await load_arrays(store, "global_step2", 0) == as_bytes(2)


async def test_delta_3_the_objects_of_bases_are_kept_while_deltas_need_them_and_no_longer(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for step in (1, 2, 3, 4):
        await saved(store, step, dedup=False)
    commits = {step: (await root_view.find(store, f"global_step{step}")).commit for step in (1, 2, 3, 4)}
    key, _ = await base_of(store, 3)
    first = "global_step1/00000001-0"
    assert {step: commit.holders for step, commit in commits.items()} == {1: (), 2: (first,), 3: (first,), 4: ()}
    assert (await references(store, await root_view.state_of(store), [first]))[0] == {first: {key}}
    await collect(store, Retention(keep_last=3))
    await delete_checkpoint(store, "global_step2")
    assert await root_view.directories(store) == [
        (f"global_step{step}", (await root_view.find(store, "global_step4")).id) for step in (1, 3, 4)
    ]
    assert await store.stat(key) is not None
    assert await load_arrays(store, "global_step3", 0) == as_bytes(3)
    await collect(store, Retention(keep_last=1))
    await delete_checkpoint(store, *(c.tag for c in (await root_view.checkpoints(store))[1:]))
    assert await store.stat(key) is None
    assert await load_arrays(store, "global_step4", 0) == as_bytes(4)


class Counting(MemoryStore):
    """Counts the reads of chunks."""

    reads = 0

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self.reads += 1
        await super().get_range(key, offset, out)


async def test_the_base_of_a_tensor_that_gains_nothing_is_read_once_in_full_every_saves() -> None:
    store, state = Counting(), None

    async def noise(step: int) -> int:
        before = store.reads
        arrays = {"noise": drifting(step)["noise"]}
        save = await plan_save(
            store, tag=f"global_step{step}", world_size=1, tensors=lambda _: arrays,
            full_every=3, compression="planes", chunk_bytes=CHUNK_BYTES,
        )  # fmt: skip
        nonlocal state
        state = state or save._attempt(0)._state
        deadline = asyncio.get_running_loop().time() + 60
        await Attempt(state, save.info(0), deadline=deadline).run(save._staged(0))
        return store.reads - before

    reads = [await noise(step) for step in range(1, 6)]
    assert [bool(count) for count in reads] == [False, True, False, False, True]


def test_full_every_is_checked() -> None:
    for bad in (1, 0, -3, True, 2.5, "3"):
        with pytest.raises(UsageError, match="full_every"):
            PersistConfig(full_every=bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="full_every=4 stores differences"):
        PersistConfig(full_every=4, compression="none")
    assert PersistConfig(full_every=2).full_every == 2
