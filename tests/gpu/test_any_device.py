"""Staging, loading, pinning and random numbers on a device: the simulated one, or the accelerator that is there.

The scenes are those of `checkpointd doctor --device`. On the simulated device, test_in_own_process.py runs this file.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing

import pytest
import torch

from checkpointd_client import Checkpointer, RngState
from checkpointd_client.selftest import content, steps
from checkpointd_client.selftest.lateness import Late
from checkpointd_client.selftest.scenes import Loading, Product, Training
from checkpointd_client.selftest.waiting import copy_waits, waits
from checkpointd_client.staging import device_snapshot

ROUNDS = 3


def late_in(late: Late, order: steps.Order) -> AbstractContextManager[float]:
    return late.compute() if order == "compute" else late.copies()


@pytest.mark.parametrize("order", steps.ORDERS)
@pytest.mark.parametrize("cloned", [0, 20_000, device_snapshot.CLONED_BYTES_MAX])
def test_a_snapshot_is_of_the_moment_of_save(
    device: torch.device, late: Late, nbytes: int, root: str, order: steps.Order, cloned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no room for clones, so that save() waits for the copies."""
    monkeypatch.setattr(device_snapshot, "CLONED_BYTES_MAX", cloned)
    training = Training(nbytes, device)
    with closing(Product(root, training)) as product:
        for _ in range(ROUNDS):
            assert training.snapshots(product, late_in(late, order)) == ""


def test_save_and_the_step_behind_it_do_not_wait_for_the_device(
    device: torch.device, late: Late, nbytes: int, root: str
) -> None:
    training = Training(nbytes, device)
    with closing(Product(root, training)) as product:

        def save_and_step() -> None:
            product.take()
            training.optimizer.step()

        assert not waits(save_and_step, late, device)
        product.taken()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_waits_unless_the_memory_is_pinned_as_the_arena_is(
    device: torch.device, late: Late, nbytes: int, pinned: bool
) -> None:
    waited = copy_waits(nbytes, late, device, pinned=pinned)
    if waited is None:
        pytest.skip("this device did the queued work at once")
    assert waited == (not pinned)


@pytest.mark.parametrize("order", steps.ORDERS)
@pytest.mark.parametrize("pinned", [0, 1, 8])
def test_a_load_is_in_order_with_the_callers_stream(
    device: torch.device, late: Late, nbytes: int, root: str, order: steps.Order, pinned: int
) -> None:
    loading = Loading(nbytes, device)
    with Checkpointer(root, read_back=False, pinned_bytes=nbytes * pinned // 4) as checkpointer:
        loading.save(checkpointer)
        for _ in range(ROUNDS):
            assert loading.loaded(lambda: loading.load(checkpointer), late_in(late, order)) == ""


@pytest.mark.parametrize("wrong", [None, *steps.STAGING], ids=lambda wrong: wrong.check if wrong else "none")
def test_a_mistake_in_the_steps_of_staging_shows(
    device: torch.device, late: Late, nbytes: int, wrong: steps.Mistake | None
) -> None:
    training = Training(nbytes, device)
    for order in steps.ORDERS if wrong is None else (wrong.late,):
        found = [training.snapshots(steps.Steps(training, late, wrong), late_in(late, order)) for _ in range(ROUNDS)]
        shows_as_it_must(device, wrong, found)


@pytest.mark.parametrize("wrong", [None, *steps.LOADING], ids=lambda wrong: wrong.check if wrong else "none")
def test_a_mistake_in_the_steps_of_a_load_shows(
    device: torch.device, late: Late, nbytes: int, wrong: steps.Mistake | None
) -> None:
    loading = Loading(nbytes, device)
    for order in steps.ORDERS if wrong is None else (wrong.late,):
        found = [loading.loaded(steps.LoadSteps(loading, wrong), late_in(late, order)) for _ in range(ROUNDS)]
        shows_as_it_must(device, wrong, found)


def shows_as_it_must(device: torch.device, wrong: steps.Mistake | None, found: list[str]) -> None:
    if wrong is None:
        assert found == [""] * ROUNDS
    elif device.type == "sim":
        assert all(found)
    elif not any(found):
        pytest.skip("could not be provoked on this device")


def test_a_change_that_torch_does_not_count_is_found(device: torch.device, late: Late, nbytes: int, root: str) -> None:
    with Checkpointer(root, read_back=False) as checkpointer:
        found = Training(nbytes, device).changed_unseen(checkpointer, late.copies())
    assert found in ({"thrown away"} if device.type == "sim" else {"thrown away", "right"})


def test_every_dtype_comes_back(device: torch.device, root: str) -> None:
    state, _ = content.of_every_dtype(device)
    assert content.differences(root, state) == []


def test_every_shape_comes_back_on_every_device(device: torch.device, root: str) -> None:
    state = {
        f"{name} on {one}": tensor for one in content.all_like(device) for name, tensor in content.of_every_shape(one).items()
    }
    assert content.differences(root, state) == []


def test_training_goes_on_where_it_was(device: torch.device, root: str) -> None:
    """A fresh optimizer gets its moments on the device, and random numbers go on."""
    if not hasattr(torch.get_device_module(device.type), "get_rng_state"):
        pytest.skip("torch cannot read the state of this device's random number generators")

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8)).to(device)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(32, 64, device=device)).pow(2).sum().backward()
            optimizer.step()

    net, optimizer = made()
    train(net, optimizer)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(0, {"net": net, "optimizer": optimizer, "rng": RngState()}).wait()
        train(net, optimizer)
        fresh, its_optimizer = made()
        torch.rand(5, device=device)
        checkpointer.load({"net": fresh, "optimizer": its_optimizer, "rng": RngState()})
    assert {t.device for entry in its_optimizer.state.values() for name, t in entry.items() if name != "step"} == {device}
    train(fresh, its_optimizer)
    for name, tensor in net.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].cpu(), tensor.cpu()), name
