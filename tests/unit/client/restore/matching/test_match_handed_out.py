"""Objects that hand out DTensors get back what they can take: MATCHOPT-1 to MATCHOPT-3 of match_optimizer.py
for their optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from checkpointd.errors import MismatchError
from tests.unit.client.capture_and_fill import save

pytestmark = pytest.mark.usefixtures("one_rank")
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.25)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


class App:
    """A model and its optimizer behind torch's functions, which by default refuse what they have no place for."""

    def __init__(self, words: int = 10, layers: int = 1, make: Make = adam, *, flat: bool = False, steps: int = 1) -> None:
        torch.manual_seed(words + layers)
        self.model = nn.Sequential(nn.Embedding(words, 4), *(nn.Linear(4, 4) for _ in range(layers)))
        fully_shard(self.model, mesh=DeviceMesh("cpu", [0]))
        self.optimizer = make(self.model.parameters())
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([0, 1, 2])).square().sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optimizer, "epoch": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(self.model, self.optimizer, **parts, options=self.options)

    def held(self) -> dict[str, dict[str, list[float]]]:
        """The state of each parameter, itself included, as lists."""
        named = {name: {"": p, **self.optimizer.state[p]} for name, p in self.model.named_parameters()}
        return {name: {key: whole(value) for key, value in entry.items()} for name, entry in named.items()}


def whole(value: Any) -> Any:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().flatten().tolist()


def loaded_in_part(stored: App, live: App) -> Any:
    """What strict=False gives; with strict, the same is a mismatch that touches nothing."""
    saved, before = save({"app": stored}), live.held()
    with pytest.raises(MismatchError) as caught:
        saved.load({"app": live})
    assert live.held() == before
    restoration = saved.prepare({"app": live}, strict=False)
    assert len(caught.value.mismatches) == sum(map(len, (restoration.missing, restoration.unexpected, restoration.mismatched)))
    saved.fill(restoration)
    restoration.finish()
    return restoration


FORMS = pytest.mark.parametrize("flat", [False, True])


@FORMS
def test_what_fits_is_loaded(flat: bool) -> None:
    stored, live = App(flat=flat, steps=3), App(flat=flat, make=lambda p: torch.optim.AdamW(p, lr=0.5))
    save({"app": stored}).load({"app": live})
    assert live.held() == stored.held()
    assert live.optimizer.param_groups[0]["lr"] == 0.25


@FORMS
def test_the_state_of_a_parameter_that_does_not_fit_is_left_whole(flat: bool) -> None:
    """MATCHOPT-1: its count of steps, too, which would fit."""
    stored, live = App(10, flat=flat, steps=3), App(12, flat=flat)
    before = live.held()
    restoration = loaded_in_part(stored, live)
    assert restoration.missing == restoration.unexpected == ()
    paths = ["app.model.0.weight", "app.optim.state.0.weight.exp_avg", "app.optim.state.0.weight.exp_avg_sq"]
    assert [line.partition(":")[0] for line in restoration.mismatched] == paths
    assert restoration.mismatched[-1].endswith("(so all that is stored at app.optim.state.0.weight is left out)")
    assert live.held() == {**stored.held(), "0.weight": before["0.weight"]}
    live.step()


@FORMS
def test_a_layer_that_was_not_stored_stays_and_is_missing(flat: bool) -> None:
    """MATCHOPT-3."""
    stored, live = App(layers=1, flat=flat, steps=3), App(layers=2, flat=flat)
    before = live.held()
    restoration = loaded_in_part(stored, live)
    names = ("2.weight", "2.bias")
    assert restoration.missing == tuple(f"app.{part}.{name}" for part in ("model", "optim.state") for name in names)
    assert restoration.unexpected == restoration.mismatched == ()
    assert live.held() == {**before, **stored.held()}
    live.step()


@FORMS
def test_a_layer_that_is_gone_is_unexpected(flat: bool) -> None:
    stored, live = App(layers=2, flat=flat, steps=3), App(layers=1, flat=flat)
    restoration = loaded_in_part(stored, live)
    names = ("2.weight", "2.bias")
    assert restoration.unexpected == tuple(f"app.{part}.{name}" for part in ("model", "optim.state") for name in names)
    assert restoration.missing == restoration.mismatched == ()
    assert live.held() == {name: entry for name, entry in stored.held().items() if name not in names}
    live.step()


@FORMS
def test_an_optimizer_of_another_kind_is_left_whole(flat: bool) -> None:
    """MATCHOPT-2."""
    stored, live = App(make=momentum, flat=flat, steps=3), App(make=adam, flat=flat)
    before, group = live.held(), live.optimizer.param_groups[0]
    restoration = loaded_in_part(stored, live)
    assert all("another kind of optimizer" in line for line in restoration.mismatched)
    assert {line.split(":")[0] for line in restoration.mismatched} == (
        {f"app.optim.param_groups.{name}" for name in before} if flat else {"app.optim.param_groups.0"}
    )
    weights = {name: entry[""] for name, entry in stored.held().items()}
    assert live.held() == {name: {**entry, "": weights[name]} for name, entry in before.items()}
    assert (group["lr"], live.optimizer.param_groups[0]["betas"]) == (0.25, group["betas"])
    live.step()


def in_two(names: Callable[[int], bool]) -> Make:
    """AdamW with two groups: `names` says of each number of a parameter whether it is in the second one."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        both: list[list[Any]] = [[], []]
        for number, parameter in enumerate(parameters):
            both[names(number)].append(parameter)
        return torch.optim.AdamW([{"params": both[0], "lr": 0.5}, {"params": both[1], "lr": 0.125}])

    return make


def test_groups_go_by_the_names_of_their_parameters() -> None:
    stored, live = App(make=in_two(lambda n: n == 0), steps=3), App(make=in_two(lambda n: n != 0))
    save({"app": stored}).load({"app": live})
    assert [group["lr"] for group in live.optimizer.param_groups] == [0.125, 0.5]
    assert live.held() == stored.held()


def test_a_group_of_parameters_from_several_is_left_with_their_state() -> None:
    stored, live = App(make=in_two(lambda n: n == 0), steps=3), App(make=in_two(lambda n: n == 1))
    before = live.held()
    restoration = loaded_in_part(stored, live)
    [line] = restoration.mismatched
    assert line.startswith("app.optim.param_groups.0: its parameters were in 2 groups")
    assert [group["lr"] for group in live.optimizer.param_groups] == [0.5, 0.5]
    found = live.held()
    assert found["1.weight"] == stored.held()["1.weight"]
    for name in ("0.weight", "1.bias"):
        assert {**found[name], "": None} == {**before[name], "": None}


@FORMS
def test_state_that_a_parameter_had_not_when_it_was_saved_stays(flat: bool) -> None:
    """As of one that was frozen then: torch's functions want state for each that is trained now."""
    stored = App(flat=flat, steps=0)
    stored.model[0].weight.requires_grad_(False)
    stored.step()
    live = App(flat=flat)
    before = live.held()
    restoration = loaded_in_part(stored, live)
    assert restoration.missing == ("app.optim.state.0.weight",)
    found, was = live.held(), stored.held()
    assert found == {**was, "0.weight": {**before["0.weight"], "": was["0.weight"][""]}}


class Numbered(App):
    """Hands out the optimizer's own dict, in which parameters are numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])


def test_an_optimizer_by_numbers_is_loaded_where_the_numbers_are_the_same() -> None:
    stored, live = Numbered(steps=3), Numbered()
    save({"app": stored}).load({"app": live})
    assert live.held() == stored.held()
    begun = Numbered(steps=0)
    save({"app": begun}).load({"app": live})  # its parameters had no state yet
    assert live.held() == begun.held()
    longer = Numbered(layers=2)
    before = longer.held()
    restoration = loaded_in_part(stored, longer)
    assert restoration.mismatched == (
        "app.optim: the numbers of parameters in its param_groups differ: [3] stored and [5] now",
    )
    assert longer.held()["2.weight"] == before["2.weight"]


def test_an_optimizer_that_was_stored_in_another_form_is_named() -> None:
    stored, live = App(flat=True, steps=3), App()
    before = live.held()
    restoration = loaded_in_part(stored, live)
    assert restoration.mismatched == (
        "app.optim: it is an optimizer's state now, and the stored value does not have that form",
    )
    assert live.held()["0.weight"]["exp_avg"] == before["0.weight"]["exp_avg"]
    assert live.held()["0.weight"][""] == stored.held()["0.weight"][""]
