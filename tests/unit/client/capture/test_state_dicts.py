"""State that would silently not come back: dicts in place of the objects they came from, and loads that fit nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from checkpointd.errors import MismatchError, StateError
from checkpointd_client import Checkpointer
from checkpointd_client.capture.state_dicts import HandedOut, refused
from checkpointd_client.integrations.deepspeed import load_checkpoint
from tests.unit.client.capture_and_fill import same, save


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


class Loader:
    """Hands out what torchdata's StatefulDataLoader does."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


ONE_PROCESS = {"_sampler_iter_state": None, "_sampler_iter_yielded": 3, "_num_yielded": 3, "_iterator_finished": False}
WORKERS = {"_snapshot": {"_snapshot_step": 3}, "_steps_since_snapshot": 0, "_iterator_finished": False}

MADE: list[tuple[str, Callable[[torch.optim.Optimizer], Any]]] = [
    ("optimizer", lambda o: o),
    ("optimizer", lambda o: torch.optim.SGD(o.param_groups[0]["params"], 0.1)),
    ("scheduler", lambda o: lr_scheduler.StepLR(o, 2)),
    ("scheduler", lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0)),
    ("scheduler", lambda o: lr_scheduler.ReduceLROnPlateau(o)),
    ("scheduler", lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3])),
    ("scheduler", lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2)])),
    ("scheduler", lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5)),
    ("scheduler", lambda o: SWALR(o, 0.1)),
    ("scaler", lambda _: torch.amp.GradScaler("cpu")),
    ("loader", lambda _: Loader(ONE_PROCESS)),
    ("loader", lambda _: Loader(WORKERS)),
]


@pytest.mark.parametrize(("kind", "make"), MADE)
def test_the_state_dict_of_an_object_is_refused_by_name_with_the_remedy(
    kind: str, make: Callable[[torch.optim.Optimizer], Any]
) -> None:
    made = make(objects()[1])
    remedy = re.escape(f"Pass the {kind} itself: {{'mine': {kind}}}")
    for wrapped in ({"mine": made.state_dict()}, {"deep": [0, {"mine": made.state_dict()}]}):
        where = "mine" if "mine" in wrapped else "deep.1.mine"
        with pytest.raises(StateError, match=rf"^{re.escape(where)} is the state_dict\(\) of .*{remedy}"):
            save(wrapped)
        with pytest.raises(StateError, match=remedy):
            save({"mine": 1, "deep": [0, {"mine": 1}]}).load(wrapped)


def test_the_state_of_an_optimizer_as_the_whole_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"^the state is the state_dict\(\) of an optimizer.*\{'optimizer': optimizer\}"):
        save(objects()[1].state_dict())


def test_flattened_optimizer_state_is_refused() -> None:
    flattened = {"state.weight.exp_avg": torch.ones(2), "param_groups.weight.lr": 0.1}
    with pytest.raises(StateError, match=r"^optimizer is the state_dict\(\) of an optimizer"):
        save({"optimizer": flattened})


def test_a_job_that_passes_dicts_hears_of_it_at_its_first_load(tmp_path: Path) -> None:
    """Where there is no checkpoint yet: not after hours, at the first save."""
    model, optimizer = objects()
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(StateError, match="optimizer is the state_dict"):
            ckpt.load({"model": model, "optimizer": optimizer.state_dict()})
        assert ckpt.load({"model": model, "optimizer": optimizer}) is None


def test_nothing_is_touched_where_a_dict_is_refused(tmp_path: Path) -> None:
    model, optimizer = objects()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}).wait()
        other, other_optimizer = objects()
        before = copy.deepcopy(other.state_dict())
        for strict in (True, False):
            with pytest.raises(StateError, match="optimizer is the state_dict"):
                ckpt.load({"model": other, "optimizer": other_optimizer.state_dict()}, strict=strict)
        schedule = lr_scheduler.StepLR(other_optimizer, 2)
        some = {"model": other, "optimizer": other_optimizer.state_dict(), "scheduler": schedule}
        with pytest.raises(StateError, match="optimizer is the state_dict"):
            load_checkpoint(ckpt, tmp_path, load_lr_scheduler_states=False, **some)
        assert same(other.state_dict(), before)


# --- modules: what works, and what does not ---


@pytest.mark.parametrize("keep_vars", [False, True])
def test_the_state_dict_of_a_module_is_the_module_and_comes_back(tmp_path: Path, keep_vars: bool) -> None:
    model, optimizer = objects()
    wanted = copy.deepcopy(model.state_dict())
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model.state_dict(keep_vars=keep_vars), "optimizer": optimizer}).wait()
        other, other_optimizer = objects()
        with torch.no_grad():
            for value in other.state_dict().values():
                value.zero_()
        assert ckpt.load({"model": other.state_dict(keep_vars=keep_vars), "optimizer": other_optimizer})
    assert same(dict(other.state_dict()), dict(wanted))


def test_a_copy_of_a_modules_state_dict_is_refused() -> None:
    """As FullyShardedDataParallel makes one of all ranks' shards: a load would fill the copy alone."""
    model, _ = objects()
    model.head = nn.Linear(2, 2, bias=False)
    model.tied = model.head
    copied = copy.deepcopy(model.state_dict())
    words = r"^model is a copy of a module's state_dict\(\): no other object uses the memory of '0\.weight'"
    with pytest.raises(StateError, match=words):
        save({"model": copied})
    with pytest.raises(StateError, match=words):
        save({"model": model}).load({"model": copied})
    tied = nn.Sequential(nn.Linear(2, 2, bias=False))
    tied.append(tied[0])
    with pytest.raises(StateError, match="copy"):
        save({"model": copy.deepcopy(tied.state_dict())})


def test_a_copy_that_the_user_keeps_is_saved_and_filled_as_a_plain_dict() -> None:
    model, _ = objects()
    best = copy.deepcopy(model.state_dict())
    saved = save({"best": dict(best)})
    kept = copy.deepcopy(best)
    for value in kept.values():
        value.zero_()
    saved.load({"best": dict(kept)})
    assert same(dict(kept), dict(best))


# --- what is not to be mistaken for one ---


@pytest.mark.parametrize(
    "plain",
    [
        {"step": 3},
        {"state": {"a": 1}, "epoch": 2},
        {"state": {}, "param_groups": []},
        {"param_groups": [{"lr": 0.1}], "state": {}},
        {"last_epoch": 3},
        {"scale": 2.0, "growth_factor": 1.0},
        {"last_batch_iteration": 3, "other": 1},
        {"_snapshot": 1},
        {1: "one", (2, 3): None},
    ],
)
def test_plain_dicts_of_values_come_back_in_the_dict_that_was_passed(plain: dict[Any, Any]) -> None:
    held = dict.fromkeys(plain)
    save({"plain": plain}).load({"plain": held})
    assert held == plain


def test_an_object_may_hand_out_the_state_of_what_is_in_it() -> None:
    class Trainer:
        def __init__(self) -> None:
            _, self.optimizer = objects()

        def state_dict(self) -> dict[str, Any]:
            return {"optimizer": self.optimizer.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state["optimizer"])

    source, target = Trainer(), Trainer()
    source.optimizer.param_groups[0]["lr"] = 0.125
    save({"trainer": source}).load({"trainer": target})
    assert target.optimizer.param_groups[0]["lr"] == 0.125


def test_client_state_may_hold_any_dict_since_it_is_given_back() -> None:
    _, optimizer = objects()
    assert same(save({"a": 1}, {"o": optimizer.state_dict()}).load({"a": 0})["o"], optimizer.state_dict())


def test_what_an_integration_hands_out_is_stored_as_what_it_is() -> None:
    _, optimizer = objects()
    assert save({"o": HandedOut(optimizer.state_dict())}).entries == save({"o": optimizer}).entries


def test_containers_that_hold_themselves_are_looked_at_once() -> None:
    ring: list[Any] = []
    ring += [ring, ring, {"ring": ring}]
    assert refused({"ring": ring}) is None


# --- loads of which nothing fits ---


@pytest.mark.parametrize(
    "target",
    [
        lambda: {"net": nn.Linear(2, 2)},
        lambda: {"model": nn.Linear(9, 9)},
        lambda: {"model": nn.Sequential(nn.Linear(3, 2))},
        lambda: {"state": {"model": nn.Linear(3, 2)}},
        lambda: {"weight": torch.zeros(2, 3)},
        lambda: {"epoch": 3, "deep": {"x": []}},
    ],
)
def test_a_load_of_which_nothing_fits_is_an_error_that_says_what_is_there(target: Callable[[], dict[str, Any]]) -> None:
    saved = save({"model": nn.Linear(3, 2), "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)})
    with pytest.raises(MismatchError, match=r"nothing of the checkpoint fits.*it holds model, optimizer,") as caught:
        saved.load(target(), strict=False)
    assert caught.value.mismatches


def test_a_load_of_which_something_fits_loads_it() -> None:
    model = nn.Linear(3, 2)
    saved = save({"model": model, "epoch": 7})
    epoch = {"epoch": 0, "new": 1}
    saved.load(epoch, strict=False)
    assert epoch == {"epoch": 7, "new": 1}
    for_bias = nn.Linear(5, 2)
    saved.load({"model": for_bias}, strict=False)
    assert same(for_bias.bias, model.bias)


def test_what_holds_nothing_fits_nothing_and_is_no_error() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    saved = save({"model": model}, {"epoch": 3}, exclude_frozen=True)
    assert saved.load({"model": nn.Linear(3, 2).requires_grad_(False)}, strict=False) == {"epoch": 3}


# --- param groups that are new ---


@pytest.mark.parametrize("at", [0, 1])
def test_a_param_group_that_was_not_stored_is_named_and_keeps_its_values(at: int) -> None:
    def pair(rates: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
        model = nn.ModuleDict({"old": parts[0], "new": parts[1]} if len(rates) == 2 else {"old": parts[0]})
        groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(parts, rates, strict=False)]
        return model, torch.optim.AdamW(groups[::-1] if at == 0 else groups)

    model, optimizer = pair([0.25])
    saved = save({"model": model, "optimizer": optimizer})
    other, target = pair([0.1, 0.7])
    named = [f"optimizer.param_groups.{at}", "optimizer.state.model.new.weight", "model.new.weight"]
    with pytest.raises(MismatchError) as caught:
        saved.load({"model": other, "optimizer": target})
    assert {f"{name}: missing from the checkpoint" for name in named} <= set(caught.value.mismatches)
    restoration = saved.prepare({"model": other, "optimizer": target}, strict=False)
    assert set(named) <= set(restoration.missing)
    saved.fill(restoration)
    restoration.finish()
    rates = [group["lr"] for group in target.param_groups]
    assert rates == ([0.7, 0.25] if at == 0 else [0.25, 0.7])


def test_groups_without_parameters_go_by_their_position() -> None:
    def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        made = torch.optim.SGD([{"params": list(model.parameters())}], 0.1)
        made.param_groups.append({**made.param_groups[0], "params": [], "lr": rate})
        return made

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    target = optimizer(other, 0.5)
    save({"model": model, "optimizer": optimizer(model, 0.25)}).load({"model": other, "optimizer": target})
    assert target.param_groups[1]["lr"] == 0.25
