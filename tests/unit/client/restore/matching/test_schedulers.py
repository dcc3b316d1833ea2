"""Learning-rate schedulers and gradient scalers take what one of their own class has stored, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from checkpointd.errors import MismatchError
from tests.unit.client.capture_and_fill import same, save

Make = Callable[[torch.optim.Optimizer], Any]


class Warmed(lrs.LRScheduler):
    """A user's: it has another attribute once it has stepped twice."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.later = 2
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # torch's may be tensors
        if self.last_epoch >= self.later:
            self.since = self.last_epoch
        return [0.5 for _ in self.optimizer.param_groups]


KINDS: dict[str, Make] = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda _: 0.5),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=9),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.5),
    "LinearLR": lambda o: lrs.LinearLR(o),
    "ConstantLR": lambda o: lrs.ConstantLR(o),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o),
    "SWALR": lambda o: SWALR(o, 0.1),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.CosineAnnealingLR(o, 9)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.StepLR(o, 2)]),
}


def made(make: Make, *, steps: int = 0) -> tuple[nn.Module, Any]:
    """A model and its scheduler."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    scheduler = make(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
    return model, scheduler


def held(scheduler: Any) -> dict[str, Any]:
    return {key: value for key, value in scheduler.state_dict().items() if key != "_schedulers"}


def refused(stored: Make, live: Make) -> str:
    """The one mismatch of the scheduler, which is left whole while the model is loaded."""
    model, scheduler = made(stored, steps=2)
    saved = save({"m": model, "s": scheduler})
    other, target = made(live)
    before, weight = held(target), other.state_dict()["weight"].clone()
    with pytest.raises(MismatchError) as caught:
        saved.load({"m": other, "s": target})
    assert same(other.state_dict()["weight"], weight)
    restoration = saved.prepare({"m": other, "s": target}, strict=False)
    assert restoration.mismatched == caught.value.mismatches
    saved.fill(restoration)
    restoration.finish()
    assert same(other.state_dict(), model.state_dict())
    assert held(target) == before
    [line] = restoration.mismatched
    assert line.startswith("s: ")
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_of_the_same_class_is_loaded(kind: str) -> None:
    model, scheduler = made(KINDS[kind], steps=2)
    other, target = made(KINDS[kind])
    save({"m": model, "s": scheduler}).load({"m": other, "s": target})
    assert held(target) == held(scheduler)


def test_a_scheduler_of_another_class_is_left_whole_and_named() -> None:
    """In all pairs: the classes differ in what they hold."""
    for one, other in permutations(KINDS, 2):
        line = refused(KINDS[one], KINDS[other])
        assert f"another class than torch.optim.{'swa_utils' if other == 'SWALR' else 'lr_scheduler'}.{other}: " in line


def test_the_mismatch_names_what_either_class_holds() -> None:
    line = refused(KINDS["StepLR"], KINDS["CosineAnnealingLR"])
    assert line.endswith(": gamma, step_size is stored, and T_max, eta_min is there now")
    line = refused(KINDS["StepLR"], KINDS["ExponentialLR"])
    assert line.endswith(": step_size is stored, and nothing more is there now")


def chained(*parts: Make) -> Make:
    return lambda o: lrs.ChainedScheduler([part(o) for part in parts])


def test_schedulers_inside_one_are_compared_one_by_one() -> None:
    step, cosine, linear = KINDS["StepLR"], KINDS["CosineAnnealingLR"], KINDS["LinearLR"]
    line = refused(chained(linear, step), chained(linear, cosine))
    assert line.endswith(": at _schedulers.1, gamma, step_size is stored, and T_max, eta_min is there now")
    assert refused(chained(linear, step), chained(linear)).endswith(": it holds 2 schedulers, and the one here 1")
    assert refused(chained(linear), chained(linear, step)).endswith(": it holds 1 schedulers, and the one here 2")


def one_cycle(momentum: bool) -> Make:
    return lambda o: lrs.OneCycleLR(o, 0.5, 9, cycle_momentum=momentum)


def cyclic(momentum: bool) -> Make:
    return lambda o: lrs.CyclicLR(o, 0.1, 0.5, cycle_momentum=momentum)


OTHERS: list[tuple[Make, Make]] = [
    (KINDS["StepLR"], lambda o: lrs.StepLR(o, 9, gamma=0.25)),
    *((make(yes), make(not yes)) for make in (one_cycle, cyclic) for yes in (True, False)),
]


@pytest.mark.parametrize(("stored", "live"), OTHERS)
def test_other_arguments_make_no_other_class(stored: Make, live: Make) -> None:
    model, scheduler = made(stored, steps=2)
    other, target = made(live)
    save({"m": model, "s": scheduler}).load({"m": other, "s": target})
    assert held(target).items() >= held(scheduler).items()


def test_what_another_version_of_torch_adds_decides_nothing() -> None:
    model, scheduler = made(KINDS["StepLR"], steps=2)
    scheduler.verbose, scheduler._new = False, 1
    del scheduler._is_initial
    other, target = made(KINDS["StepLR"])
    save({"m": model, "s": scheduler}).load({"m": other, "s": target})
    assert target.last_epoch == 2


def test_a_users_class_may_hold_more_once_it_has_stepped() -> None:
    for steps in (0, 3):
        model, scheduler = made(Warmed, steps=steps)
        other, target = made(Warmed, steps=3 - steps)
        save({"m": model, "s": scheduler}).load({"m": other, "s": target})
        assert target.last_epoch == steps
    assert "gamma, step_size is stored" in refused(KINDS["StepLR"], Warmed)


# --- scalers ---


def scaler(*, enabled: bool, scale: float = 2.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)


def test_a_scaler_that_was_disabled_leaves_an_enabled_one_whole() -> None:
    saved = save({"w": torch.ones(1), "s": scaler(enabled=False)})
    weight, target = torch.zeros(1), scaler(enabled=True)
    words = "s: it was saved while it was disabled, and is enabled now"
    with pytest.raises(MismatchError, match=words):
        saved.load({"w": weight, "s": target})
    assert weight.item() == 0
    restoration = saved.prepare({"w": weight, "s": target}, strict=False)
    saved.fill(restoration)
    restoration.finish()
    assert restoration.mismatched == (words,)
    assert weight.item() == 1
    assert target.get_scale() == 2


@pytest.mark.parametrize(("stored", "live", "scale"), [(True, True, 8.0), (False, False, 1.0), (True, False, 1.0)])
def test_any_other_scaler_is_loaded(stored: bool, live: bool, scale: float) -> None:
    """A disabled one needs nothing, as torch's own load_state_dict() has it."""
    target = scaler(enabled=live)
    save({"w": torch.ones(1), "s": scaler(enabled=stored, scale=8.0)}).load({"w": torch.zeros(1), "s": target})
    assert target.get_scale() == scale


# --- other param groups ----------------------------------------------------------------------------------------------


def in_groups(make: Make, split: list[list[int]], rates: list[float], *, steps: int = 0) -> dict[str, Any]:
    """A model of three layers, whose optimizer has them in these groups, with its scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    groups = [{"params": [model[i].weight for i in group], "lr": rate} for group, rate in zip(split, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.5)
    scheduler = make(optimizer)
    state = {"m": model, "o": optimizer, "s": scheduler}
    for _ in range(steps):
        go_on(state)
    return state


def go_on(state: dict[str, Any]) -> None:
    state["m"](torch.ones(1, 2)).sum().backward()
    state["o"].step()
    scheduler = state["s"]
    scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))


def rates_of(state: dict[str, Any]) -> list[float]:
    """The learning rate of each layer."""
    found = {id(p): float(group["lr"]) for group in state["o"].param_groups for p in group["params"]}
    return [found[id(layer.weight)] for layer in state["m"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [[[0], [1, 2]], [[2], [0, 1]], [[0], [1], [2]]])
def test_schedulers_1_a_scheduler_follows_the_groups_of_its_optimizer(kind: str, split: list[list[int]]) -> None:
    """One group becomes several: each has the rates that the one would have had."""
    trained = in_groups(KINDS[kind], [[0, 1, 2]], [0.5], steps=2)
    mine = in_groups(KINDS[kind], split, [0.5] * len(split))
    save(trained).load(mine)
    for _ in range(3):
        go_on(trained)
        go_on(mine)
        assert rates_of(mine) == rates_of(trained)


@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_1_groups_that_change_places_keep_their_values(kind: str) -> None:
    trained = in_groups(KINDS[kind], [[0], [1], [2]], [0.5, 0.25, 0.125], steps=2)
    mine = in_groups(KINDS[kind], [[2], [0], [1]], [0.125, 0.5, 0.25])
    save(trained).load(mine)
    for _ in range(3):
        go_on(trained)
        go_on(mine)
        assert rates_of(mine) == rates_of(trained)


def test_schedulers_1_a_new_group_keeps_its_own_value() -> None:
    trained = in_groups(KINDS["LambdaLR"], [[0]], [0.5], steps=2)
    mine = in_groups(KINDS["LambdaLR"], [[0], [1, 2]], [0.5, 0.25])
    saved = save(trained)
    restoration = saved.prepare(mine, strict=False)
    saved.fill(restoration)
    restoration.finish()
    assert mine["s"].base_lrs == [0.5, 0.25]
    go_on(mine)


class Own:
    """A scheduler of the user's, of no class of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.pairs = [1.0, 2.0]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "rates": self.rates, "pairs": self.pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def step(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate


def test_schedulers_1_so_does_one_of_the_users_own() -> None:
    trained = in_groups(Own, [[0, 1, 2]], [0.5], steps=2)
    mine = in_groups(Own, [[0], [1, 2]], [0.5, 0.5])
    save(trained).load(mine)
    assert (mine["s"].rates, mine["s"].pairs) == ([0.5, 0.5], [1.0, 2.0])
    go_on(mine)


def test_a_scheduler_whose_optimizer_does_not_fit_is_not_loaded_either() -> None:
    """By numbers, since no module names the parameters."""
    trained, mine = (in_groups(KINDS["StepLR"], split, [0.5] * len(split)) for split in ([[0, 1, 2]], [[0], [1, 2]]))
    saved = save({"o": trained["o"], "s": trained["s"]})
    with pytest.raises(MismatchError, match=r"s: it was saved for 1 param groups, and its optimizer.*has 2 now"):
        saved.prepare({"o": mine["o"], "s": mine["s"]})


class Peaks(lrs.LRScheduler):
    """A user's, with a value for each group under a name of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # torch's may be tensors
        return [peak / (1 + self.last_epoch) for peak in self.peaks]


@pytest.mark.parametrize(("rates", "fits"), [([0.5, 0.25, 0.125], False), ([0.5, 0.5, 0.5], True)])
def test_values_that_may_be_of_groups_in_another_order_are_named(rates: list[float], fits: bool) -> None:
    trained = in_groups(Peaks, [[0], [1], [2]], rates, steps=2)
    mine = in_groups(Peaks, [[2], [0], [1]], [rates[2], rates[0], rates[1]])
    if fits:
        save(trained).load(mine)
        assert rates_of(mine) == rates_of(trained)
        return
    with pytest.raises(MismatchError, match=r"param groups in another order .* 'peaks' may hold a value for each of them"):
        save(trained).load(mine)


class WarmUp(lrs.LRScheduler):
    """As the well-known one: it keeps the scheduler that follows as an attribute, so torch's state_dict() holds the object."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = lrs.ExponentialLR(optimizer, 0.5)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # torch's may be tensors
        if self.last_epoch > 2:
            return [float(rate) for rate in self.after.get_last_lr()]
        return [float(base) * (self.last_epoch + 1) / 4 for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= 2:
            self.after.step()
        super().step()


@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0], [1, 2]]])
def test_schedulers_2_a_scheduler_inside_another_is_loaded_itself(split: list[list[int]]) -> None:
    trained = in_groups(WarmUp, [[0, 1, 2]], [0.5], steps=5)
    mine = in_groups(WarmUp, split, [0.5] * len(split))
    inner = mine["s"].after
    save(trained).load(mine)
    assert mine["s"].after is inner
    assert inner.optimizer is mine["o"]
    for _ in range(3):
        go_on(trained)
        go_on(mine)
        assert rates_of(mine) == rates_of(trained)
