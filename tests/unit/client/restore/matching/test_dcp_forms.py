"""A Checkpointer loads the optimizers and schedulers that torch's distributed checkpoint (DCP) stored, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from checkpointd_client import Checkpointer
from checkpointd_client.errors import MismatchError
from checkpointd_client.integrations.dcp import CheckpointdWriter, import_dcp

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step"),
]
Given = Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]
FORMS: dict[str, Given] = {
    "by number": lambda _, optimizer: optimizer.state_dict(),
    "by name": get_optimizer_state_dict,
    "flattened": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ),
}


def network(sizes: tuple[int, ...] = (4, 6, 3)) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def adamw(model: nn.Module, rate: float = 0.5) -> torch.optim.Optimizer:
    bias = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weight = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return torch.optim.AdamW([{"params": bias, "lr": rate, "weight_decay": 0.0}, {"params": weight, "lr": rate / 2}])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(state: dict[str, Any], tmp_path: Path, *, at_root: bool) -> Path:
    """A root with `state` as DCP saves it: into the root, or into a directory that is imported."""
    root = tmp_path / "root"
    if at_root:
        dcp.save(state, storage_writer=CheckpointdWriter(root, tag="t5"), no_dist=True)
    else:
        dcp.save(state, checkpoint_id=tmp_path / "t5", no_dist=True)
        import_dcp(tmp_path / "t5", root)
    return root


def assert_alike(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    was, now = one.state_dict(), other.state_dict()
    assert was["param_groups"] == now["param_groups"]
    assert was["state"].keys() == now["state"].keys()
    for number, entry in was["state"].items():
        assert {key: value.tolist() for key, value in entry.items()} == {
            key: value.tolist() for key, value in now["state"][number].items()
        }


@pytest.mark.parametrize("at_root", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_is_loaded_in_each_form(tmp_path: Path, form: str, at_root: bool) -> None:
    model = network()
    optimizer = adamw(model, 0.25)
    trained(model, optimizer)
    state = {"app": {"net": model.state_dict(), "optim": FORMS[form](model, optimizer)}, "step": 5}
    other = network()
    into = {"app": {"net": other, "optim": adamw(other)}, "step": 0}
    with Checkpointer(saved(state, tmp_path, at_root=at_root)) as ckpt:
        ckpt.load(into)
    assert_alike(optimizer, into["app"]["optim"])  # type: ignore[index]
    trained(other, into["app"]["optim"])  # type: ignore[index]


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_without_state_is_loaded(tmp_path: Path, form: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    trained(model, optimizer)
    other = network()
    into = {"model": other, "optim": torch.optim.SGD(other.parameters(), lr=1.0)}
    state = {"model": model.state_dict(), "optim": FORMS[form](model, optimizer)}
    with Checkpointer(saved(state, tmp_path, at_root=False)) as ckpt:
        ckpt.load(into)
    assert into["optim"].param_groups[0]["lr"] == 0.125  # type: ignore[union-attr]


@pytest.mark.parametrize("form", ["by name", "flattened"])
def test_each_of_two_optimizers_finds_its_module(tmp_path: Path, form: str) -> None:
    nets = {"one": network(), "two": network()}
    optimizers = {name: adamw(net, 0.1 * i) for i, (name, net) in enumerate(nets.items(), 1)}
    for name, net in nets.items():
        trained(net, optimizers[name])
    others = {name: network() for name in nets}
    into = {**others, **{f"{name}_optim": adamw(net) for name, net in others.items()}}
    state = {name: net.state_dict() for name, net in nets.items()}
    state |= {f"{name}_optim": FORMS[form](net, optimizers[name]) for name, net in nets.items()}
    with Checkpointer(saved(state, tmp_path, at_root=False)) as ckpt:
        ckpt.load(into)
    for name, optimizer in optimizers.items():
        assert_alike(optimizer, into[f"{name}_optim"])  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["by name", "flattened"])
def test_a_parameter_that_the_model_lacks_is_named(tmp_path: Path, form: str) -> None:
    model = network((4, 6, 3, 2))
    optimizer = adamw(model)
    trained(model, optimizer)
    state = {"model": model.state_dict(), "optim": FORMS[form](model, optimizer)}
    other = network()
    with Checkpointer(saved(state, tmp_path, at_root=False)) as ckpt, pytest.raises(MismatchError) as raised:
        ckpt.load({"model": other, "optim": adamw(other)})
    assert {line.partition(":")[0] for line in raised.value.mismatches} == {
        "model.2.bias",
        "model.2.weight",
        "optim.state.2.bias",
        "optim.state.2.weight",
    }


@pytest.mark.parametrize("form", ["by name", "flattened"])
def test_groups_that_were_split_otherwise_keep_their_settings_or_say_so(tmp_path: Path, form: str) -> None:
    model = network()
    optimizer = adamw(model)
    trained(model, optimizer)
    state = {"model": model.state_dict(), "optim": FORMS[form](model, optimizer)}
    other = network()
    with Checkpointer(saved(state, tmp_path, at_root=False)) as ckpt, pytest.raises(MismatchError, match="stored groups"):
        ckpt.load({"model": other, "optim": torch.optim.AdamW(other.parameters())})


def test_a_scheduler_keeps_the_milestones_that_it_was_given(tmp_path: Path) -> None:
    def made() -> tuple[torch.optim.Optimizer, SequentialLR]:
        optimizer = torch.optim.SGD(network().parameters(), lr=1.0)
        later = MultiStepLR(optimizer, [2, 4], gamma=0.5)
        return optimizer, SequentialLR(optimizer, [LinearLR(optimizer, total_iters=2), later], milestones=[2])

    def rates(optimizer: torch.optim.Optimizer, schedule: SequentialLR, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, schedule = made()
    rates(optimizer, schedule, 3)
    state = {"optim": optimizer.state_dict(), "schedule": schedule.state_dict(), "best": {10: 0.5}}
    root = saved(state, tmp_path, at_root=False)
    other, again = made()
    into = {"optim": other, "schedule": again, "best": {10: 0.0}}
    with Checkpointer(root) as ckpt:
        ckpt.load(into)
    assert into["best"] == {10: 0.5}
    assert rates(other, again, 5) == rates(optimizer, schedule, 5)
