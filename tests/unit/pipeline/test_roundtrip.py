"""Save -> commit -> latest -> load -> verify, through the real pipelines on a POSIX store."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.codec import Compression
from checkpointd.commit.machine import Phase
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, DeadlineError, FencedError, NotFoundError, StagingError
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import begin_start, break_file, leave_in_doubt, load_arrays, objects, phases, rank_arrays, save_checkpoint


@pytest.mark.parametrize("compression", ["none", "zstd", "planes", "auto"])
async def test_what_was_saved_is_what_loads(tmp_path: Path, compression: Compression) -> None:
    async with PosixStore(tmp_path) as store:
        attempts = await save_checkpoint(store, world_size=3, compression=compression)
        assert phases(attempts) == [Phase.COMMITTED] * 3
        assert await root_view.latest(store) == "global_step1"
        for rank in range(3):
            expected = {fqn: array.tobytes() for fqn, array in rank_arrays(rank).items()}
            assert await load_arrays(store, "global_step1", rank) == expected
        verdict = await verify(store, await root_view.find(store, "global_step1"), LoadConfig())
        assert verdict.whole
        assert verdict.bytes_read > 0


async def test_a_failed_rank_aborts_the_attempt_on_all_ranks_and_latest_stays(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, tag="global_step1")
        attempts = await save_checkpoint(store, tag="global_step2", failing={1: RuntimeError("out of luck")})
        assert phases(attempts) == [Phase.ABORTED, Phase.FAILED]
        for attempt in attempts:
            assert isinstance(attempt.error, StagingError)
            assert "rank 1 failed" in str(attempt.error)
            assert "out of luck" in str(attempt.error)
        assert await root_view.latest(store) == "global_step1"
        [view] = await root_view.attempts_of(store, "global_step2")
        assert view.state == "aborted"
        assert not view.facts.bulk


async def test_a_rank_that_never_saves_aborts_at_the_deadline_and_is_named(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        [attempt] = await save_checkpoint(store, absent=frozenset({1}))
        assert attempt.phase is Phase.ABORTED
        assert isinstance(attempt.error, DeadlineError)
        assert attempt.error.ranks == (1,)


async def test_an_older_start_cannot_commit(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        old = await begin_start(store)
        await begin_start(store)
        attempts = await save_checkpoint(store, start=old)
        assert phases(attempts) == [Phase.ABORTED] * 2
        assert all(isinstance(attempt.error, FencedError) for attempt in attempts)
        assert await root_view.latest(store) is None


async def test_recovery_rolls_forward_what_all_ranks_voted_for_and_aborts_the_rest(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        await leave_in_doubt(store, tag="global_step1", voting=(0, 1))
        await leave_in_doubt(store, tag="global_step2", voting=(1,))
        done = await recover(store, await begin_start(store))
        assert {o.tag: o.outcome for o in done.decided} == {"global_step1": "commit", "global_step2": "abort"}
        assert done.latest_moved_to == "global_step1"
        assert await load_arrays(store, "global_step1", 1) == {f: a.tobytes() for f, a in rank_arrays(1).items()}


async def test_saving_a_tag_again_replaces_it_and_leaves_one_checkpoint(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, tag="best", k=0, n=0)
        await save_checkpoint(store, tag="best", k=1, n=1, tensors=lambda rank: rank_arrays(rank + 5))
        assert await load_arrays(store, "best", 0) == {f: a.tobytes() for f, a in rank_arrays(5).items()}
        older, newer = await root_view.attempts_of(store, "best")
        assert (older.state, newer.state) == ("deleted", "committed")
        assert not older.facts.bulk


async def test_latest_never_goes_back(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, tag="global_step5")
        await save_checkpoint(store, tag="global_step4")
        assert await root_view.latest(store) == "global_step5"


@pytest.mark.parametrize("suffix", ["chunks", "index", "ballot", "outcome"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
async def test_no_damage_to_any_object_loads(tmp_path: Path, suffix: str, fault: str) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, world_size=1)
        [path] = objects(tmp_path / "global_step1", suffix)
        break_file(path, fault)
        with pytest.raises((DamagedError, NotFoundError)):
            await load_arrays(store, "global_step1", 0)


async def test_verify_lists_every_damage_with_object_fqn_and_rank(tmp_path: Path) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, world_size=2)
        for path in objects(tmp_path, "-0.chunks"):
            break_file(path, "flip")
        verdict = await verify(store, await root_view.find(store, "global_step1"), LoadConfig())
        assert len(verdict.damage) == 2
        for rank, damage in enumerate(verdict.damage):
            assert (damage.rank, damage.fqn) == (rank, "model.weight")
            assert damage.key.endswith(f"{rank:05d}-0.chunks")
            assert damage.key in damage.message


async def test_the_memory_store_keeps_the_same_promise() -> None:
    async with MemoryStore() as store:
        assert phases(await save_checkpoint(store)) == [Phase.COMMITTED] * 2
        assert await load_arrays(store, "global_step1", 1) == {f: a.tobytes() for f, a in rank_arrays(1).items()}
