"""A save whose storage refuses for good: no rank waits, and all ranks raise the error of the one that met it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.errors import (
    AbortedError,
    CheckpointdError,
    SidecarError,
    StagingError,
    StateError,
    StoreError,
    StoreFullError,
    UnreadableError,
    UsageError,
)
from checkpointd.pipeline.root import reserve, root_view
from checkpointd.store.base import SMALL_BYTES_MAX, Store
from checkpointd.store.posix.failures import store_error
from checkpointd.store.posix.store import PosixStore
from tests.builders import plan_save, save_checkpoint

LONG_S = 3600.0
"""A deadline that no test waits for."""

LASTING = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.EFBIG, errno.ENOSYS]


class KnownHere(StoreFullError):
    """A class that other processes do not know."""


class Refusing(PosixStore):
    """Puts that `refuses` chooses, and gets of keys that `hides` chooses, fail with the error `number`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.number, self.refused = errno.EIO, 0
        self.refuses: Callable[[str, bytes], bool] = lambda _key, _data: False
        self.hides: Callable[[str], bool] = lambda _key: False

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if self.refuses(key, data):
            self.refused += 1
            raise self._error(key)
        return await super().put_if_absent(key, data, durable=durable)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        if self.hides(key):
            self.refused += 1
            raise self._error(key, reads=True)
        return await super().get(key, size_max=size_max)

    async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
        return await Store.get_each(self, keys, size_max=size_max)  # by `get`

    def _error(self, key: str, *, reads: bool = False) -> StoreError:
        cause = OSError(self.number, os.strerror(self.number))
        error = store_error(cause, doing="reaching", key=key, url=self.url, reads=reads)
        error.__cause__ = cause
        return error


def commits(key: str, data: bytes) -> bool:
    return is_entry(key) and b'"kind": "commit"' in data


def decides(key: str, data: bytes) -> bool:
    return commits(key, data) or (is_entry(key) and b'"kind": "abort"' in data)


def is_entry(key: str) -> bool:
    return key.startswith("log/") and key.endswith(".json")


@pytest.fixture
def store(tmp_path: Path) -> Refusing:
    return Refusing(tmp_path / "root")


@pytest.mark.parametrize("number", LASTING)
async def test_attempt_9_a_commit_that_is_refused_for_good_aborts_on_all_ranks_at_once(store: Refusing, number: int) -> None:
    plan = await plan_save(store, world_size=3, timeout_s=LONG_S)
    store.number, store.refuses = number, commits
    attempts = await asyncio.gather(*(plan.run(rank) for rank in range(3)))
    assert {attempt.phase for attempt in attempts} == {Phase.ABORTED}
    assert store.refused == 2  # the log tries once more, as the first put may have had its effect
    for attempt in attempts:
        assert type(attempt.error) is (StoreFullError if number in (errno.ENOSPC, errno.EDQUOT) else StoreError)
        assert attempt.error.ranks == (0,)
        assert errno.errorcode[number] in str(attempt.error)


@pytest.mark.parametrize("number", LASTING)
@pytest.mark.parametrize("world_size", [1, 2])
async def test_attempt_9_nobody_waits_where_not_even_an_abort_can_be_put(store: Refusing, number: int, world_size: int) -> None:
    plan = await plan_save(store, world_size=world_size, timeout_s=LONG_S)
    store.number, store.refuses = number, decides
    for rank in range(1, world_size):
        await plan.vote(rank)
    attempt = await plan.run(0)
    assert attempt.phase is Phase.FAILED
    assert errno.errorcode[number] in str(attempt.error)
    assert isinstance(attempt.error, StoreError)


async def test_attempt_9_an_outcome_that_may_not_be_read_is_not_waited_for(store: Refusing) -> None:
    plan = await plan_save(store, world_size=2, timeout_s=LONG_S, absent=frozenset({0}))
    store.number, store.hides = errno.EACCES, is_entry
    attempt = await plan.run(1)
    assert attempt.phase in (Phase.ABORTED, Phase.FAILED)
    assert "permission is missing" in str(attempt.error)


async def test_what_may_pass_is_waited_for(store: Refusing) -> None:
    plan = await plan_save(store, world_size=2, timeout_s=LONG_S)
    store.number = errno.EIO
    store.refuses = lambda key, data: commits(key, data) and store.refused < 3
    attempts = await asyncio.gather(*(plan.run(rank) for rank in range(2)))
    assert {attempt.phase for attempt in attempts} == {Phase.COMMITTED}
    assert store.refused == 3


async def test_an_abort_takes_the_place_of_the_ballast_and_the_ballast_comes_back(store: Refusing) -> None:
    """There is room for one small object, once the ballast is gone."""
    await reserve.take_aboard(store)
    plan = await plan_save(store, world_size=2, timeout_s=LONG_S)
    held: list[bool] = []

    def is_full(key: str, data: bytes) -> bool:
        there = (Path(store.url) / reserve.KEY).exists()
        if decides(key, data):
            held.append(there)
        return there and decides(key, data)

    store.number, store.refuses = errno.ENOSPC, is_full
    attempts = await asyncio.gather(*(plan.run(rank) for rank in range(2)))
    assert {type(attempt.error) for attempt in attempts} == {StoreFullError}
    # The commit and the abort, each tried again by the log, and the abort in place of the ballast.
    assert held == [True, True, True, True, False]
    assert (Path(store.url) / reserve.KEY).exists()
    decided = await root_view.logged(store, plan.info(0).prefix)
    assert decided is not None
    assert decided.status == "aborted"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (StoreFullError("the disk is full"), StoreFullError),
        (StagingError("w was changed"), StagingError),
        (StateError("a socket"), StateError),
        (UsageError("no such option"), UsageError),
        (UnreadableError("it cannot be read"), UnreadableError),
        (SidecarError("it is away", "start it"), SidecarError),
        (KnownHere("it is full"), StoreFullError),
        (RuntimeError("of no class of ours"), StagingError),
    ],
)
async def test_every_rank_raises_the_class_that_the_failed_rank_had(
    store: Refusing, raised: Exception, kind: type[CheckpointdError]
) -> None:
    attempts = await save_checkpoint(store, world_size=3, timeout_s=LONG_S, failing={1: raised})
    for rank, attempt in enumerate(attempts):
        error = attempt.error
        assert type(error) is kind
        assert error.ranks == (1,)
        abort = error.__context__
        assert isinstance(abort, AbortedError)
        assert abort.ranks == (1,)
        assert abort.__context__ is (raised if rank == 1 else None)
        assert error.__suppress_context__  # a traceback shows one message
        assert error.__cause__ is None


@pytest.mark.parametrize(
    ("method", "failing", "phases"),
    [
        pytest.param("put_if_match", {}, [Phase.COMMITTED, Phase.COMMITTED], id="while `latest` moves"),
        pytest.param("delete", {1: StoreError("I/O error")}, [Phase.ABORTED, Phase.FAILED], id="while leftovers go"),
    ],
)
async def test_attempt_1_an_unforeseen_error_of_the_store_ends_no_attempt_in_another_phase(
    store: Refusing, method: str, failing: dict[int, Exception], phases: list[Phase], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def defective(*_: object) -> None:
        raise RuntimeError("a defect of the store")

    monkeypatch.setattr(store, method, defective)
    attempts = await save_checkpoint(store, world_size=2, timeout_s=LONG_S, failing=failing)
    assert [attempt.phase for attempt in attempts] == phases
