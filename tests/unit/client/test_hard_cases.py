"""Cases that a hostile reader found: each would once have lost, torn or hung something."""

from __future__ import annotations

import asyncio
import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointd.commit.machine import Phase
from checkpointd.errors import (
    AbortedError,
    CheckpointdError,
    ClosedError,
    StagingError,
    StoreError,
    StoreFullError,
    UnreadableError,
)
from checkpointd.layout.keys import vote_name
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from checkpointd_client.restore.sinks import sink_for
from checkpointd_client.restore.uploads import Uploads
from checkpointd_client.staging.copies import Copies
from tests.builders import HeldPersist, plan_save, rank_arrays, save_checkpoint
from tests.lease_builders import simulated


def _state(value: float = 1.0, size: int = 64) -> dict[str, object]:
    return {"w": torch.full((size, size), value)}


def _aborts(data: bytes) -> bool:
    return b'"kind": "abort"' in data


class VoteLosingStore(PosixStore):
    """Fails to store this rank's vote, and for a while everything small after it."""

    refusing = 0

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if key.endswith(".vote") and self.refusing:
            raise StoreFullError("no space for the vote")
        if key.startswith("log/0") and _aborts(data) and self.refusing:
            self.refusing -= 1
            raise StoreFullError("no space for the abort")
        return await super().put_if_absent(key, data, durable=durable)


async def test_an_uncertain_vote_is_never_taken_for_a_commit(tmp_path: Path) -> None:
    store = VoteLosingStore(tmp_path / "root")
    await save_checkpoint(store, tag="global_step1", world_size=1)
    store.refusing = 2
    (attempt,) = await save_checkpoint(store, tag="global_step2", world_size=1, timeout_s=1.0)
    assert attempt.phase is Phase.ABORTED
    assert isinstance(attempt.error, StoreFullError)
    assert [c.tag for c in await root_view.checkpoints(store)] == ["global_step1"]
    assert await root_view.latest(store) == "global_step1"


def test_a_vote_that_vanishes_is_no_commit_either() -> None:
    async def vanishes() -> None:
        store = MemoryStore("root")
        plan = await plan_save(store, world_size=2, timeout_s=1.0)
        run = asyncio.ensure_future(plan.run(0))
        vote = plan.info(0).key(vote_name(0))
        while await store.stat(vote) is None:
            await asyncio.sleep(0.005)
        await store.delete(vote)
        attempt = await run
        assert attempt.phase is Phase.ABORTED
        assert await root_view.latest(store) is None

    simulated(vanishes)


async def test_two_steps_under_one_tag_do_not_commit_as_one(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "root")
    early = await plan_save(store, tag="best", step=50, world_size=2)
    late = await plan_save(store, tag="best", step=60, world_size=2)
    attempts = await asyncio.gather(early.run(0), late.run(1))
    for attempt in attempts:
        assert attempt.phase is Phase.ABORTED
        assert "rank 0 saved step 50 and rank 1 step 60" in str(attempt.error)
    assert not await root_view.checkpoints(store)


async def test_two_layouts_in_flight_at_once_both_commit(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "root")
    small = await plan_save(store, tag="a", world_size=2)
    large = await plan_save(
        store, tag="b", n=2, world_size=2, tensors=lambda r: {**rank_arrays(r), "more": np.ones(5, dtype=np.float32)}
    )
    attempts = await asyncio.gather(*(plan.run(rank) for plan in (small, large) for rank in (0, 1)))
    assert {a.phase for a in attempts} == {Phase.COMMITTED}


def test_chunks_of_a_strided_tensor_may_come_on_many_threads() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        source = torch.randn(64, 3, 32, 32)
        raw = source.numpy().reshape(-1).view(np.uint8)
        for _ in range(40):
            target = torch.empty_like(source).contiguous(memory_format=torch.channels_last)
            sink = sink_for(target, "target", "float32", Uploads(0))
            part = raw.nbytes // 8
            gate = threading.Barrier(8)

            def deliver(at: int, sink: object = sink, gate: threading.Barrier = gate, part: int = part) -> None:
                gate.wait()
                sink(at, raw[at : at + part])

            threads = [threading.Thread(target=deliver, args=(i * part,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert torch.equal(target, source)
    finally:
        sys.setswitchinterval(before)


def _sleep_for_good(awake: Event) -> None:
    awake.set()
    while True:
        threading.Event().wait(0.1)


def test_a_forked_child_leaves_at_once_and_hears_its_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = HeldPersist(monkeypatch)
    fork = multiprocessing.get_context("fork")
    with Checkpointer(tmp_path, preempt_signals=signal.SIGTERM) as ckpt:
        ckpt.save(1, _state())
        child = fork.Process(target=os.getpid)
        child.start()
        child.join(30)
        assert child.exitcode == 0
        awake = fork.Event()
        asleep = fork.Process(target=_sleep_for_good, args=(awake,))
        asleep.start()
        # CPython forgets a signal that comes between fork() and the child's first line, whoever handles it.
        assert awake.wait(30)
        os.kill(asleep.pid, signal.SIGTERM)
        asleep.join(30)
        assert asleep.exitcode == -signal.SIGTERM
        assert not ckpt.preempting
        gate.go.set()
    assert (tmp_path / "latest").read_text() == "global_step1\n"


def test_an_interrupted_copy_spoils_its_snapshot_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Copies) -> None:
        raise KeyboardInterrupt

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        # The stager is kept away, so that the step's hook is what copies.
        monkeypatch.setattr(ckpt._core._saver._stager, "_hand_over", lambda _: None)
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        (staging, _) = ckpt._core._saver._stagings[0]
        with monkeypatch.context() as patch:
            patch.setattr(Copies, "run", interrupted)
            model(torch.ones(1, 64)).sum().backward()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        staging.finish()
        with pytest.raises(StagingError, match="was interrupted"):
            handle.wait()
        monkeypatch.undo()
        assert ckpt.save(2, {"model": model, "optimizer": optimizer}).wait().phase == "committed"


def test_memory_that_runs_out_in_save_is_the_handles_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with Checkpointer(tmp_path) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", no_descriptor)
            handle = ckpt.save(1, _state())
        with pytest.raises(StagingError, match=r"Too many open files: .*`ulimit -n`"):
            handle.wait()
        assert isinstance(handle.exception().__context__, AbortedError)
        assert ckpt.save(2, _state()).wait().phase == "committed"


def test_storage_that_does_not_answer_ends_the_handle_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpointer(tmp_path, commit_timeout_s=0.5)
    monkeypatch.setattr(attempt_module, "ANSWER_S", 0.2)

    async def silent(*_: object, **__: object) -> object:
        await asyncio.Event().wait()
        raise AssertionError

    for call in ("list", "get", "stat", "put_if_absent", "open_writer"):
        monkeypatch.setattr(ckpt._core._store, call, silent)
    handle = ckpt.save(1, _state())
    with pytest.raises(StoreError, match="not answered"):
        handle.wait()
    monkeypatch.setattr("checkpointd_client.core.TIDY_TIMEOUT_S", 0.2)
    ckpt.close()


def test_a_grace_period_that_ends_while_closing_ends_the_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def held(job: PersistJob) -> object:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(attempt_module, "persist", held)
    ckpt = Checkpointer(tmp_path, preempt_signals=signal.SIGUSR2, grace_s=0.3)
    handle = ckpt.save(1, _state())
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    with pytest.raises(StoreError, match="the grace period after the signal is over"):
        ckpt.close()
    assert handle.phase == "failed"


def test_an_unreadable_newest_checkpoint_is_raised_and_nothing_older_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state(1.0)).wait()
        ckpt.save(2, _state(2.0)).wait()
    get_range = PosixStore.get_range

    async def bad_sector(self: PosixStore, key: str, offset: int, out: memoryview) -> None:
        if key.startswith("global_step2/"):
            raise UnreadableError(f"reading {key}: Input/output error")
        await get_range(self, key, offset, out)

    monkeypatch.setattr(PosixStore, "get_range", bad_sector)
    target = _state(0.0)
    with Checkpointer(tmp_path, commit_timeout_s=1.0) as ckpt, pytest.raises(UnreadableError, match="Input/output error"):
        ckpt.load(target, verify_first=True)
    assert bool((target["w"] == 0.0).all())


def test_giving_up_on_await_leaves_the_save_to_everybody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = HeldPersist(monkeypatch)

    async def impatient(ckpt: Checkpointer) -> str:
        handle = ckpt.save(1, _state())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle, 0.05)
        gate.go.set()
        return (await handle).phase

    with Checkpointer(tmp_path) as ckpt:
        assert asyncio.run(impatient(ckpt)) == "committed"


def test_replaced_slots_give_their_memory_back(tmp_path: Path) -> None:
    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "checkpointd-arena" in line}

    before = mapped()  # what other tests of this process have left
    with Checkpointer(tmp_path) as ckpt:
        for size in (64, 128, 192, 256, 320):
            ckpt.save(size, _state(1.0, size)).wait()
            ckpt.wait()
        ckpt._core._saver.close(lambda: 10.0, ends_well=True)
        gc.collect()
        assert len(mapped() - before) <= 2


def test_loading_waits_for_a_save_of_the_same_tag(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for value in range(1, 6):
            ckpt.save(value, _state(float(value)), tag="last")
            target = _state(0.0)
            assert ckpt.load(target).step == value
            assert bool((target["w"] == float(value)).all())


def test_a_tag_saved_again_without_asking_for_latest_leaves_what_a_load_takes(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state(1.0), tag="last").wait()
        ckpt.save(2, _state(2.0), tag="last", save_latest=False).wait()
    for _ in range(2):
        with Checkpointer(tmp_path) as ckpt:
            assert ckpt.latest() == "last"
            assert ckpt.load(_state()).step == 1
            assert ckpt.load(_state(), tag="last").step == 2


def test_a_forked_child_does_not_wait_for_a_save_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, _state())
        child = os.fork()
        if not child:
            refused = 0
            for wait in (handle.wait, ckpt.wait):
                try:
                    wait(timeout=30)
                except ClosedError:
                    refused += 1
                except BaseException:
                    os._exit(9)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        gate.go.set()


def test_empty_tensors_of_any_strides_come_back(tmp_path: Path) -> None:
    state = {"column": torch.zeros(0, 3)[:, 1], "rows": torch.zeros(3, 0).t(), "kept": torch.ones(2)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).wait()
        assert ckpt.load(state) is not None


def test_a_checkpointer_that_could_not_be_made_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    before = threading.active_count()
    held = []
    for _ in range(3):
        with pytest.raises(CheckpointdError) as refused:
            Checkpointer(tmp_path / "root", sidecar=tmp_path / "nobody", on_sidecar_loss="raise")
        held.append(refused)  # and with it the frames that the garbage collector would free
    assert threading.active_count() == before
