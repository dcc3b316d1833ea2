"""What breaks in other checkpointers, each shown not to happen here. The numbers are those of docs/PEERS.md.

Numbers that need real processes, signals or full disks are shown in tests/faults/ as well; here each has its core.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typing_extensions import Buffer

from checkpointd.commit.machine import Phase
from checkpointd.errors import (
    AbortedError,
    CheckpointdError,
    DamagedError,
    DeadlineError,
    MismatchError,
    StoreError,
    StoreFullError,
)
from checkpointd.layout import tree
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline import catalog, epochs
from checkpointd.pipeline.chunks import Persist
from checkpointd.pipeline.recover import recover
from checkpointd.store.base import ObjectWriter
from checkpointd.store.disk import File
from checkpointd.store.osdisk import OsDisk
from checkpointd.store.posix import PosixStore
from checkpointd_client import Checkpointer
from tests.builders import HeldPersist, leave_in_doubt, load_arrays, plan_save, rank_arrays, save_checkpoint
from tests.faults.daemons import Daemon
from tests.faults.jobs import wait_until

LONG_S = 3600.0
"""A deadline that no test waits for: what is known before it is known at once."""


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "root")


def _weights(value: float) -> dict[str, object]:
    return {"w": torch.full((256, 256), value)}


def _loaded(root: Path, **options: object) -> tuple[int, float]:
    target = _weights(-1.0)
    with Checkpointer(root) as ckpt:
        loaded = ckpt.load(target, **options)
    assert loaded is not None
    assert bool((target["w"] == target["w"][0, 0]).all())
    return loaded.step, float(target["w"][0, 0])


class FaultyWriter:
    """An object writer whose nth write fails; the rest pass."""

    def __init__(self, inner: ObjectWriter, failing_write: int, error: CheckpointdError) -> None:
        self._inner, self._left, self._error = inner, failing_write, error

    async def write_at(self, offset: int, data: Buffer) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error
        await self._inner.write_at(offset, data)

    async def finish(self, size: int) -> None:
        await self._inner.finish(size)

    async def discard(self) -> None:
        await self._inner.discard()


class FaultyStore(PosixStore):
    """A store on which the nth write of every chunks object fails while `failing_write` is set."""

    failing_write = 0
    error: CheckpointdError = StoreFullError("no space is left on the disk")

    async def open_writer(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        inner = await super().open_writer(key, size_hint=size_hint)
        return FaultyWriter(inner, self.failing_write, self.error) if self.failing_write else inner


@pytest.mark.e2e
@pytest.mark.parametrize("saves", [1, 2, 5])
def test_01_a_trainer_that_is_killed_right_after_save_returned_loses_nothing_with_a_sidecar(tmp_path: Path, saves: int) -> None:
    """The copy is whole when save() returns (staging="eager"): from then on nothing of the trainer is needed."""
    script = (
        "import os, signal, sys, torch\n"
        "from checkpointd_client import Checkpointer\n"
        "ckpt = Checkpointer(sys.argv[1], sidecar=sys.argv[2], staging='eager')\n"
        "for step in range(int(sys.argv[3])):\n"
        "    ckpt.save(step, {'w': torch.full((256, 256), float(step))})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root, tag = tmp_path / "root", f"global_step{saves - 1}"
    with Daemon(tmp_path) as daemon:
        killed = subprocess.run([sys.executable, "-c", script, str(root), str(daemon.socket), str(saves)], check=False)
        assert killed.returncode == -signal.SIGKILL
        pointer = root / "latest"
        wait_until(lambda: pointer.exists() and pointer.read_text().strip() == tag, f"{tag} was committed")
    assert _loaded(root) == (saves - 1, float(saves - 1))


def test_01_without_a_sidecar_nothing_committed_is_lost_and_who_leaves_in_order_finishes_its_save(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, torch\n"
        "from checkpointd_client import Checkpointer\n"
        "ckpt = Checkpointer(sys.argv[1])\n"
        "ckpt.save(1, {'w': torch.full((256, 256), 1.0)}).wait()\n"
        "ckpt.save(2, {'w': torch.full((256, 256), 2.0)})\n"
        "if sys.argv[2] == 'killed':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "killed"), "killed"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert _loaded(tmp_path / "killed") in {(1, 1.0), (2, 2.0)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "left"), "left"], check=True)
    assert _loaded(tmp_path / "left") == (2, 2.0)


async def test_02_a_storage_error_does_not_spoil_the_saves_after_it(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "root")
    store.failing_write = 1
    failed = await save_checkpoint(store, tag="global_step1", timeout_s=LONG_S)
    assert {a.phase for a in failed} <= {Phase.FAILED, Phase.ABORTED}
    store.failing_write = 0
    worked = await save_checkpoint(store, tag="global_step2", timeout_s=LONG_S)
    assert [a.phase for a in worked] == [Phase.COMMITTED, Phase.COMMITTED]
    assert await catalog.latest(store) == "global_step2"


async def test_03_and_04_one_ranks_error_is_every_ranks_answer_long_before_the_deadline(store: PosixStore) -> None:
    plan = await plan_save(store, world_size=3, timeout_s=LONG_S, failing={2: StoreError("the disk of rank 2 is on fire")})
    attempts = await asyncio.gather(*(plan.run(rank) for rank in range(3)))
    assert [a.phase for a in attempts] == [Phase.ABORTED, Phase.ABORTED, Phase.FAILED]
    for attempt in attempts:
        assert isinstance(attempt.error, AbortedError)
        assert attempt.error.ranks == (2,)
        assert "rank 2 failed while staging: the disk of rank 2 is on fire" in str(attempt.error)
    assert len({str(a.outcome) for a in attempts}) == 1


async def test_05_what_a_kill_in_mid_save_leaves_is_never_loaded(store: PosixStore, tmp_path: Path) -> None:
    await save_checkpoint(store, tag="global_step1")
    await leave_in_doubt(store, tag="global_step2", voting=(0,))
    epoch = await epochs.take(store, 2)
    await recover(store, epoch.epoch)
    assert [c.tag for c in await catalog.checkpoints(store)] == ["global_step1"]
    assert await catalog.latest(store) == "global_step1"
    assert not list((tmp_path / "root" / "global_step2").glob("*/*.chunks"))
    assert await load_arrays(store, "global_step1", 1) == {k: v.tobytes() for k, v in rank_arrays(1).items()}


async def test_06_left_overs_of_an_earlier_attempt_never_get_into_a_later_one(store: PosixStore, tmp_path: Path) -> None:
    await leave_in_doubt(store, tag="global_step2", voting=(1,), tensors=lambda rank: rank_arrays(rank + 50))
    epoch = await epochs.take(store, 2)
    await save_checkpoint(store, tag="global_step2", epoch=epoch.epoch)
    for rank in (0, 1):
        assert await load_arrays(store, "global_step2", rank) == {k: v.tobytes() for k, v in rank_arrays(rank).items()}
    await recover(store, (await epochs.take(store, 2)).epoch)
    attempts = {path.parent.name for path in (tmp_path / "root" / "global_step2").glob("*/*.chunks")}
    assert attempts == {str(AttemptId(epoch.epoch, 0))}


def test_07_overwritten_bytes_are_found_before_they_reach_a_tensor(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _weights(1.0)).wait()
        ckpt.save(2, _weights(2.0)).wait()
    with next(tmp_path.glob("global_step2/*/*.chunks")).open("r+b") as file:
        file.seek(8192)
        file.write(b"\x00" * 4096)
    target = _weights(-1.0)
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(DamagedError, match=r"00000-0\.chunks.*rank 0, w"):
            ckpt.load(target, tag="global_step2")
        assert bool((target["w"] == -1.0).all())
    assert _loaded(tmp_path) == (1, 1.0)


async def test_08_what_each_of_two_ranks_had_its_own_of_is_not_half_loaded_by_one(store: PosixStore, tmp_path: Path) -> None:
    values = {"state": tree.Dict("dict", (("w", tree.Tensor("model.weight")),)), "client_state": None}
    await save_checkpoint(store, tag="global_step1", world_size=2, values=values)
    target = {"w": torch.full((64, 48), -1.0)}

    def load() -> None:
        with Checkpointer(tmp_path / "root") as ckpt:
            ckpt.load(target)

    with pytest.raises(MismatchError, match="w: the ranks that saved it had different values"):
        await asyncio.to_thread(load)
    assert bool((target["w"] == -1.0).all())


class RecordingFile:
    """Passes through, noting what is synced."""

    def __init__(self, inner: File, path: str, log: list[tuple[str, str]]) -> None:
        self._inner, self._path, self._log = inner, path, log

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def sync(self) -> None:
        await self._inner.sync()
        self._log.append(("sync", self._path))


class RecordingDisk(OsDisk):
    """A real disk that keeps the order of what makes things durable and visible."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []

    async def create(self, path: str) -> File:
        self.log.append(("create", path))
        return RecordingFile(await super().create(path), path, self.log)  # type: ignore[return-value]  # by __getattr__

    async def sync_directory(self, path: str) -> None:
        await super().sync_directory(path)
        self.log.append(("sync directory", path))

    async def link(self, source: str, target: str) -> None:
        assert ("sync", source) in self.log
        await super().link(source, target)
        self.log.append(("link", target))

    async def rename(self, source: str, target: str) -> None:
        assert ("sync", source) in self.log
        await super().rename(source, target)
        self.log.append(("rename", target))


@pytest.fixture
def recording(tmp_path: Path) -> tuple[PosixStore, RecordingDisk]:
    disk = RecordingDisk()
    return PosixStore(tmp_path / "root", disk), disk


def _at(log: list[tuple[str, str]], what: str, end: str) -> int:
    return next(i for i, (kind, path) in enumerate(log) if kind == what and path.endswith(end))


async def test_09_files_and_directories_are_synced_before_anything_refers_to_them(
    recording: tuple[PosixStore, RecordingDisk],
) -> None:
    store, disk = recording
    await save_checkpoint(store, tag="global_step1", world_size=1)
    log = disk.log
    chunks_synced, index, vote = (
        _at(log, "sync", "00000-0.chunks"),
        _at(log, "link", "00000.index"),
        _at(log, "link", "00000.vote"),
    )
    outcome = _at(log, "link", "outcome")
    attempt = log[vote][1].rsplit("/", 1)[0]
    synced = [i for i, (kind, path) in enumerate(log) if kind == "sync directory" and path == attempt]
    assert chunks_synced < index < vote < outcome
    for before, after in ((chunks_synced, index), (index, vote), (vote, outcome)):
        assert any(before < i < after for i in synced), log[before : after + 1]
    for parent in (attempt.rsplit("/", 1)[0], attempt.rsplit("/", 2)[0]):
        assert any(i < vote for i, entry in enumerate(log) if entry == ("sync directory", parent)), parent


async def test_10_latest_moves_after_the_outcome_is_durable_and_in_one_piece(
    recording: tuple[PosixStore, RecordingDisk],
) -> None:
    store, disk = recording
    await save_checkpoint(store, tag="global_step1", world_size=1)
    log = disk.log
    outcome = _at(log, "link", "outcome")
    latest = next(i for i, (kind, path) in enumerate(log) if kind in {"link", "rename"} and path.endswith("/latest"))
    attempt = log[outcome][1].rsplit("/", 1)[0]
    assert any(outcome < i < latest for i, entry in enumerate(log) if entry == ("sync directory", attempt))
    assert ("create", log[latest][1]) not in log  # never written in place


def test_11_a_snapshot_is_not_overwritten_while_it_is_persisted_and_no_save_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        state = _weights(0.0)
        for step in (1, 2):
            state["w"].fill_(step)
            ckpt.save(step, state)
        state["w"].fill_(-5.0)
        gate.go.set()
        ckpt.wait()
        for step in (3, 4, 5):
            state["w"].fill_(step)
            ckpt.save(step, state)
    for step in range(1, 6):
        assert _loaded(tmp_path, tag=f"global_step{step}") == (step, float(step))


async def test_12_a_save_that_not_all_ranks_call_ends_at_the_deadline_and_names_the_missing(store: PosixStore) -> None:
    plan = await plan_save(store, world_size=4, absent=frozenset({1, 3}), timeout_s=0.5)
    attempts = await asyncio.gather(*(plan.run(rank) for rank in (0, 2)))
    for attempt in attempts:
        assert attempt.phase is Phase.ABORTED
        assert isinstance(attempt.error, DeadlineError)
        assert attempt.error.ranks == (1, 3)
        assert "every rank must call save()" in str(attempt.error)
    later = await save_checkpoint(store, tag="global_step2", world_size=4)
    assert {a.phase for a in later} == {Phase.COMMITTED}


def test_13_staging_can_be_awaited_and_a_save_at_every_step_holds_that_steps_state(tmp_path: Path) -> None:
    """How much training is slowed is measured, not asserted: benchmarks/compare.py, columns `lost` and step p99."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sums = {}
    with Checkpointer(tmp_path) as ckpt:
        for step in range(8):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            sums[step] = model.weight.detach().clone()
            handle = ckpt.save(step, {"model": model, "optimizer": optimizer})
            if step % 2:
                assert handle.wait(until="staged").timings.safe_s is not None
    for step in (0, 3, 7):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.load({"model": model}, tag=f"global_step{step}", strict=False)
        assert torch.equal(model.weight, sums[step])


class _Bomb:
    fired = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (setattr, (_Bomb, "fired", True))


def test_14_nothing_is_unpickled_whatever_lies_at_the_root(tmp_path: Path) -> None:
    bomb = pickle.dumps(_Bomb())
    saved = tmp_path / "saved"
    with Checkpointer(saved) as ckpt:
        ckpt.save(1, _weights(1.0)).wait()
    objects = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(objects) >= 7
    for number, name in enumerate(objects):
        copy = tmp_path / str(number)
        shutil.copytree(saved, copy)
        (copy / name).write_bytes(bomb)
        with contextlib.suppress(CheckpointdError), Checkpointer(copy) as ckpt:
            ckpt.load(_weights(0.0))
    assert not _Bomb.fired


async def test_15a_one_write_of_many_that_finds_no_space_fails_the_save(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "root")
    store.failing_write = 2
    store.error = StoreFullError(f"no space: {errno.ENOSPC}")
    failed = await save_checkpoint(store, timeout_s=LONG_S)
    assert all("no space" in str(a.error) for a in failed)
    assert not await catalog.checkpoints(store)
    assert not list((tmp_path / "root").rglob("*.chunks"))


async def test_15b_saving_a_tag_again_never_mixes_two_steps(store: PosixStore) -> None:
    first = await plan_save(store, tag="last", epoch=1)
    await asyncio.gather(*(first.run(rank) for rank in range(2)))
    second = replace(first, k=1, n=1, step=2, shard_of=(await plan_save(store, tensors=lambda r: rank_arrays(r + 9))).shard_of)
    await second.vote(0)  # and the job dies
    await recover(store, (await epochs.take(store, 2)).epoch)
    for rank in (0, 1):
        assert await load_arrays(store, "last", rank) == {k: v.tobytes() for k, v in rank_arrays(rank).items()}


def test_15c_a_failed_save_that_nobody_looks_at_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(job: Persist) -> object:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(attempt_module, "persist", broken)
    ckpt = Checkpointer(tmp_path)
    with caplog.at_level(logging.ERROR, "checkpointd"):
        ckpt.save(1, _weights(1.0))
        with pytest.raises(AbortedError, match="the disk is gone"):
            ckpt.close()
    assert any("the disk is gone" in record.getMessage() for record in caplog.records)


def test_15d_a_save_may_begin_while_another_is_in_flight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        handles = [ckpt.save(step, _weights(float(step))) for step in range(6)]
        assert [handle.wait().phase for handle in handles] == ["committed"] * 6
    assert _loaded(tmp_path) == (5, 5.0)
    shutil.rmtree(tmp_path)
