"""Loads to a device: in order with the caller's stream, before and after."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from checkpointd_client import Checkpointer, devices
from tests.accelerator.simulated.small_nets import Net


def saved(root: Path, device: torch.device) -> None:
    with Checkpointer(root) as ckpt:
        ckpt.save(0, {"net": Net(3.0, device)}).wait()


def empty_net(device: torch.device, strided: bool) -> Net:
    net = Net(-1.0, device)
    if strided:
        net.weight.data = net.weight.data.t()
    return net


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("own_stream", [False, True])
def test_work_that_was_queued_before_does_not_overwrite_what_is_loaded(
    sim: ModuleType, tmp_path: Path, device: torch.device, strided: bool, own_stream: bool
) -> None:
    saved(tmp_path, device)
    net = empty_net(device, strided)
    stream = torch.Stream(device) if own_stream else torch.accelerator.current_stream(device)
    torch.accelerator.synchronize(device)
    with devices.on_stream(stream), sim.races() as races, sim.stalled(stream, patience_ms=100):
        with torch.no_grad():
            net.weight.fill_(0.5)
        with Checkpointer(tmp_path) as ckpt:
            ckpt.load({"net": net})
    torch.accelerator.synchronize(device)
    assert net.weight.unique().tolist() == [3.0]
    assert races == []


@pytest.mark.parametrize("strided", [False, True])
def test_work_that_is_queued_after_reads_what_was_loaded(
    sim: ModuleType, tmp_path: Path, device: torch.device, strided: bool
) -> None:
    saved(tmp_path, device)
    net, default, stream = empty_net(device, strided), torch.accelerator.current_stream(device), torch.Stream(device)
    torch.accelerator.synchronize(device)
    with devices.on_stream(stream), sim.races() as races, sim.stalled(default, patience_ms=100):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.load({"net": net})
        read = net.weight.detach() * 1
        stream.synchronize()
    assert read.unique().tolist() == [3.0]
    assert races == []


def test_generators_of_the_devices_go_on_where_they_were(sim: ModuleType, tmp_path: Path, device: torch.device) -> None:
    from checkpointd_client import RngState

    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"rng": RngState()}).wait()
        expected = [torch.randn(3, device=f"sim:{index}").cpu() for index in range(2)]
        ckpt.load({"rng": RngState()})
        found = [torch.randn(3, device=f"sim:{index}").cpu() for index in range(2)]
    assert all(map(torch.equal, expected, found))
