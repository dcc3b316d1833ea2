"""N1 to N3 of snapshot.py: what a save holds is the state at the call, however training goes on.

Each test saves, changes everything it can at once, and loads into fresh objects: what comes back must be the state at save().
To make tearing likely the stager's thread is held back, so that the copies happen as late as they ever could.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkpointd.errors import AbortedError, StagingError
from checkpointd_client import Checkpointer, snapshot
from checkpointd_client.snapshot import Staging, unchanging


@contextmanager
def held_back_stager(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keep the background copy from starting until the event is set: only the step hook and fence() can copy before."""
    go = threading.Event()
    finish = Staging.finish

    def late(self: Staging) -> None:
        if threading.current_thread().name == "checkpointd-stager":
            go.wait(30)
        finish(self)

    monkeypatch.setattr(Staging, "finish", late)
    try:
        yield go
    finally:
        go.set()


def _net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def _train(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(torch.randn(8, 16)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def _frozen(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _loaded_net(root: Path, others: dict[str, object] | None = None) -> dict[str, torch.Tensor]:
    net = _net()
    for value in net.state_dict().values():
        value.zero_()
    with Checkpointer(root) as ckpt:
        assert ckpt.load({"net": net, **(others or {})}, strict=False)
    return _frozen(net)


def test_a_step_right_after_save_is_held_until_its_copy_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    _train(net, optimizer)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected, moments = _frozen(net), copy.deepcopy(optimizer.state_dict())
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        assert handle.phase == "staging"
        _train(net, optimizer)  # forward changes BatchNorm's buffers, step changes the rest
        assert not torch.equal(net[0].weight, expected["0.weight"])
    _same(_loaded_net(tmp_path), expected)
    fresh = torch.optim.AdamW(_net().parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.load({"optimizer": fresh}, strict=False)
    for number, state in moments["state"].items():
        assert torch.equal(fresh.state_dict()["state"][number]["exp_avg"], state["exp_avg"])
    assert handle.timings.fence_s >= 0


def test_buffers_that_the_forward_pass_changes_are_copied_inside_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(net)
        ckpt.save(1, {"net": net, "optimizer": optimizer})
        for _ in range(5):
            net(torch.randn(8, 16))
        assert not torch.equal(net[1].running_mean, expected["1.running_mean"])
    _same(_loaded_net(tmp_path), expected)


def test_an_ema_updated_in_place_before_the_next_step_does_not_tear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _train(net, optimizer)
    ema.update_parameters(net)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(ema)
        ckpt.save(1, {"net": net, "optimizer": optimizer, "ema": ema})
        ema.update_parameters(net)
        for parameter in ema.parameters():
            parameter.detach().mul_(3)
    found = torch.optim.swa_utils.AveragedModel(_net())
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"ema": found}, strict=False)
    _same(_frozen(found), expected)


def test_parameters_whose_optimizer_is_not_in_the_state_need_no_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(net)
        ckpt.save(1, {"net": net})
        for parameter in net.parameters():
            parameter.data.add_(1.0)
    _same(_loaded_net(tmp_path), expected)


def test_fence_makes_a_change_by_hand_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(net)
        ckpt.save(1, {"net": net, "optimizer": optimizer})
        ckpt.fence()
        for parameter in net.parameters():
            parameter.data.add_(1.0)  # torch's version counter does not see this one
    _same(_loaded_net(tmp_path), expected)


def test_waiting_for_staged_makes_a_change_by_hand_safe(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt:
        expected = _frozen(net)
        ckpt.save(1, {"net": net, "optimizer": optimizer}).wait(until="staged")
        for parameter in net.parameters():
            parameter.data.add_(1.0)
    _same(_loaded_net(tmp_path), expected)


def test_an_unfenced_change_by_hand_spoils_the_save_instead_of_tearing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ckpt = Checkpointer(tmp_path)
    with held_back_stager(monkeypatch):
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        with torch.no_grad():
            net[0].weight.add_(1.0)
    with pytest.raises(AbortedError, match=r"net\.0\.weight was changed while its snapshot was taken"):
        handle.wait()
    assert isinstance(handle.exception().__cause__, StagingError)
    assert handle.phase == "failed"
    again = ckpt.save(2, {"net": net, "optimizer": optimizer}).wait()
    assert again.phase == "committed"
    ckpt.close()


def test_gradient_accumulation_leaves_the_snapshot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(net)
        ckpt.save(1, {"net": net, "optimizer": optimizer})
        for _ in range(4):
            net(torch.randn(8, 16)).pow(2).sum().backward()
        optimizer.step()
        assert not torch.equal(net[0].weight, expected["0.weight"])
    _same(_loaded_net(tmp_path), expected)


def test_the_step_of_any_optimizer_is_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.Adam(net[3].parameters(), lr=0.1)
    with Checkpointer(tmp_path) as ckpt, held_back_stager(monkeypatch):
        expected = _frozen(net)
        ckpt.save(1, {"net": net, "first": first, "second": second})
        net(torch.randn(8, 16)).pow(2).sum().backward()
        second.step()
        first.step()
    _same(_loaded_net(tmp_path), expected)


def test_saves_at_every_step_hold_each_steps_own_state(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    expected = {}
    with Checkpointer(tmp_path) as ckpt:
        for step in range(12):
            _train(net, optimizer)
            expected[step] = _frozen(net)
            ckpt.save(step, {"net": net, "optimizer": optimizer})
    for step in (0, 1, 6, 10, 11):
        net = _net()
        with Checkpointer(tmp_path) as ckpt:
            assert ckpt.load({"net": net}, tag=f"global_step{step}", strict=False)
        _same(_frozen(net), expected[step])


def test_eager_staging_holds_everything_when_save_returns(tmp_path: Path) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Checkpointer(tmp_path, staging="eager") as ckpt:
        expected = _frozen(net)
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        assert handle.timings.staged_s is not None
        for parameter in net.parameters():
            parameter.data.add_(1.0)
    _same(_loaded_net(tmp_path), expected)


# --- what is cloned on a device, tried with tensors of the host --------------------------------------------------------


class NoRoom(torch.Tensor):
    """For whose clone there is no memory."""

    def clone(self, *_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    def detach(self) -> torch.Tensor:
        return self


def test_what_may_change_is_cloned_and_what_is_stable_is_not() -> None:
    stable, moving = torch.ones(3), torch.ones(4)
    (one, two), waits = unchanging([(stable, True), (moving, False)])
    assert one is stable
    assert two is not moving
    assert torch.equal(two, moving)
    assert not waits


def test_what_is_too_large_to_be_cloned_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CLONED_BYTES_MAX", 40)
    tensors = [torch.ones(5), torch.ones(9), torch.ones(5), torch.ones(1)]
    sources, waits = unchanging([(tensor, False) for tensor in tensors])
    assert [source is tensor for source, tensor in zip(sources, tensors, strict=True)] == [False, True, False, True]
    assert waits


def test_where_memory_runs_out_nothing_more_is_cloned() -> None:
    tensors = [torch.ones(2), torch.ones(2).as_subclass(NoRoom), torch.ones(2)]
    sources, waits = unchanging([(tensor, False) for tensor in tensors])
    assert [source is tensor for source, tensor in zip(sources, tensors, strict=True)] == [False, True, True]
    assert waits
    assert not unchanging([(tensors[1], True)])[1], "what is stable needs no clone"
