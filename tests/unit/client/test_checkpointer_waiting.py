"""What a Checkpointer's calls say while they wait, and that they do not wait for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from checkpointd import waits
from checkpointd.errors import StoreError
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline.shard import Shard
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, saver
from checkpointd_client.checkpointer import core_of
from checkpointd_client.staging.arena import Arena, SlotHold
from tests.builders import HeldPersist

SHORT_S = 0.05
LIMIT_S = 60.0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[str], bool]:
    """Whether a word about a wait was said that holds a text; the first is due soon."""
    monkeypatch.setattr(waits, "FIRST_REPORT_S", SHORT_S)
    caplog.set_level(logging.WARNING, "checkpointd")

    def has_said(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records if "still waiting" in record.getMessage())

    return has_said


def state(value: float) -> dict[str, object]:
    return {"w": torch.full((64,), value)}


def meanwhile(call: Callable[[], object], until: Callable[[], bool], then: Callable[[], object]) -> None:
    """Begin `call`, do `then` once `until` is true, and see `call` end."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    pause = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        if until():
            break
        pause.wait(0.01)
    assert until()
    assert thread.is_alive()
    then()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("call", ["close", "wait", "settle", "handle.wait"])
def test_whoever_waits_for_a_save_says_for_which_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], bool], call: str
) -> None:
    gate = HeldPersist(monkeypatch)
    ckpt = Checkpointer(tmp_path)
    handle = ckpt.save(1, state(1.0))
    waits_for = handle.wait if call == "handle.wait" else getattr(core_of(ckpt) if call == "settle" else ckpt, call)
    meanwhile(waits_for, lambda: said("global_step1 (00000001-0) is persisting: 0 of 0 bytes are on the disk"), gate.go.set)
    assert handle.phase == "committed"
    ckpt.close()


def test_a_save_that_waits_for_memory_says_whose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], bool]
) -> None:
    gate = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(float(step)))
        third = lambda: ckpt.save(3, state(3.0))  # noqa: E731  # one call, to be made on a thread
        meanwhile(third, lambda: said("global_step3 finds no free memory for its snapshot: global_step1"), gate.go.set)
    assert (tmp_path / "latest").read_text() == "global_step3\n"


@pytest.mark.parametrize(("waits_long", "max_overhead"), [(True, 0.03), (True, None), (False, 0.03)])
def test_a_save_that_holds_training_up_says_once_what_helps_and_counts_the_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waits_long: bool,
    max_overhead: float | None,
) -> None:
    monkeypatch.setattr(saver, "BUSY_S", 0.01 if waits_long else LIMIT_S)
    caplog.set_level(logging.WARNING, "checkpointd")
    gate = HeldPersist(monkeypatch)
    handles = []
    taken = Arena.acquire
    tried = threading.Event()

    def acquire(self: Arena, hold: SlotHold, nbytes: int, timeout: float | None) -> bool:
        if timeout:
            tried.set()
        return taken(self, hold, nbytes, timeout)

    monkeypatch.setattr(Arena, "acquire", acquire)

    def words() -> list[str]:
        return [r.getMessage() for r in caplog.records if "training waits with it" in r.getMessage()]

    with Checkpointer(tmp_path, max_overhead=max_overhead) as ckpt:
        handles += [ckpt.save(step, state(float(step))) for step in (1, 2)]
        assert ckpt.status().waited_s == 0.0
        until = (lambda: bool(words())) if waits_long else tried.is_set
        meanwhile(lambda: handles.append(ckpt.save(3, state(3.0))), until, gate.go.set)
        ckpt.wait()
        waited_s = handles[2].timings.waited_s
        assert waited_s > 0.0
        assert ckpt.status().waited_s == waited_s
        assert sorted(one.waited_s for one in ckpt.status().attempts) == [0.0, 0.0, waited_s]
        gate.go.clear()
        handles += [ckpt.save(step, state(float(step))) for step in (4, 5)]
        tried.clear()
        meanwhile(lambda: handles.append(ckpt.save(6, state(6.0))), tried.is_set, gate.go.set)
        ckpt.wait()
        assert ckpt.status().waited_s > waited_s
    assert len(words()) == waits_long
    assert all('when_busy="skip"' in word and "save less often" in word for word in words())
    assert all(("max_overhead above" in word) == (max_overhead is not None) for word in words())


def test_a_storage_that_is_silent_is_named_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[str], bool]
) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1.0)).wait()
        go = threading.Event()
        get = PosixStore.get

        async def held(self: PosixStore, key: str, **options: int) -> bytes:
            while not go.is_set():
                await asyncio.sleep(0.005)
            return await get(self, key, **options)

        monkeypatch.setattr(PosixStore, "get", held)
        meanwhile(lambda: ckpt.load(state(0.0)), lambda: said("the storage has not answered"), go.set)


def test_a_save_that_does_not_end_at_its_deadline_is_left_by_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a thread is inside a system call that never returns, and the attempt waits for it."""

    async def stuck(self: attempt_module.Attempt, staged: Awaitable[Shard]) -> None:
        await staged
        await asyncio.Event().wait()

    monkeypatch.setattr(attempt_module.Attempt, "run", stuck)
    monkeypatch.setattr(saver, "OVERTIME_S", SHORT_S)
    monkeypatch.setattr("checkpointd_client.core.TIDY_TIMEOUT_S", SHORT_S)
    ckpt = Checkpointer(tmp_path, commit_timeout_s=SHORT_S)
    handle = ckpt.save(1, state(1.0))
    with pytest.raises(StoreError, match="global_step1 was left in flight: its deadline passed"):
        ckpt.close()
    assert handle.phase == "failed"
