"""Plans: PLAN-1 to PLAN-3 of pipeline/root/plans.py."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from checkpointd.codec.packed import pack
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, FormatError, StoreError, UsageError
from checkpointd.layout.keys import AttemptId, object_key, vote_name
from checkpointd.layout.log_records import CommitRecord
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import plans, root_view
from checkpointd.pipeline.root.plans import OwnPlans, decode_plan, encode_plan, read_plan, remove_plans
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, make_shard, restart, save_checkpoint


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


async def test_plan_1_writers_and_layouts_in_turn_share_no_plan() -> None:
    """Another writer takes a snapshot over, and a rank goes back to its layout before."""
    store, own = MemoryStore(), OwnPlans()
    keys = [(await own.use(store, info(number), shard)).key for number, shard in enumerate((A, B, layout(3)))]
    keys.append((await OwnPlans().use(store, info(0, takeover=1), A)).key)
    keys.append((await OwnPlans().use(store, info(0, rank=1), A)).key)
    assert len(set(keys)) == len(await stored(store)) == 5


async def test_plan_1_a_save_that_is_written_again_uses_its_plan_again() -> None:
    store = MemoryStore()
    keys = {(await OwnPlans().use(store, info(1), A)).key for _ in range(2)}
    assert keys == await stored(store)


async def test_a_damaged_plan_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    key = (await OwnPlans().use(store, info(1), A)).key
    right = await store.get(key)
    await store.put(key, right[:-1])
    await OwnPlans().use(store, info(1), A)
    assert await store.get(key) == right
    assert "is damaged and is written again" in caplog.text


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


async def test_plan_2_the_plan_in_use_stays_when_all_is_decided() -> None:
    store, own = MemoryStore(), OwnPlans()
    plan = await own.use(store, info(1), A)
    await own.decided(store, info(1).prefix)
    assert await stored(store) == {plan.key}
    assert await own.use(store, info(2), A) is plan


async def test_plan_2_back_to_the_layout_before_while_its_plan_goes() -> None:
    """A, B, A: the removal of the first plan comes between the look of the third save and its vote."""
    store, own, again = MemoryStore(), OwnPlans(), layout(3)
    first = await own.use(store, info(1), A)
    await own.use(store, info(2), B)
    third = await own.use(store, info(3), again)
    for number in (1, 2):
        await own.decided(store, info(number).prefix)
    assert await stored(store) == {third.key}
    assert first.key != third.key


async def test_plan_2_a_slow_writer_removes_no_plan_of_the_one_that_took_over() -> None:
    store, slow, later = MemoryStore(), OwnPlans(), OwnPlans()
    await slow.use(store, info(1), A)
    await slow.use(store, info(2), B)
    kept = {(await later.use(store, info(2, takeover=1), B)).key, (await later.use(store, info(3), layout(3))).key}
    for number in (1, 2, 3):
        await slow.decided(store, info(number).prefix)
    assert kept <= await stored(store)


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


async def test_plan_3_a_start_removes_plans_of_older_starts_without_a_surviving_attempt() -> None:
    store = MemoryStore()
    keys = {start: (await OwnPlans().use(store, info(1, rank=300, start=start), A)).key for start in (1, 2, 3, 4)}
    assert keys[1].startswith(".checkpointd/plans/00000001/1/")
    assert await remove_plans(store, 4, ["global_step1/00000002-0"]) == 2
    assert await stored(store) == {keys[2], keys[4]}
    assert await remove_plans(store, 5) == 2


async def test_no_directory_stays_of_removed_plans(tmp_path: Path) -> None:
    async with PosixStore(f"{tmp_path}/run") as store:
        for start in (1, 2):
            await OwnPlans().use(store, info(1, start=start), A)
        await remove_plans(store, 2)
        assert [entry.name for entry in await store.list(".checkpointd/plans")] == ["00000002"]
        await OwnPlans().use(store, info(1, start=1), B)
        assert len(await stored(store)) == 2


async def test_a_checkpoint_needs_no_plan() -> None:
    """Not to be loaded or verified, and not by the recovery of an attempt in doubt."""
    store = MemoryStore()
    await save_checkpoint(store)
    await leave_in_doubt(store, tag="global_step2")
    assert await remove_plans(store, 2) == 4
    [decided] = (await restart(store)).decided
    assert isinstance(decided, CommitRecord)
    for tag in ("global_step1", "global_step2"):
        assert (await verify(store, await root_view.find(store, tag), LoadConfig())).whole


# --- the bytes ----------------------------------------------------------------------------------------------------


def test_what_is_encoded_is_decoded_and_small() -> None:
    shard = make_shard({f"layers.{n}.weight": np.zeros(1, np.float32) for n in range(2000)})
    plan = shard.plan(info(1))
    data = encode_plan(plan)
    assert decode_plan(data, "plan") == plan
    assert len(data) < 16 * 2000


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
