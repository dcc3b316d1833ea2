"""Plans: PLAN-1 to PLAN-3 of pipeline/root/plans.py."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from checkpointd.codec.packed import pack
from checkpointd.errors import DamagedError, FormatError, StoreError, UsageError
from checkpointd.layout.keys import AttemptId, object_key, vote_name
from checkpointd.pipeline.root import plans, root_view
from checkpointd.pipeline.root.plans import OwnPlans, decode_plan, encode_plan, read_plan, remove_plans
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import make_shard, save_checkpoint


def layout(size: int) -> Shard:
    return make_shard({"w": np.zeros(size, np.float32)})


A, B = layout(3), layout(4)


def info(number: int, *, rank: int = 0, start: int = 1, takeover: int = 0) -> AttemptInfo:
    return AttemptInfo(
        tag=f"global_step{number}",
        attempt=AttemptId(start, 0),
        rank=rank,
        world_size=512,
        step=number,
        n=number,
        takeover=takeover,
        may_be_taken_over=True,
    )


async def stored(store: Store) -> set[str]:
    return {
        f".checkpointd/plans/{start.name}/{part.name}/{plan.name}"
        for start in await store.list(".checkpointd/plans")
        for part in await store.list(f".checkpointd/plans/{start.name}")
        for plan in await store.list(f".checkpointd/plans/{start.name}/{part.name}")
    }


async def test_a_plan_is_put_once_for_a_layout_and_a_start() -> None:
    store, own = MemoryStore(), OwnPlans()
    first = await own.use(store, info(1), A)
    assert await own.use(store, info(2), A) is first
    assert await stored(store) == {first.key}
    other = await own.use(store, info(3, start=2), A)
    assert await stored(store) == {first.key, other.key}
    assert (first.key.split("/")[2], other.key.split("/")[2]) == ("00000001", "00000002")


async def test_a_damaged_plan_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    key = (await OwnPlans().use(store, info(1), A)).key
    right = await store.get(key)
    await store.put(key, right[:-1])
    await OwnPlans().use(store, info(1), A)
    assert await store.get(key) == right
    assert "is damaged: it is written again" in caplog.text


async def test_plan_2_an_older_plan_goes_with_the_last_attempt_that_uses_it() -> None:
    store, own = MemoryStore(), OwnPlans()
    first = await own.use(store, info(1), A)
    await own.use(store, info(2), A)
    second = await own.use(store, info(3), B)
    await own.decided(store, info(3).prefix)
    await own.decided(store, info(1).prefix)
    assert await stored(store) == {first.key, second.key}
    await own.decided(store, info(2).prefix)
    assert await stored(store) == {second.key}


class Refusing(MemoryStore):
    """Refuses to delete."""

    refuses = True

    async def delete(self, key: str, *, durable: bool = True) -> None:
        if self.refuses:
            raise StoreError(f"{key}: I/O error")
        await super().delete(key, durable=durable)


async def test_a_removal_that_fails_fails_nothing_and_is_tried_again() -> None:
    store, own = Refusing(), OwnPlans()
    await own.use(store, info(1), A)
    plan = await own.use(store, info(2), B)
    await own.decided(store, info(1).prefix)
    assert len(await stored(store)) == 2
    store.refuses = False
    await own.decided(store, "global_step9/00000001-0")
    assert await stored(store) == {plan.key}


async def test_no_directory_stays_of_removed_plans(tmp_path: Path) -> None:
    async with PosixStore(f"{tmp_path}/run") as store:
        for start in (1, 2):
            await OwnPlans().use(store, info(1, start=start), A)
        await remove_plans(store, 2)
        assert [entry.name for entry in await store.list(".checkpointd/plans")] == ["00000002"]
        await OwnPlans().use(store, info(1, start=1), B)
        assert len(await stored(store)) == 2


# --- the bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xc1", "is damaged"),
        (msgspec.msgpack.encode({"format": "checkpointd.index", "version": 3}), "is not a checkpointd.plan object"),
        (msgspec.msgpack.encode({"format": "checkpointd.plan", "version": 1}), "has format version 1"),
        (msgspec.msgpack.encode({"format": "checkpointd.plan", "version": 3}), "is damaged"),
    ],
)
def test_other_content_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        decode_plan(pack(content), "plan")
    with pytest.raises(FormatError, match="plan is damaged"):
        decode_plan(content, "plan")


def test_a_plan_that_a_reader_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LISTING_BYTES_MAX", 10)
    with pytest.raises(UsageError, match=r"and \d+ in 10 are the limit: use fewer tensors"):
        encode_plan(A.plan(info(1)))


async def test_a_vote_that_names_the_plan_of_another_rank_is_refused() -> None:
    store = MemoryStore()
    await save_checkpoint(store)
    votes = [await root_view.read_vote(store, object_key("global_step1/00000001-0", vote_name(rank))) for rank in range(2)]
    assert (await read_plan(store, votes[1])).rank == 1
    with pytest.raises(DamagedError, match="is the plan of rank 1 of 2, not of rank 0"):
        await read_plan(store, msgspec.structs.replace(votes[0], plan=votes[1].plan))
