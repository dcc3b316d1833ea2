"""A process that computes on two devices: each has streams of its own, and a snapshot is of one moment on both."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from checkpointd_client import Checkpointer, RngState, devices
from tests.accelerator.simulated.schedules import main_stream
from tests.accelerator.simulated.small_nets import Net

SCHEDULES = ("both ahead", "0 ahead", "1 ahead", "0 behind", "1 behind", "chaos 1", "chaos 2", "chaos 3")


def under(sim: ModuleType, schedule: str, mains: list[torch.Stream], patience_ms: int = -1) -> AbstractContextManager[None]:
    """The streams that train on one device or on both run ahead of all others, or behind them; or in a random order."""
    first, second = schedule.split()
    if first == "chaos":
        return sim.chaos(int(second))
    if second == "behind":
        return sim.stalled(mains[int(first)], patience_ms=patience_ms)
    return sim.only(*(mains if first == "both" else [mains[int(first)]]), patience_ms=patience_ms)


@pytest.fixture
def both(sim: ModuleType) -> list[torch.device]:
    return [torch.device("sim", index) for index in range(sim.DEVICES)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("current", [0, 1])
def test_a_snapshot_is_of_one_moment_on_both_devices(
    sim: ModuleType, both: list[torch.device], tmp_path: Path, schedule: str, current: int
) -> None:
    """Whichever device is ahead, and whichever is the current one. Save and load leave the current device and stream alone."""
    streams = [torch.Stream(device) for device in both]
    torch.accelerator.set_device_index(current)
    with devices.on_stream(streams[0]), devices.on_stream(streams[1]), Checkpointer(tmp_path) as ckpt:
        torch.accelerator.set_device_index(current)
        nets = {str(device): Net(float(i + 1), device) for i, device in enumerate(both)}
        weights = [net.weight for net in nets.values()]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        state = {**nets, "optimizer": optimizer}
        with sim.races() as races, under(sim, schedule, streams):
            with torch.no_grad():
                for net in nets.values():
                    net.weight.mul_(5)
                    net.seen.mul_(5)
            handle = ckpt.save(1, state)
            with torch.no_grad():
                for net in nets.values():
                    net.seen.mul_(3)
            optimizer.step()
            assert [main_stream(device) for device in both] == streams
            assert torch.accelerator.current_device_index() == current
        handle.wait()
        assert races == []
        with sim.races() as races, under(sim, schedule, streams, patience_ms=20):
            with torch.no_grad():
                for net in nets.values():
                    net.weight.fill_(-1)
            ckpt.load(state)
            read = [tensor * 1 for net in nets.values() for tensor in (net.weight.detach(), net.seen)]
            assert [main_stream(device) for device in both] == streams
            assert torch.accelerator.current_device_index() == current
        assert races == []
    assert [tensor.unique().tolist() for tensor in read] == [[5.0], [5.0], [10.0], [10.0]]
    torch.accelerator.set_device_index(0)


# --- random numbers ---------------------------------------------------------------------------------------------------


def drawn(both: list[torch.device]) -> list[list[float]]:
    return [torch.rand(3, device=device).tolist() for device in both]


def visible(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_generators_saved_on_two_devices_are_loaded_on_one(
    both: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"rng": RngState()}).wait()
        saved = drawn(both)
        visible(monkeypatch, 1)
        ckpt.load({"rng": RngState()})
        found = drawn(both)
    assert found[0] == saved[0]
    assert found[1] != saved[1]
    assert "2 sim devices were saved and 1 devices are here" in caplog.text


def test_a_generator_that_was_not_saved_goes_on(
    both: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    with Checkpointer(tmp_path) as ckpt:
        with monkeypatch.context() as one:
            visible(one, 1)
            ckpt.save(0, {"rng": RngState()}).wait()
        saved, later = drawn(both), drawn(both)
        torch.manual_seed(1)
        drawn(both)
        ckpt.load({"rng": RngState()})
        found = drawn(both)
    assert found == [saved[0], later[1]]
    assert "missing devices" not in caplog.text
