"""RESTORE-3 of restore/plan.py for optimizers and schedulers: training goes on to the bit, whether or not their
state exists already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from checkpointd.errors import MismatchError
from tests.unit.client.capture_and_fill import same, save


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}]),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.25), capturable=False, foreach=False),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.AdamW(p, fused=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False])
def test_training_goes_on_to_the_bit(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, fresh: bool) -> None:
    """After loading, two more steps end in the very bits that they end in without the interruption."""

    def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2).to(dtype)
        return model, make(list(model.parameters()))

    model, optimizer = objects()
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    saved = save({"m": model, "o": optimizer})
    other_model, other = objects()
    if not fresh:
        step(other_model, other, 9)
    saved.load({"m": other_model, "o": other})
    assert save({"m": other_model, "o": other}).data == saved.data
    assert same(other.state_dict(), optimizer.state_dict())
    for seed in (2, 3):
        step(model, optimizer, seed)
        step(other_model, other, seed)
    assert save({"m": other_model, "o": other}).data == save({"m": model, "o": optimizer}).data


def test_existing_optimizer_state_is_filled_in_place() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    target = torch.optim.Adam(other.parameters(), lr=torch.tensor(0.1))
    step(model, optimizer, 0)
    step(other, target, 1)
    held = [value for entry in target.state.values() for value in entry.values()] + [target.param_groups[0]["lr"]]
    save({"o": optimizer}).load({"o": target})
    assert all(
        one is two
        for one, two in zip(
            held, [v for entry in target.state.values() for v in entry.values()] + [target.param_groups[0]["lr"]], strict=True
        )
    )
    assert float(target.param_groups[0]["lr"]) == 0.5


def test_state_in_another_dtype_than_its_parameter_keeps_dtype_and_bits() -> None:
    """torch's own load_state_dict would cast it to the parameter's dtype."""
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.randn(entry["exp_avg"].shape)
        entry["nested"] = {"deep": [torch.randn(2), "text", b"raw"]}
    other = nn.Linear(3, 3).bfloat16()
    target = torch.optim.Adam(other.parameters())
    save({"o": optimizer}).load({"o": target})
    assert same([*optimizer.state.values()], [*target.state.values()])
    assert target.state[other.weight]["exp_avg"].dtype == torch.float32


def test_state_that_was_not_there_when_saved_is_gone_after_loading() -> None:
    model = nn.Linear(2, 2)
    saved = save({"o": torch.optim.Adam(model.parameters())})
    target = torch.optim.Adam(model.parameters())
    step(model, target, 0)
    saved.load({"o": target})
    assert not target.state


def test_lbfgs_with_its_lists_of_tensors() -> None:
    def objects() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.tensor([3.0, -2.0, 0.5]))
        return weight, torch.optim.LBFGS([weight], max_iter=3)

    def closure(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
        def run() -> float:
            optimizer.zero_grad()
            loss = (weight**4).sum() + weight.prod()
            loss.backward()
            return loss.item()

        return run

    weight, optimizer = objects()
    optimizer.step(closure(weight, optimizer))
    saved = save({"w": weight, "o": optimizer})
    assert any(".old_dirs." in fqn for fqn in saved.entries)
    other_weight, other = objects()
    saved.load({"w": other_weight, "o": other})
    optimizer.step(closure(weight, optimizer))
    other.step(closure(other_weight, other))
    assert same(weight, other_weight)


def test_param_groups_of_other_sizes_are_a_mismatch() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    saved = save({"o": torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}])})
    with pytest.raises(MismatchError, match=r"o: the numbers of parameters .* \[2, 1\] stored and \[3\] now"):
        saved.load({"o": torch.optim.SGD(weights)})


def test_an_optimizer_with_a_state_dict_of_its_own_loads_itself() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {"rate": self.param_groups[0]["lr"], "noise": torch.ones(2)}

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    weight = nn.Parameter(torch.ones(2))
    target = Own([weight], 0.1)
    save({"o": Own([weight], 0.5)}).load({"o": target})
    assert same(target.loaded, {"rate": 0.5, "noise": torch.ones(2)})


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, 0.1, 1, 3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.LambdaLR(o, lambda start: 0.9**start),
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]),
    lambda o: lr_scheduler.PolynomialLR(o, 10),
]


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning", "ignore:Converting a tensor:UserWarning")
def test_schedulers_go_on_where_they_were(make: Callable[[torch.optim.Optimizer], Any], tensor_rate: bool) -> None:
    def objects() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.5) if tensor_rate else 0.5, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    def advance(state: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for i in range(steps):
            step(state["model"], state["optimizer"], i)
            state["scheduler"].step(*([1.0] if isinstance(state["scheduler"], lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(float(state["optimizer"].param_groups[0]["lr"]))
        return rates

    source, target = objects(), objects()
    advance(source, 4)
    saved = save(source)
    saved.load(target)
    assert same(target["scheduler"].state_dict(), source["scheduler"].state_dict())
    assert save(target).data == saved.data
    assert advance(source, 5) == advance(target, 5)


# --- by the names of parameters ---


def named_pair(order: Callable[[list[nn.Parameter]], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    return model, torch.optim.Adam(order(list(model.parameters())))


def test_state_goes_by_name_whatever_the_order_of_parameters() -> None:
    model, optimizer = named_pair(list)
    step(model, optimizer, 0)
    other, target = named_pair(lambda found: found[::-1])
    save({"m": model, "o": optimizer}).load({"m": other, "o": target})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert same(optimizer.state[one], target.state[two])


def test_groups_go_by_the_names_of_their_parameters() -> None:
    model, optimizer = named_pair(lambda p: [{"params": p[:2], "lr": 0.5}, {"params": p[2:], "lr": 0.25}])
    step(model, optimizer, 0)
    other, target = named_pair(lambda p: [{"params": p[2:][::-1]}, {"params": p[:2]}])
    save({"m": model, "o": optimizer}).load({"m": other, "o": target})
    assert [group["lr"] for group in target.param_groups] == [0.25, 0.5]
    assert same(optimizer.state[model[0].weight], target.state[other[0].weight])  # type: ignore[index]  # a Sequential


def test_a_group_made_of_two_is_a_mismatch() -> None:
    model, optimizer = named_pair(lambda p: [{"params": p[:2], "lr": 0.5}, {"params": p[2:]}])
    other, target = named_pair(list)
    with pytest.raises(MismatchError, match=r"o\.param_groups\.0: its parameters are those of the stored groups \[0, 1\]"):
        save({"m": model, "o": optimizer}).load({"m": other, "o": target})


def test_parameters_that_are_new_or_gone_are_named() -> None:
    model, optimizer = named_pair(lambda p: p[:3])
    step(model, optimizer, 0)
    other, target = named_pair(lambda p: p[1:])
    with pytest.raises(MismatchError) as caught:
        save({"m": model, "o": optimizer}).load({"m": other, "o": target})
    assert caught.value.mismatches == (
        "o.state.m.1.bias: missing from the checkpoint",
        "o.state.m.0.weight: in the checkpoint, and nowhere in the objects",
    )


def test_without_a_module_that_names_them_they_go_by_their_order() -> None:
    model, optimizer = named_pair(list)
    step(model, optimizer, 0)
    other, target = named_pair(list)
    saved = save({"m": model, "o": optimizer})
    assert "o.state.m.0.weight.exp_avg" in saved.entries
    restoration = saved.prepare({"o": target}, strict=False)
    saved.fill(restoration)
    restoration.finish()
    assert same(optimizer.state[model[0].weight], target.state[other[0].weight])  # type: ignore[index]  # a Sequential


def test_stored_by_number_they_go_by_their_order_as_ever() -> None:
    model, optimizer = named_pair(list)
    step(model, optimizer, 0)
    other, target = named_pair(list)
    saved = save({"o": optimizer})
    assert "o.state.0.exp_avg" in saved.entries
    restoration = saved.prepare({"m": other, "o": target}, strict=False)
    saved.fill(restoration)
    restoration.finish()
    assert same(optimizer.state[model[0].weight], target.state[other[0].weight])  # type: ignore[index]  # a Sequential


def test_wrapping_changes_no_name() -> None:
    model, optimizer = named_pair(list)
    step(model, optimizer, 0)
    other, target = named_pair(list)
    save({"m": model, "o": optimizer}).load({"m": nn.DataParallel(other), "o": target})
    assert same(optimizer.state[model[0].weight], target.state[other[0].weight])  # type: ignore[index]  # a Sequential


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    """Or the next step would miss what only this kind has."""
    model = nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    step(model, adam, 0)
    saved = save({"optimizer": adam})
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(MismatchError, match=r"another kind of optimizer: .*betas.* is stored, and .*momentum.* is there now"):
        saved.load({"optimizer": sgd})
    assert sgd.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("other", [{"later_key": 1}, {}])
def test_that_of_another_version_of_torch_is_not(other: dict[str, int]) -> None:
    """It has a key more, or one less."""
    model = nn.Linear(3, 2)
    first, second = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    first.param_groups[0].update(other)
    if not other:
        del first.param_groups[0]["decoupled_weight_decay"]
    saved = save({"optimizer": first})
    saved.load({"optimizer": second})
    step(model, second, 0)


class Counting(torch.optim.SGD):
    """It keeps values in its state that belong to no parameter, as MADGRAD and SPAM do."""

    def __init__(self, parameters: Any, **own: Any) -> None:
        super().__init__(parameters, lr=0.25, momentum=0.5)
        self.state.update(own)


OWN: list[dict[str, Any]] = [
    {"k": torch.tensor([3])},
    {"k": 3},
    {"k": 3, "seen": [torch.ones(2), None], "of": {"deep": {"tensor": torch.ones(2).t()}}},
]


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("named", [True, False])
def test_what_an_optimizer_keeps_for_no_parameter_comes_back(own: dict[str, Any], named: bool) -> None:
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = Counting(model.parameters(), **own), Counting(again.parameters(), k=0)
    step(model, optimizer, 0)
    state, into = {"o": optimizer}, dict[str, Any](o=other)
    if named:
        state, into = {"m": model, **state}, {"m": again, **into}
    save(state).load(into)
    found, wanted = (one.state_dict()["state"] for one in (other, optimizer))
    assert found.keys() == wanted.keys()
    assert all(same(found[key], wanted[key]) for key in wanted)


def test_what_it_keeps_and_is_not_stored_stays_and_is_told() -> None:
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = save({"m": model, "o": Counting(model.parameters())})
    other = Counting(again.parameters(), k=7)
    with pytest.raises(MismatchError, match=r"o\.state\.k: missing"):
        saved.prepare({"m": again, "o": other})
    restoration = saved.prepare({"m": again, "o": other}, strict=False)
    saved.fill(restoration)
    restoration.finish()
    assert other.state["k"] == 7
