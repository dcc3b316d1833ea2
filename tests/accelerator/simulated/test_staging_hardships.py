"""Snapshots of devices under conditions that are rare, and happen in weeks of training."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from checkpointd.errors import StagingError
from checkpointd_client import Checkpointer, devices
from checkpointd_client.staging import device_plan, device_snapshot, stager
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.block_sums import Row
from checkpointd_client.staging.device_snapshot import DeviceSnapshot
from checkpointd_client.staging.stager import Staging
from tests.accelerator.simulated.schedules import main_stream
from tests.accelerator.simulated.small_nets import Net, loaded
from tests.interruptions import Interruption
from tests.unit.client.composite_tensors import OWN, Halves, halves


def trained(device: torch.device, side: int = 64) -> tuple[Net, dict[str, Any]]:
    net = Net(1.0, device, side)
    return net, {"net": net, "optimizer": torch.optim.SGD([net.weight], lr=1.0)}


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """The slots of all snapshots, in the order of the saves."""
    used: list[Slot] = []
    begin = Slot.begin

    def noted(slot: Slot) -> int:
        used.append(slot)
        return begin(slot)

    monkeypatch.setattr(Slot, "begin", noted)
    return used


# --- what the training does around a save -------------------------------------------------------------------------------


def test_saves_in_inference_mode_and_outside_take_turns(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    """torch forbids to change a tensor outside inference mode that was made inside."""
    _, state = trained(device)
    with Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            with torch.inference_mode(step % 2 == 0):
                handle = ckpt.save(step, state)
            handle.wait()


def test_saves_on_streams_that_change_do_not_share_scratch_memory_out_of_order(
    sim: ModuleType, tmp_path: Path, device: torch.device
) -> None:
    """Here the scratch memory serves the sums alone."""
    streams = [torch.Stream(device) for _ in range(2)]
    parameters = [torch.nn.Parameter(torch.full((600, 600), float(k), device=device)) for k in range(3)]
    state = {"p": parameters, "optimizer": torch.optim.SGD(parameters, lr=1.0)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        torch.accelerator.synchronize(device)
        handles = []
        with sim.races() as races, sim.only(*streams):
            for step, stream in enumerate(streams, 1):
                with devices.on_stream(stream):
                    handles.append(ckpt.save(step, state))
        for handle in handles:
            handle.wait()
    assert races == []


@pytest.mark.parametrize("count", [399_996, 399_999])
def test_a_parameter_may_move_to_any_address(sim: ModuleType, tmp_path: Path, device: torch.device, count: int) -> None:
    """Its arrangement, and so the plan, stays the same."""
    flat = torch.arange(500_000, dtype=torch.int32, device=device).to(torch.bfloat16)
    parameter = torch.nn.Parameter(flat[:count])
    state = {"p": parameter, "optimizer": torch.optim.SGD([parameter], lr=1.0)}
    with Checkpointer(tmp_path) as ckpt:
        for offset in range(5):
            parameter.data = flat[offset : offset + count]
            ckpt.save(offset, state).wait()
        ckpt.load(state, tag="global_step0")
    assert torch.equal(parameter.cpu(), torch.arange(count, dtype=torch.int32).to(torch.bfloat16))


def test_the_stagers_thread_touches_no_device_of_another_rank(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with device 0, on which a call starts a driver: that takes hundreds of megabytes on a GPU."""
    current: list[int] = []
    finish = Staging.finish

    def noted(staging: Staging) -> None:
        current.append(torch.accelerator.current_device_index())
        finish(staging)
        current.append(torch.accelerator.current_device_index())

    monkeypatch.setattr(Staging, "finish", noted)
    _, state = trained(torch.device("sim", 1))
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
    assert current == [1, 1]


# --- memory -------------------------------------------------------------------------------------------------------------


def test_no_snapshot_that_is_done_keeps_the_memory_of_its_slot(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a state that grows would take the memory of three slots."""
    views: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []
    save, begin = DeviceSnapshot.save, Slot.begin

    def noted(part: DeviceSnapshot, *args: Any) -> None:
        views.append(weakref.ref(part._targets[0]))
        save(part, *args)

    def looked(slot: Slot) -> int:
        gc.collect()
        left.extend(view() is not None for view in views)
        return begin(slot)

    _, state = trained(device)
    with Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr(DeviceSnapshot, "save", noted)
        ckpt.save(0, state).wait()
        monkeypatch.setattr(Slot, "begin", looked)
        state["more"] = torch.ones(1000, 1000, device=device)
        ckpt.save(1, state).wait()
    assert left == [False]


def test_a_new_plan_frees_the_old_scratch_memory_first(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[bool] = []

    def noted(*args: Any, **keywords: Any) -> device_plan.DevicePlan:
        plan = device_plan.plan_device(*args, **keywords)
        whole.append(plan.is_whole)
        return plan

    monkeypatch.setattr(stager, "plan_device", noted)
    state = {"x": [torch.ones(1000, device=device) for _ in range(1000)]}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        state["x"].append(torch.ones(1000, device=device))
        torch.accelerator.synchronize(device)
        with sim.limited(device_bytes=sim.counts().in_use + (100 << 10)):
            ckpt.save(1, state).wait()
    assert whole == [True, True]


def test_save_waits_only_for_tensors_that_find_no_room_for_a_clone(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_snapshot, "CLONED_BYTES_MAX", 0)
    net, state = trained(device, 600)
    done: list[tuple[bool, bool]] = []
    wait = DeviceSnapshot.wait_for_urgent

    def noted(part: DeviceSnapshot) -> None:
        with sim.stalled(part._side):
            wait(part)
            assert part._safe is not None
            assert part._copied is not None
            done.append((part._safe.query(), part._copied.query()))

    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        monkeypatch.setattr(DeviceSnapshot, "wait_for_urgent", noted)
        handle = ckpt.save(1, state)
        with torch.no_grad():
            net.seen.zero_()
        handle.wait()
    assert done == [(True, False)]
    assert loaded(tmp_path, "global_step1", device, 600).seen.unique().tolist() == [1.0]


# --- faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathered", [0, 256 << 10])
def test_a_device_that_is_full_while_it_adds_up_goes_without_sums(
    sim: ModuleType, tmp_path: Path, device: torch.device, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for what adding up takes")

    monkeypatch.setattr(device_plan, "GATHERED_BYTES", gathered)
    net, state = trained(device)
    with Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr(Row, "queue", full)
        handle = ckpt.save(0, state)
        with torch.no_grad():
            net.seen.zero_()
        handle.wait()
    assert loaded(tmp_path, "global_step0", device).seen.unique().tolist() == [1.0]


def test_an_error_that_shows_once_while_save_waits_spoils_the_snapshot(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_snapshot, "CLONED_BYTES_MAX", 0)
    _, state = trained(device, 600)
    with Checkpointer(tmp_path, device_checksums=False) as ckpt:
        ckpt.save(0, state).wait()
        with sim.failing("half_copy"):
            handle = ckpt.save(1, state)
            with pytest.raises(StagingError, match="the copy from sim:0 failed"):
                handle.wait()


def on(device: torch.device, one: Halves) -> Halves:
    return Halves(one.high.to(device), one.low.to(device), one.recipe)


def test_without_sums_a_change_that_goes_through_a_composite_tensor_spoils_the_save(
    sim: ModuleType, tmp_path: Path, device: torch.device
) -> None:
    """torch counts it for the composite tensor, not for its inner ones."""
    net, state = trained(device)
    average = state["optimizer"].state[net.weight]["average"] = on(device, halves())
    with Checkpointer(tmp_path, device_checksums=False, tensor_classes=OWN) as ckpt:
        ckpt.save(0, state).wait()
        with sim.only(main_stream(device)):
            handle = ckpt.save(1, state)
            average.copy_(on(device, halves(1)))
            ckpt.fence()
        with pytest.raises(StagingError, match=r"average.* was changed while its snapshot was taken"):
            handle.wait()


def test_the_stager_takes_the_next_snapshot_after_an_error(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_: DeviceSnapshot) -> None:
        raise MemoryError

    _, state = trained(device)
    with Checkpointer(tmp_path, commit_timeout_s=60) as ckpt:
        ckpt.save(0, state).wait()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceSnapshot, "synchronize", no_memory)
            with pytest.raises(StagingError, match="the snapshot was not finished: MemoryError"):
                ckpt.save(1, state).wait()
        ckpt.save(2, state).wait()


def test_a_slot_of_which_all_copies_have_ended_is_used_again(
    sim: ModuleType, tmp_path: Path, device: torch.device, slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if another snapshot has queued its copies on the same stream by then."""
    _, state = trained(device)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, state).wait()
        monkeypatch.setattr(devices, "is_over", lambda _: False)
        with sim.failing("copy"), pytest.raises(StagingError):
            ckpt.save(1, state).wait()
    assert not any(slot.still_written for slot in slots)


# --- Ctrl-C -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksums", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_ctrl_c_while_a_step_queues_the_copies_commits_nothing_wrong_and_holds_nothing_up(
    sim: ModuleType, tmp_path: Path, device: torch.device, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, finish = threading.Event(), Staging.finish

    def late(staging: Staging) -> None:
        go.wait()
        finish(staging)

    monkeypatch.setattr(Staging, "finish", late)
    for number in itertools.count(1):
        net, state = trained(device)
        net.weight.grad = torch.ones_like(net.weight)
        root = tmp_path / str(number)
        with Checkpointer(root, device_checksums=checksums) as ckpt:
            go.clear()
            handle = ckpt.save(0, state)
            with Interruption(number, DeviceSnapshot.queue.__code__.__eq__) as interruption:
                ckpt.fence()
            go.set()
            with suppress(StagingError):
                handle.wait()
            ckpt.fence()
            state["optimizer"].step()
            ckpt.save(1, state).wait()
            tags = [checkpoint.tag for checkpoint in ckpt.list()]
        assert "global_step1" in tags
        for tag, expected in (("global_step0", 1.0), ("global_step1", 0.0)):
            assert tag not in tags or loaded(root, tag, device).weight.unique().tolist() == [expected], number
        if not interruption.happened:
            break
    assert number > 5
