"""SENDING-1 and SENDING-4: how an object is cut for its upload; references and files through the spool."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.machine import IN_SPOOL, Phase
from checkpointd.config import CommitConfig, LoadConfig, PersistConfig, SpoolConfig
from checkpointd.daemon.spool.uploads import runs_of
from checkpointd.errors import LostReferenceError
from checkpointd.layout.indexes import Chunk
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import rank_arrays
from tests.spooled_saves import AwayStore, Node, begun_root, contents, until


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=30),
    st.integers(0, 60),
    st.integers(1, 200),
)
def test_sending_1_each_byte_is_in_one_run_and_each_chunk_is_whole_in_one(
    gaps: list[tuple[int, int]], tail: int, block: int
) -> None:
    chunks, at = [], 0
    for gap, nbytes in gaps:
        chunks.append(Chunk(0, at + gap, nbytes, nbytes, "raw", None, b"0" * 16))
        at += gap + nbytes
    size = at + tail
    runs = list(runs_of(chunks[::-1], size, block))
    assert [run.start for run in runs] == [0, *[run.stop for run in runs[:-1]]] if size else not runs
    assert (runs[-1].stop if runs else 0) == size
    assert sorted((c for run in runs for c in run.chunks), key=lambda c: c.offset) == chunks
    for run in runs:
        assert all(run.start <= c.offset and c.offset + c.stored <= run.stop for c in run.chunks)
        assert run.stop - run.start <= block + 2 * 150 + tail or not run.chunks


def state(step: int, frozen: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(step)
    still = np.random.default_rng(7 + frozen).integers(0, 255, 1 << 18, np.uint8)
    return {**rank_arrays(0), "frozen.weight": still, "model.large": random.integers(0, 255, 1 << 14, np.uint8)}


def saved(node: Node, step: int, *, frozen: int = 0) -> Attempt:
    return node.save(step, state=state(step, frozen))


async def node_at(root: AwayStore, **persist: Any) -> Node:
    config = PersistConfig(compression="none", chunk_bytes=4096, **persist)
    node = Node(root, SpoolConfig(directory="/spool"), nonce=await begun_root(root), persist=config)
    node.commit = CommitConfig(timeout_s=600.0, read_back=False)
    return await node.begin()


async def whole(root: AwayStore) -> list[str]:
    found = await root_view.checkpoints(root)
    for checkpoint in found:
        assert (await verify(root, checkpoint, LoadConfig())).whole
    return [one.tag for one in found]


def test_unchanged_chunks_are_not_uploaded_again() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        for step in (1, 2, 3):
            saved(node, step)
            await node.over()
        assert await whole(root) == ["global_step3", "global_step2", "global_step1"]
        sizes = {
            step: sum(data.nbytes for key, data in contents(root).items() if f"step{step}/" in key and key.endswith(".chunks"))
            for step in (1, 2, 3)
        }
        assert sizes[1] > 1 << 18 > 4 * sizes[2] > 0

    simloop.run(1, main())


def test_a_save_whose_reference_is_gone_at_the_upload_fails_by_name_and_the_next_one_commits() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        saved(node, 1)
        await node.over()
        root.away = True
        attempt = saved(node, 2)
        await until(lambda: attempt.phase in IN_SPOOL)
        root.away = False
        for key in [key for key in contents(root) if key.startswith("global_step1/")]:
            del contents(root)[key]
        await node.over()
        assert attempt.phase is Phase.FAILED
        assert isinstance(attempt.error, LostReferenceError)
        node.state.bases.forget()
        saved(node, 3, frozen=1)
        await node.over()
        newest = (await root_view.checkpoints(root))[0]
        assert (newest.tag, (await verify(root, newest, LoadConfig())).whole) == ("global_step3", True)

    simloop.run(1, main())


def test_spool_7_a_root_that_hangs_costs_a_moment_and_no_save() -> None:
    class Hangs(AwayStore):
        hangs = False

        async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
            while self.hangs:
                await asyncio.sleep(1.0)
            return await super().get(key, size_max=size_max)

        async def list(self, prefix: str) -> Any:
            while self.hangs:
                await asyncio.sleep(1.0)
            return await super().list(prefix)

    async def main() -> None:
        root = Hangs(MemoryStore())
        node = await node_at(root)
        root.hangs = True
        attempt = saved(node, 1)
        await until(lambda: attempt.phase in IN_SPOOL)
        assert asyncio.get_running_loop().time() < 15.0
        await asyncio.sleep(3600.0)
        assert attempt.phase in IN_SPOOL
        root.hangs = False
        await node.over()
        assert await whole(root) == ["global_step1"]

    simloop.run(1, main())
