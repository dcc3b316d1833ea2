"""The client API in one process: what each call promises, and what it says when it cannot work."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpointd.commit.machine import Phase
from checkpointd.errors import (
    AbortedError,
    ClosedError,
    DeadlineError,
    MismatchError,
    NotFoundError,
    RootInUseError,
    SkippedError,
    StagingError,
    StateError,
    StoreError,
    UsageError,
    WaitTimeoutError,
)
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline.shard import ShardProgress
from checkpointd.pipeline.write.job import PersistJob
from checkpointd_client import Checkpointer, RngState, Status, open_checkpoint
from checkpointd_client.capture.recapture import capturer
from checkpointd_client.restore import store_source
from checkpointd_client.saver import Saver
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.saves.history import SaveHistory, SaveRecord
from checkpointd_client.staging.arena import Slot
from tests.builders import HeldPersist
from tests.faults.jobs import wait_until
from tests.job_elsewhere import live_job
from tests.logged_roots import log_state


def _state(value: float = 1.0) -> dict[str, object]:
    return {"w": torch.full((64, 64), value), "epoch": 3, "name": "x", "nested": {"list": [torch.arange(5), None, b"b"]}}


def test_save_then_load_gives_the_state_back_in_place(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load(_state()) is None
        assert ckpt.latest() is None
        handle = ckpt.save(7, _state(2.0), client_state={"lr": 0.1, "seen": [1, 2]})
        assert handle.wait() is handle
        assert (handle.tag, handle.phase, handle.progress) == ("global_step7", "committed", 1.0)
        assert handle.done()
        assert handle.exception() is None
        assert ckpt.latest() == "global_step7"
        assert [c.tag for c in ckpt.list()] == ["global_step7"]
    target = _state(0.0)
    weight = target["w"]
    with Checkpointer(tmp_path) as ckpt:
        loaded = ckpt.load(target)
    assert loaded is not None
    assert (loaded.tag, loaded.step, loaded.client_state) == ("global_step7", 7, {"lr": 0.1, "seen": [1, 2]})
    assert target["w"] is weight
    assert torch.equal(weight, torch.full((64, 64), 2.0))
    assert torch.equal(target["nested"]["list"][0], torch.arange(5))


def test_timings_follow_the_phases(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        times = ckpt.save(1, _state()).wait().timings
    assert times.call_s is not None
    assert times.safe_s is not None
    assert times.safe_s <= times.durable_s <= times.committed_s


def test_a_handle_can_be_awaited_in_another_loop(tmp_path: Path) -> None:
    async def train() -> str:
        with Checkpointer(tmp_path) as ckpt:
            return (await ckpt.save(1, _state())).phase

    assert asyncio.run(train()) == "committed"


def test_wait_with_a_timeout_leaves_the_save_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, _state()).wait(until="persisting")
        with pytest.raises(WaitTimeoutError, match="global_step1 is still persisting"):
            handle.wait(timeout=0.2)
        with pytest.raises(WaitTimeoutError):
            ckpt.wait(timeout=0.05)
        with pytest.raises(UsageError, match="until is 'done'"):
            handle.wait(until="done")
        assert handle.wait(until="staged").phase == "persisting"
        held.go.set()
        assert handle.wait().phase == "committed"


def test_a_third_save_waits_for_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, _state(step))
        third: list[object] = []
        thread = threading.Thread(target=lambda: third.append(ckpt.save(3, _state(3.0))))
        thread.start()
        wait_until(lambda: ckpt.status().in_flight == 3, "the third save has begun")
        thread.join(0.3)
        assert thread.is_alive()
        held.go.set()
        thread.join()
        ckpt.wait()
        assert ckpt.latest() == "global_step3"


def test_when_busy_skip_skips_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path, when_busy="skip") as ckpt:
        first = [ckpt.save(step, _state(step)) for step in (1, 2)]
        third = ckpt.save(3, _state(3))
        with pytest.raises(SkippedError, match="two saves are still in flight"):
            third.wait(30)
        assert third.phase == "skipped"
        held.go.set()
        assert [handle.wait().phase for handle in first] == ["committed", "committed"]
        assert ckpt.latest() == "global_step2"
        assert ckpt.save(4, _state(4)).wait().phase == "committed"


def test_a_save_that_waited_in_vain_for_memory_has_failed_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for, and nobody chose to skip it."""
    held = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        first = [ckpt.save(step, _state(step)) for step in (1, 2)]
        monkeypatch.setattr(Saver, "_patience_s", lambda _, __: 0.01)
        third = ckpt.save(3, _state(3))
        with pytest.raises(DeadlineError, match=r"found no free memory for its snapshot on rank 0 within 0.01 s: global_step1"):
            third.wait(30)
        assert third.phase == "failed"
        held.go.set()
        assert [handle.wait().phase for handle in first] == ["committed", "committed"]


def test_a_skipped_last_save_is_no_error_of_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the user asked for."""
    held = HeldPersist(monkeypatch)
    ckpt = Checkpointer(tmp_path, when_busy="skip")
    for step in (1, 2, 3):
        last = ckpt.save(step, _state(step))
    wait_until(last.done, "the third save has ended")
    held.go.set()
    ckpt.close()
    assert last.phase == "skipped"


def test_who_waits_for_a_save_finds_it_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = SaveHistory.end

    def late(history: SaveHistory, save: SaveRecord, phase: Phase) -> None:
        threading.Event().wait(0.1)
        end(history, save, phase)

    monkeypatch.setattr(SaveHistory, "end", late)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state()).wait()
        status = ckpt.status()
        assert (status.saves_committed, status.in_flight, status.latest) == (1, 0, "global_step1")


def test_status_is_typed_serialisable_and_has_errors(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state()).wait()
        with pytest.raises(StateError):
            ckpt.save(2, {"bad": object()})
        wait_until(lambda: ckpt.status().saves_failed, "the second save has ended, which nobody waits for")
        ckpt.save(3, _state()).wait()
        status = ckpt.status()
        assert msgspec.json.decode(status.to_json(), type=Status) == status
    assert [a.phase for a in status.attempts] == ["committed", "failed", "committed"]
    assert "bad" in status.attempts[1].error.message
    assert (status.saves_committed, status.saves_failed, status.latest) == (2, 1, "global_step3")


@pytest.mark.parametrize("tag", ["a/b", "..", "", ".hidden", "latest", "x\n", " x", "a\\b", "y" * 300, 5])
def test_bad_tags_are_refused_with_the_reason(tmp_path: Path, tag: object) -> None:
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(UsageError, match="tag"):
            ckpt.save(1, _state(), tag=tag)
        if tag != "latest":  # which a load takes for the newest
            with pytest.raises(UsageError, match="tag"):
                ckpt.load(_state(), tag=tag)
        assert ckpt.status().attempts == ()


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", None])
def test_bad_steps_are_refused(tmp_path: Path, step: object) -> None:
    with Checkpointer(tmp_path) as ckpt, pytest.raises(UsageError, match="step is"):
        ckpt.save(step, _state())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"compression": "gzip"}, "compression"),
        ({"staging": "never"}, "staging"),
        ({"when_busy": "cry"}, "when_busy"),
        ({"commit_timeout_s": 0}, "timeout_s"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"budget_bytes": 1}, "budget_bytes"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, arguments: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Checkpointer(tmp_path, **arguments)
    Checkpointer(tmp_path).close()  # and nothing was left claimed


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("x")
    with pytest.raises(UsageError, match="file"):
        Checkpointer(root)


def test_a_living_job_of_another_name_is_left_alone(tmp_path: Path) -> None:
    with live_job(tmp_path, "train"):
        for job in (None, "eval"):
            with pytest.raises(
                RootInUseError, match=r"process \d+ on .* runs job 'train' there since .*take_over=True"
            ) as refused:
                Checkpointer(tmp_path, job=job)
            assert f"open_checkpoint({str(tmp_path)!r})" in str(refused.value)
        assert log_state(tmp_path).start == 1
    Checkpointer(tmp_path).close()  # and nothing was left claimed, here or there


@pytest.mark.parametrize("options", [{"job": "train"}, {"take_over": True}], ids=["the same job", "told to"])
def test_a_living_job_is_taken_over_from_by_itself_and_on_request(tmp_path: Path, options: dict[str, Any]) -> None:
    with live_job(tmp_path, "train"), Checkpointer(tmp_path, **options) as ckpt:
        ckpt.save(1, _state()).wait()


def test_a_checkpointer_that_was_closed_leaves_no_lease(tmp_path: Path) -> None:
    held = tmp_path / ".checkpointd" / "leases"
    for start in ("00000001", "00000002"):
        with Checkpointer(tmp_path):
            assert [path.name for path in held.iterdir()] == [start]
        assert list(held.iterdir()) == []


def test_a_checkpointer_that_could_not_be_made_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the ranks do not share it")

    monkeypatch.setattr("checkpointd_client.core.check_shared", fail)
    with pytest.raises(StoreError, match="do not share"):
        Checkpointer(tmp_path)
    assert list((tmp_path / ".checkpointd" / "leases").iterdir()) == []


@pytest.mark.parametrize("part", ["WriterThread", "Stager"])
def test_a_checkpointer_whose_threads_cannot_start_leaves_the_root_free(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as failing:
        failing.setattr(f"checkpointd_client.core.{part}", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            Checkpointer(tmp_path)
    leases = tmp_path / ".checkpointd" / "leases"
    assert not leases.exists() or list(leases.iterdir()) == []
    Checkpointer(tmp_path).close()


def test_a_second_checkpointer_at_one_root_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path), pytest.raises(UsageError, match="another Checkpointer"):
        Checkpointer(tmp_path / ".." / tmp_path.name)
    Checkpointer(tmp_path).close()


def test_the_directory_of_a_tag_is_refused_as_a_root(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state()).wait()
    before = sorted(tmp_path.rglob("*"))
    tag = tmp_path / "global_step1"
    for place in (tag, tag / "00000001-0", tag / "mine" / "run"):
        with pytest.raises(UsageError, match=r"directory of the tag 'global_step1'; its root is .*: tag='global_step1'"):
            Checkpointer(place)
        if place.exists():
            with pytest.raises(UsageError, match="directory of the tag 'global_step1'"):
                open_checkpoint(place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_below_a_root_that_is_no_tag_is_a_root_of_its_own(tmp_path: Path) -> None:
    Checkpointer(tmp_path).close()
    (tmp_path / "second" / "data").mkdir(parents=True)
    for _ in ("a new root", "the same root again"):
        with Checkpointer(tmp_path / "second") as ckpt:
            ckpt.save(1, _state()).wait()


def test_close_raises_the_error_of_the_newest_save_whichever_ends_last(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        older, newer = (SaveRecord(ckpt.save(step, _state())) for step in (1, 2))
        ckpt.wait()
    history = SaveHistory()
    history.add(older)
    history.add(newer)
    history.end(newer, Phase.COMMITTED)
    history.end(older, Phase.FAILED)
    assert history.last_failed is None


def test_calls_after_close_are_refused(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    ckpt.close()
    ckpt.close()
    for call in (lambda: ckpt.save(1, {}), lambda: ckpt.load({}), ckpt.latest, ckpt.list):
        with pytest.raises(ClosedError, match="after close"):
            call()
    assert ckpt.status().in_flight == 0


def test_unsafe_state_is_refused_by_name_and_the_next_save_works(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(StateError, match=r"model\.thing"):
            ckpt.save(1, {"model": {"thing": threading.Lock()}})
        with pytest.raises(StateError, match=r"m\.weight.*meta"):
            ckpt.save(1, {"m": torch.nn.Linear(2, 2, device="meta")})
        assert ckpt.save(1, _state()).wait().phase == "committed"


def test_load_lists_every_mismatch_and_touches_nothing(tmp_path: Path) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": saved}).wait()
        with pytest.raises(MismatchError) as caught:
            ckpt.load({"model": other})
        for fqn in ("model.0.weight", "model.0.bias", "model.1.weight"):
            assert fqn in str(caught.value)
        for name, value in other.state_dict().items():
            assert torch.equal(value, before[name])
        loaded = ckpt.load({"model": other}, strict=False)
    assert loaded is not None
    assert len(loaded.mismatched) == 3
    assert torch.equal(other[1].bias, saved[1].bias)


@pytest.mark.parametrize("cut_alike", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_weights_that_were_stored_apart_fill_tied_ones_where_they_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_alike: bool, equal: bool
) -> None:
    """Their digests tell, or where chunks were cut in different ways, their bytes."""
    if not cut_alike:
        monkeypatch.setattr(store_source, "same_prints", lambda *_: None)
    apart = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64, bias=False), "b": torch.nn.Linear(64, 64, bias=False)})
    if equal:
        apart["b"].load_state_dict(apart["a"].state_dict())
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64, bias=False), "b": torch.nn.Linear(64, 64, bias=False)})
    tied["b"].weight = tied["a"].weight
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": apart, "epoch": 1}).wait()
        loaded = ckpt.load({"model": tied, "epoch": 0}, strict=False)
    assert loaded is not None
    assert tied["b"].weight is tied["a"].weight
    assert torch.equal(tied["a"].weight, apart["a"].weight) == equal
    told = "model.a.weight and model.b.weight share memory now, and were stored as different tensors of different values"
    assert loaded.mismatched == (() if equal else (told,))


def test_a_load_in_part_is_said_once_in_the_log_and_one_of_all_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "was loaded in part" in record.getMessage()]

    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.ones(2), "optimizer": {"lr": 1}}).wait()
        ckpt.load({"w": torch.zeros(2), "optimizer": {"lr": 0}}, strict=False)
        assert warnings() == []
        ckpt.load({"w": torch.zeros(2), "new": 1}, strict=False)
        [words] = warnings()
    assert "global_step1 was loaded in part, as strict=False allows: 1 missing, 1 unexpected and 0 mismatched" in words
    assert "new: missing from the checkpoint, which has w, optimizer" in words
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.load({"w": torch.zeros(2)}, strict=False)
    assert "0 missing, 1 unexpected and 0 mismatched" in warnings()[1]


def test_loading_a_tag_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state()).wait()
        with pytest.raises(NotFoundError, match="checkpoints are: global_step1"):
            ckpt.load(_state(), tag="global_step9")


def test_save_latest_false_leaves_the_pointer_alone(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state(1.0)).wait()
        ckpt.save(2, _state(2.0), save_latest=False).wait()
        assert ckpt.latest() == "global_step1"
    target = _state(0.0)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load(target).step == 1
        assert ckpt.load(target, tag="global_step2").step == 2
    assert torch.equal(target["w"], torch.full((64, 64), 2.0))


def test_saving_a_tag_again_replaces_it_and_bounds_what_is_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for step in range(24):
            ckpt.save(step, _state(float(step)), tag="last").wait()
            if step >= 22:  # the records of what one removal removes go with the next one
                ckpt._core._writer.call(ckpt._core._saver._state.tidier.rest(), 60)
        target = _state(0.0)
        assert ckpt.load(target).step == 23
    assert torch.equal(target["w"], torch.full((64, 64), 23.0))
    # The newest, and one before it that stays for as long as it alone was read back whole.
    assert len(list(tmp_path.glob("last/*/*.chunks"))) <= 2
    assert len(list(tmp_path.glob("last/*"))) <= 19


def test_an_interrupted_save_votes_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr(ckpt._core._saver._stager, "begin", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        handle = ckpt.save(1, _state())
        with pytest.raises(StagingError, match="device lost"):
            handle.wait()
        assert isinstance(handle.exception().__context__, AbortedError)
        monkeypatch.undo()
        ckpt.save(2, _state()).wait()
        assert [a.phase for a in ckpt.status().attempts] == ["failed", "committed"]


def test_a_storage_error_is_the_handles_not_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as ckpt:

        async def broken(job: PersistJob) -> object:
            raise StoreError("the disk is on fire")

        monkeypatch.setattr(attempt_module, "persist", broken)
        handle = ckpt.save(1, _state())
        with pytest.raises(StoreError, match="the disk is on fire"):
            handle.wait()
        assert isinstance(handle.exception().__context__, AbortedError)
        monkeypatch.undo()
        assert ckpt.save(2, _state()).wait().phase == "committed"


def test_close_raises_a_failure_that_nobody_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(job: PersistJob) -> object:
        raise StoreError("no luck")

    monkeypatch.setattr(attempt_module, "persist", broken)
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, _state())
    with pytest.raises(StoreError, match="no luck"):
        ckpt.close()
    seen = Checkpointer(tmp_path)
    seen.save(1, _state()).exception()
    with pytest.raises(StoreError):
        seen.wait()
    seen.close()


@pytest.mark.parametrize("compression", ["auto", "none", "zstd", "planes"])
def test_every_compression_gives_the_same_bits_back(tmp_path: Path, compression: str) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64).to(torch.int32)
    state = {
        "any float": bits.view(torch.float32).clone(),
        "any half": bits.view(torch.bfloat16).clone(),
        "weights": torch.randn(1 << 18) * 0.02,
        "zeros": torch.zeros(1 << 18),
        "small": torch.tensor([float("nan"), -0.0, 5e-324], dtype=torch.float64),
    }
    expected = {name: tensor.view(torch.uint8).clone() for name, tensor in state.items()}
    with Checkpointer(tmp_path, compression=compression, chunk_bytes=1 << 16) as ckpt:
        ckpt.save(1, state).wait()
        handle = ckpt.save(2, state).wait()
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load(target)
    for name, value in expected.items():
        assert torch.equal(target[name].view(torch.uint8), value), name
    if compression in ("zstd", "planes"):
        assert handle.bytes_stored < handle.bytes_total


def test_rng_states_come_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    rng = RngState()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"rng": rng}).wait()
        expected = torch.rand(4)
        ckpt.load({"rng": rng})
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.nightly
def test_exit_without_close_finishes_the_save_and_reports_a_failure(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from checkpointd_client import Checkpointer\n"
        "ckpt = Checkpointer(sys.argv[1])\n"
        "ckpt.save(1, {'w': torch.ones(1 << 22)})\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert (tmp_path / "a" / "latest").read_text() == "global_step1\n"
    failing = script.replace(
        "ckpt.save", "import shutil; shutil.rmtree(sys.argv[1]); open(sys.argv[1], 'w').close()\nckpt.save"
    )
    done = subprocess.run([sys.executable, "-c", failing, str(tmp_path / "b")], capture_output=True, text=True, check=False)
    assert "the last save failed" in done.stderr
    assert "global_step1" in done.stderr


def test_the_first_slot_is_made_ready_while_load_returns(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load({"model": model, "optimizer": optimizer})
        ckpt._core._saver._prewarming.join()
        ready = sum(slot.capacity for slot in ckpt._core._arena._free)
        assert ready >= 3 * 256 * 256 * 4
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        ckpt.save(1, {"model": model, "optimizer": optimizer}).wait()
        assert sum(slot.capacity for slot in ckpt._core._arena._free) == ready


def test_the_first_save_finds_what_prepare_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory with room for the optimizer's moments, and a plan of the state."""
    model = torch.nn.Linear(256, 256)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    with Checkpointer(tmp_path, staging="eager") as ckpt:
        ckpt.prepare(state)
        ckpt._core._saver._prewarming.join()
        [slot] = ckpt._core._arena._free
        blocks = os.fstat(slot.fd).st_blocks
        assert blocks * 512 >= 3 * 256 * 256 * 4
        with monkeypatch.context() as patch:
            patch.setattr(capturer, "walked", None)
            ckpt.save(0, state).wait()
        model(torch.ones(1, 256)).sum().backward()
        state["optimizer"].step()
        ckpt.save(1, state).wait()
        ckpt.prepare(state)  # too late: it does nothing
        assert os.fstat(slot.fd).st_blocks <= blocks + 8  # the page of the completion marker
        assert ckpt._core._arena._slots == [slot]


def test_a_save_hurries_the_memory_that_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_hurried = list[bool]()
    monkeypatch.setattr(Slot, "populate_gently", lambda _slot, _nbytes, hurried: was_hurried.append(hurried.wait(60)))
    state = {"w": torch.zeros(1 << 16)}
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load(state) is None  # a new job, which prepares for its first save as well
        assert ckpt.save(1, state).wait().phase == "committed"
        assert was_hurried == [True]


def test_a_state_that_cannot_be_stored_is_refused_before_the_first_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt, pytest.raises(StateError, match="when"):
        ckpt.prepare({"when": object()})


def test_an_eager_save_allocates_its_memory_before_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One madvise for many pages, in place of a page fault for each."""
    blocks = list[int]()
    populate = Slot.populate

    def noted(slot: Slot, nbytes: int) -> None:
        populate(slot, nbytes)
        blocks.append(os.fstat(slot.fd).st_blocks * 512)

    monkeypatch.setattr(Slot, "populate", noted)
    with Checkpointer(tmp_path, staging="eager") as ckpt:
        ckpt.save(1, {"w": torch.zeros(1 << 16)}).wait()
    assert blocks[0] >= 4 << 16


def test_nobody_is_preempted_until_the_signal_comes(tmp_path: Path) -> None:
    import os
    import signal

    before = signal.getsignal(signal.SIGUSR1)
    with Checkpointer(tmp_path, preempt_signals=signal.SIGUSR1) as ckpt:
        assert ckpt.preempted(1) is False
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ckpt.preempted(1) is True
        ckpt.save(1, _state())
    assert signal.getsignal(signal.SIGUSR1) == before
    assert (tmp_path / "latest").read_text() == "global_step1\n"


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, _state(1.0)).wait()
        ckpt.save(2, _state(2.0)).wait()
    chunks = next(tmp_path.glob("global_step2/*/*.chunks"))
    with chunks.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 16)
    target = _state(0.0)
    with Checkpointer(tmp_path) as ckpt, caplog.at_level(logging.ERROR, "checkpointd"):
        loaded = ckpt.load(target)
        assert loaded is not None
        assert loaded.step == 1
        assert "global_step2" in loaded.fell_back_from[0]
        assert any("w" in r.getMessage() and "global_step2" in r.getMessage() for r in caplog.records)
        assert torch.equal(target["w"], torch.full((64, 64), 1.0))
        with pytest.raises(Exception, match="damaged"):
            ckpt.load(target, fallback=False)
        with pytest.raises(Exception, match="damaged"):
            ckpt.load(target, tag="global_step2")


def test_a_handle_never_goes_back_a_phase_and_knows_its_speed() -> None:
    now = [0.0]
    progress = ShardProgress(clock=lambda: now[0])
    handle = OwnHandle("t", "00000001-0", 1, progress)
    assert (handle.progress, handle.speed_bps, handle.eta_s) == (0.0, None, None)
    handle.advance(Phase.PERSISTING)
    now[0] = 3.0
    progress.begin(100)
    progress.keep(20)
    assert (handle.progress, handle.speed_bps, handle.eta_s) == (0.2, None, None)
    now[0] = 5.0
    progress.add(40, 20)
    assert (handle.progress, handle.speed_bps, handle.eta_s) == (0.6, 20.0, 2.0)
    handle.advance(Phase.STAGED)  # the next sidecar tells all phases
    assert handle.phase == "persisting"
    now[0] = 7.0
    progress.add(40, 20)
    assert (handle.progress, handle.speed_bps, handle.eta_s) == (0.99, 20.0, None)  # its vote may take a while
    handle.advance(Phase.PREPARED)
    now[0] = 100.0
    assert (handle.progress, handle.speed_bps, handle.eta_s) == (1.0, 20.0, None)
    handle.advance(Phase.ABORTED)
    handle.advance(Phase.COMMITTED)
    assert handle.phase == "aborted"


def test_a_second_checkpointer_after_the_first_was_closed_warns_of_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job before at this root was this very process, and is known to have ended."""
    for _ in range(2):
        Checkpointer(tmp_path / "root").close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
