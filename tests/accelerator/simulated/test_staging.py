"""Snapshots of a device's memory: whatever order its streams run in, a checkpoint holds what the state was at save()."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from checkpointd.errors import StagingError
from checkpointd_client import Checkpointer, devices
from checkpointd_client.staging import device_plan
from checkpointd_client.staging.arena import Arena, Slot, SlotHold
from checkpointd_client.staging.device_snapshot import DeviceSnapshot
from checkpointd_client.staging.stager import Stager, Staging
from tests.accelerator.simulated.schedules import SCHEDULES, main_stream, under
from tests.accelerator.simulated.small_nets import Net, loaded


@pytest.fixture(params=["gathered", "direct"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small tensors go through the scratch memory, large ones directly. Here all of them go one way."""
    if request.param == "direct":
        monkeypatch.setattr(device_plan, "GATHERED_BYTES", 0)
    return str(request.param)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_snapshot_is_of_the_moment_of_save(
    sim: ModuleType, tmp_path: Path, schedule: str, index: int, own_stream: bool, checksums: bool
) -> None:
    device = torch.device("sim", index)
    stream = torch.Stream(device) if own_stream else main_stream(device)
    with devices.on_stream(stream), Checkpointer(tmp_path, device_checksums=checksums) as ckpt:
        net = Net(1.0, device)
        optimizer = torch.optim.SGD([net.weight], lr=1.0)
        net.weight.grad = torch.ones_like(net.weight)
        ckpt.save(0, {"net": net, "optimizer": optimizer}).wait()
        before = sim.counts()
        with sim.races() as races, under(sim, schedule, stream):
            with torch.no_grad():
                net.weight.mul_(5)
                net.seen.mul_(5)
            handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
            with torch.no_grad():
                net.seen.mul_(3)  # the next forward pass changes a buffer, and allocates
            other = [torch.full_like(net.seen, 9.0) for _ in range(3)]
            optimizer.step()
            forced = sim.counts().since(before).forced
        handle.wait()
        del other
    assert races == []
    assert forced == 0, "the training thread waited for the device"
    assert sim.counts().since(before).unpinned == 0
    found = loaded(tmp_path, "global_step1", device)
    assert (found.weight.unique().tolist(), found.seen.unique().tolist()) == ([5.0], [5.0])


def test_two_devices_in_one_process(sim: ModuleType, tmp_path: Path) -> None:
    nets = [Net(float(i + 1), torch.device("sim", i)) for i in range(2)]
    # Memory of two devices may have the same addresses, and is no alias of each other.
    with Checkpointer(tmp_path) as ckpt, sim.races() as races, sim.chaos(3):
        ckpt.save(0, {"one": nets[0], "two": nets[1]}).wait()
        fresh = [Net(-1.0, torch.device("sim", i)) for i in range(2)]
        assert ckpt.load({"one": fresh[0], "two": fresh[1]}) is not None
    assert [net.weight.unique().item() for net in fresh] == [1.0, 2.0]
    assert races == []


def test_a_state_in_host_and_device_memory(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    """Parameters on the device and moments in host memory, as an offloading optimizer has them."""
    net, moments = Net(2.0, device), {"exp_avg": torch.full((8, 8), 3.0)}
    with Checkpointer(tmp_path) as ckpt:
        with sim.only(main_stream(device)):
            handle = ckpt.save(0, {"net": net, "moments": moments})
            with torch.no_grad():
                net.weight.zero_()
            moments["exp_avg"].zero_()
        handle.wait()
        ckpt.load({"net": net, "moments": moments})
    assert (net.weight.unique().item(), moments["exp_avg"].unique().item()) == (2.0, 3.0)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("after", range(2))
def test_a_copy_that_raises_writes_into_no_other_snapshot(
    sim: ModuleType, tmp_path: Path, device: torch.device, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that were queued before it still run: no other save gets the slot until they have."""
    # A tensor of the host between the others, so that they are copied by two calls.
    first = {
        "a": torch.full((64, 64), 66.0, device=device),
        "b": torch.zeros(3),
        "c": torch.full((64, 64), 66.0, device=device),
    }
    other = {"a": torch.full((64, 64), 5.0), "b": torch.full((3,), 5.0), "c": torch.full((64, 64), 5.0)}
    queue, complete = DeviceSnapshot._queue_copies, Slot.complete

    def fails(part: DeviceSnapshot, saved: torch.Event) -> None:
        with sim.failing("copy", after=after):
            queue(part, saved)

    def then_all_that_is_queued_runs(slot: Slot) -> None:
        complete(slot)
        torch.accelerator.synchronize(device)

    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"x": torch.zeros(1, device=device)}).wait()
        with sim.only(main_stream(device), patience_ms=0):
            monkeypatch.setattr(DeviceSnapshot, "_queue_copies", fails)
            failed = ckpt.save(1, first)
            with pytest.raises(StagingError, match="the copy from sim:0 failed: sim: this copy fails, as asked for"):
                failed.wait()
            monkeypatch.undo()
            monkeypatch.setattr(Slot, "complete", then_all_that_is_queued_runs)
            ckpt.save(2, other).wait()
        into = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
        ckpt.load(into, tag="global_step2")
    assert [tensor.unique().tolist() for tensor in into.values()] == [[5.0]] * 3


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("fault", ["half_copy", "kernel"])
def test_a_copy_that_fails_later_spoils_the_snapshot(sim: ModuleType, tmp_path: Path, device: torch.device, fault: str) -> None:
    net = Net(3.0, device)
    optimizer = torch.optim.SGD([net.weight], lr=1.0)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net, "optimizer": optimizer}).wait()
        with sim.failing(fault):
            handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
            with pytest.raises(StagingError, match=r"the copy from sim:0 failed: sim: a kernel failed: .*, as asked for$"):
                handle.wait()
        ckpt.save(2, {"net": net, "optimizer": optimizer}).wait()
    assert loaded(tmp_path, "global_step2", device).weight.unique().tolist() == [3.0]


@pytest.mark.usefixtures("ways")
def test_without_memory_for_clones_save_waits_for_the_copies(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    net = Net(3.0, device)
    with Checkpointer(tmp_path) as ckpt:
        with sim.limited(device_bytes=sim.counts().in_use):
            handle = ckpt.save(0, {"net": net})
        with torch.no_grad():
            net.weight.zero_()
            net.seen.zero_()
        handle.wait()
    found = loaded(tmp_path, "global_step0", device)
    assert (found.weight.unique().tolist(), found.seen.unique().tolist()) == ([3.0], [3.0])


def test_memory_that_cannot_be_pinned_costs_time_alone(
    sim: ModuleType, tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(3.0, device)
    with sim.limited(pinned_bytes=sim.counts().pinned), Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net}).wait()
    assert "the arena cannot be pinned (error 2): the next step waits for the copies from the device" in caplog.text
    assert loaded(tmp_path, "global_step0", device).weight.unique().tolist() == [3.0]


def test_a_driver_that_fails_while_memory_is_made_ready_loses_no_slot(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(address: int, nbytes: int) -> int:
        raise RuntimeError("the driver is not loaded")

    monkeypatch.setitem(devices.PINNING, "sim", devices.Pinning(broken, sim.host_unregister))
    arena = Arena()
    arena.prewarm(4096, threading.Event(), device=device)
    assert "the driver is not loaded" in caplog.text
    assert [arena.acquire(SlotHold(arena), 4096, 0) for _ in range(2)] == [True, True]


# --- in the background ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ways")
def test_a_step_queues_the_copies_itself_if_the_stager_is_late(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, finish = threading.Event(), Staging.finish

    def late(staging: Staging) -> None:
        stepped.wait()
        finish(staging)

    net = Net(1.0, device)
    optimizer = torch.optim.SGD([net.weight], lr=1.0)
    net.weight.grad = torch.ones_like(net.weight)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net, "optimizer": optimizer}).wait()
        monkeypatch.setattr(Staging, "finish", late)
        with sim.races() as races, sim.only(main_stream(device)):
            handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
            optimizer.step()
            stepped.set()
        handle.wait()
    assert races == []
    assert loaded(tmp_path, "global_step1", device).weight.unique().tolist() == [1.0]


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_snapshots_in_flight_are_each_of_their_moment(
    sim: ModuleType, tmp_path: Path, device: torch.device, schedule: str
) -> None:
    """Both go through the same scratch memory."""
    net = Net(0.0, device)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net}).wait()
        with sim.races() as races, under(sim, schedule, main_stream(device)):
            handles = []
            for step in (1, 2):
                with torch.no_grad():
                    net.weight.add_(1)
                    net.seen.add_(1)
                handles.append(ckpt.save(step, {"net": net}))
        for handle in handles:
            handle.wait()
    assert races == []
    for step in (1, 2):
        found = loaded(tmp_path, f"global_step{step}", device)
        assert (found.weight.unique().tolist(), found.seen.unique().tolist()) == ([step], [step])


def test_an_interrupted_save_gives_its_slot_back_after_the_copies(
    sim: ModuleType, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when the stager's thread has the snapshot already."""
    hand_over = Stager._hand_over

    def interrupted(stager: Stager, staging: Staging) -> None:
        hand_over(stager, staging)
        monkeypatch.undo()
        raise KeyboardInterrupt

    net = Net(66.0, device)
    other = {"a": torch.full((64, 64), 5.0), "b": torch.full((64, 64), 5.0)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"net": net}).wait()
        with sim.only(main_stream(device), patience_ms=0):
            monkeypatch.setattr(Stager, "_hand_over", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(1, {"net": net})
            ckpt.save(2, other).wait()
        into = {name: torch.zeros_like(tensor) for name, tensor in other.items()}
        ckpt.load(into, tag="global_step2")
    assert [tensor.unique().tolist() for tensor in into.values()] == [[5.0], [5.0]]
