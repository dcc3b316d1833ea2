"""The bandwidth limit, in virtual time: what is let through and when, for whom, and what the pipeline makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from checkpointd.config import PersistConfig
from checkpointd.errors import UsageError
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress
from checkpointd.pipeline.write.chunks import write_chunks
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.rates import Rates
from checkpointd.store.limited import PIECE_BYTES_UNIT, LimitedStore, LimitedWriter, TokenBucket, pieces
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import make_shard, plan_save

T = TypeVar("T")
MIB = 1 << 20
RATE = 10 * MIB


def simulated(main: Coroutine[Any, Any, T], seed: int = 1) -> T:
    return simloop.run(seed, main)


def now() -> float:
    return asyncio.get_running_loop().time()


class Ledger:
    """An ObjectWriter that notes when which bytes came."""

    def __init__(self, log: list[tuple[float, str, int]], name: str) -> None:
        self._log, self._name = log, name

    async def write_at(self, offset: int, data: Buffer) -> None:
        self._log.append((now(), self._name, memoryview(data).nbytes))

    async def finish(self, size: int) -> None:
        return

    async def discard(self) -> None:
        return


Log = list[tuple[float, str, int]]


async def written(bucket: TokenBucket, writes: dict[str, list[int]], log: Log) -> None:
    """All writes of all writers at once."""
    works = []
    for name, sizes in writes.items():
        writer = LimitedWriter(Ledger(log, name), bucket)
        works += [writer.write_at(0, bytes(nbytes)) for nbytes in sizes]
    await asyncio.gather(*works)


# --- LIMIT-1: the rate ------------------------------------------------------------------------------------------------


@given(
    rate=st.sampled_from([1 * MIB, 3_333_333, 50 * MIB]),
    writes=st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 3 * MIB), max_size=4), min_size=1),
    seed=st.integers(0, 1000),
)
def test_limit_1_no_stretch_of_time_lets_more_through(rate: int, writes: dict[str, list[int]], seed: int) -> None:
    async def main() -> tuple[Log, float, TokenBucket]:
        log: Log = []
        bucket = TokenBucket(rate)
        await written(bucket, writes, log)
        return log, now(), bucket

    log, end, bucket = simulated(main(), seed)
    total = sum(nbytes for _, _, nbytes in log)
    assert total == sum(map(sum, writes.values()))
    for first, (start, _, _) in enumerate(log):
        let_through = 0
        for when, _, nbytes in log[first:]:
            let_through += nbytes
            assert let_through <= rate * (when - start) + bucket.burst_bytes + 1
    # Nor does it take longer than the limit makes it: the pauses are no shorter than a millisecond, once a piece.
    assert end <= max(0, total - bucket.burst_bytes) / rate + 0.001 * len(log)


def test_limit_1_a_second_at_the_least_limit_holds_a_second_of_bytes() -> None:
    async def main() -> int:
        log: Log = []
        await asyncio.wait_for(asyncio.shield(written(TokenBucket(MIB), {"a": [8 * MIB]}, log)), 100)
        return sum(nbytes for when, _, nbytes in log if 1.0 <= when < 2.0)

    assert abs(simulated(main()) - MIB) <= TokenBucket(MIB).piece_bytes


def test_limit_1_being_woken_late_loses_nothing_of_the_rate() -> None:
    """A daemon at a low priority runs late; what it did not take meanwhile it may take then."""

    async def late(seconds: float) -> None:
        await asyncio.sleep(seconds + 0.04)

    async def main() -> float:
        log: Log = []
        await written(TokenBucket(RATE, sleep=late), {"a": [10 * RATE]}, log)
        return now()

    assert 9.8 < simulated(main()) < 10.1


def test_an_own_clock_and_sleep_are_used() -> None:
    slept: list[float] = []
    time = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal time
        slept.append(seconds)
        time += seconds

    async def main() -> None:
        bucket = TokenBucket(RATE, clock=lambda: time, sleep=sleep)
        await bucket.take(bucket.burst_bytes)
        assert slept == []
        await bucket.take(bucket.piece_bytes)
        assert now() == 0.0

    simulated(main())
    assert time - 100.0 == pytest.approx(TokenBucket(RATE).piece_bytes / RATE, abs=0.002)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_limit_that_lets_nothing_through_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="lets nothing through"):
        TokenBucket(rate)


# --- LIMIT-2: fairness ------------------------------------------------------------------------------------------------


def test_limit_2_many_writes_at_once_get_no_larger_share() -> None:
    async def main() -> tuple[Log, TokenBucket]:
        log: Log = []
        bucket = TokenBucket(RATE)
        await written(bucket, {"greedy": [2 * MIB] * 8, "modest": [4 * MIB]}, log)
        return log, bucket

    log, bucket = simulated(main())
    given: dict[str, int] = {"greedy": 0, "modest": 0}
    for _, name, nbytes in log:
        given[name] += nbytes
        if given["modest"] < 4 * MIB:
            # The burst, and the piece that is waited for when the other one asks; after that they take turns.
            assert abs(given["greedy"] - given["modest"]) <= 3 * bucket.piece_bytes
    assert given == {"greedy": 16 * MIB, "modest": 4 * MIB}


def test_limit_2_a_write_waits_for_one_piece_of_each_other_writer() -> None:
    async def main() -> tuple[float, TokenBucket]:
        log: Log = []
        bucket = TokenBucket(RATE)
        crowd = asyncio.ensure_future(written(bucket, {f"writer {n}": [MIB] * 4 for n in range(6)}, log))
        await asyncio.sleep(0.5)
        asked = now()
        await LimitedWriter(Ledger(log, "late"), bucket).write_at(0, bytes(bucket.piece_bytes))
        waited = now() - asked
        await crowd
        return waited, bucket

    waited, bucket = simulated(main())
    assert 0 < waited <= 7.1 * bucket.piece_bytes / RATE


# --- LIMIT-3, LIMIT-4 ------------------------------------------------------------------------------------------------------


def test_limit_3_small_objects_pass_a_bucket_that_is_empty() -> None:
    async def main() -> None:
        bucket = TokenBucket(RATE)
        store = LimitedStore(MemoryStore(), bucket)
        await bucket.take(bucket.burst_bytes)
        began = now()
        assert await store.put_if_absent("tag/vote", bytes(MIB))
        await store.put("latest", b"tag")
        assert await store.put_if_match("latest", b"tag", b"tag2")
        assert len(await store.get("tag/vote")) == MIB
        await store.delete("tag/vote")
        assert now() == began

    simulated(main())


def test_limit_4_a_cancelled_write_takes_nothing_from_the_others() -> None:
    async def main() -> tuple[float, Log]:
        log: Log = []
        bucket = TokenBucket(RATE)
        await bucket.take(bucket.burst_bytes)
        given_up = asyncio.ensure_future(written(bucket, {"given up": [5 * MIB]}, log))
        await asyncio.sleep(0)
        kept = asyncio.ensure_future(written(bucket, {"kept": [bucket.piece_bytes]}, log))
        await asyncio.sleep(0.01)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await kept
        return now(), log

    end, log = simulated(main())
    assert [name for _, name, _ in log] == ["kept"]
    assert end == pytest.approx(TokenBucket(RATE).piece_bytes / RATE, abs=0.002)


def test_once_lifted_nothing_waits_any_more() -> None:
    async def main() -> float:
        log: Log = []
        bucket = TokenBucket(MIB)
        writing = asyncio.ensure_future(written(bucket, {"a": [100 * MIB], "b": [100 * MIB]}, log))
        await asyncio.sleep(1.0)
        bucket.lift()
        await writing
        return now()

    assert 1.0 <= simulated(main()) < 1.2


# --- cutting -----------------------------------------------------------------------------------------------------


@given(offset=st.integers(0, 1 << 40), nbytes=st.integers(0, 1 << 24), piece=st.integers(1, 1 << 10))
def test_pieces_cover_a_write_and_are_cut_where_blocks_end(offset: int, nbytes: int, piece: int) -> None:
    cut = list(pieces(offset, nbytes, piece * PIECE_BYTES_UNIT)) if nbytes // (piece * 4096) < 5000 else [(0, nbytes)]
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut[:-1])]
    assert cut[-1][1] == nbytes
    assert all((offset + stop) % PIECE_BYTES_UNIT == 0 for _, stop in cut[:-1])
    if len(cut) > 1:
        assert all(0 < stop - start <= piece * PIECE_BYTES_UNIT for start, stop in cut)


def test_a_write_in_pieces_is_the_same_bytes() -> None:
    data = np.random.default_rng(3).bytes(3 * MIB + 17)

    async def main() -> None:
        store = LimitedStore(MemoryStore(), TokenBucket(MIB))
        writer = await store.open_writer("tag/1/00000-0.chunks")
        await asyncio.gather(writer.write_at(1000, data[1000:]), writer.write_at(0, data[:1000]))
        await writer.finish(len(data))
        assert await store.get("tag/1/00000-0.chunks") == data

    simulated(main())


# --- what the pipeline makes of it ---------------------------------------------------------------------------------


async def persisted(store: MemoryStore | LimitedStore, saves: int) -> tuple[list[Index], Rates]:
    """The indexes of some saves of 40 MiB in a row, with `compression="auto"` and rates that they share."""
    weights = np.random.default_rng(5).normal(0, 0.02, 10 * MIB).astype(np.float32)
    shard: Shard = make_shard({"model.weight": weights})
    rates, indexes = Rates(), []
    for k in range(saves):
        info: AttemptInfo = (await plan_save(store, tag=f"global_step{k}", world_size=1)).info(0)
        config = PersistConfig(compression="auto", encoders=1)
        job = PersistJob(
            store=store,
            info=info,
            shard=shard,
            config=config,
            rates=rates,
            progress=ShardProgress(),
            stopped=lambda: False,
        )
        indexes.append(await write_chunks(job))
    return indexes, rates


def codecs(index: Index) -> set[str]:
    return {chunk.codec for tensor in index.tensors for chunk in tensor.chunks}


def test_auto_compresses_where_the_limit_makes_bandwidth_scarce() -> None:
    """The meter sees the limit, not the store behind it: the second save is the smaller and the sooner one."""

    async def main() -> tuple[list[Index], Rates]:
        return await persisted(LimitedStore(MemoryStore(), TokenBucket(RATE)), saves=2)

    [first, second], rates = simulated(main())
    assert codecs(first) == {"raw"}
    assert codecs(second) == {"planes"}
    assert rates.disk_bps == pytest.approx(RATE, rel=0.05)


def test_auto_stays_raw_where_the_limit_is_far_above_what_encoders_do() -> None:
    async def main() -> tuple[list[Index], Rates]:
        return await persisted(LimitedStore(MemoryStore(), TokenBucket(1e12)), saves=2)

    indexes, _ = simulated(main())
    assert [codecs(index) for index in indexes] == [{"raw"}, {"raw"}]
