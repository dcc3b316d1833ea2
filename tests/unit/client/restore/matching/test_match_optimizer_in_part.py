"""MATCHOPT-1 to MATCHOPT-3 of match_optimizer.py and what load(strict=False) leaves: whole objects, each of
them named, and said in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from checkpointd.errors import MismatchError
from tests.unit.client.capture_and_fill import Saved, same, save

Wrap = Callable[[nn.Module], nn.Module]
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain(module: nn.Module) -> nn.Module:
    return module


def replicated(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=DeviceMesh("cpu", [0]))
    return module


def language_model(words: int) -> nn.Module:
    """The first parameter is as long as the vocabulary."""
    torch.manual_seed(words)
    return nn.Sequential(nn.Embedding(words, 4), nn.Linear(4, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([0, 1, 2])).sum().backward()
    optimizer.step()


def pair(words: int, make: Make, wrap: Wrap = plain, *, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(language_model(words))
    optimizer = make(model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> dict[str, Any]:
    """The state of the parameter number `at`, copied."""
    return {key: full(value).clone() for key, value in optimizer.state.get(list(model.parameters())[at], {}).items()}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.25)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


# --- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stepped", [0, 2], ids=["without state", "with state"])
@pytest.mark.parametrize("wrap", [plain, replicated, sharded])
def test_matchopt_1_another_vocabulary_leaves_the_state_of_that_parameter_whole_and_the_next_step_works(
    wrap: Wrap, stepped: int
) -> None:
    source = pair(10, adam, wrap, steps=3)
    saved = save({"m": source[0], "o": source[1]})
    model, optimizer = pair(12, adam, wrap, steps=stepped)
    before = state_of(model, optimizer, 0)
    restoration = saved.prepare({"m": model, "o": optimizer}, strict=False)
    assert [line.partition(":")[0] for line in restoration.mismatched] == ["m.0.weight", "o.state.m.0.weight"]
    assert "it is of a parameter of shape (10, 4), and the one here has (12, 4)" in restoration.mismatched[1]
    saved.fill(restoration)
    restoration.finish()
    assert same(state_of(model, optimizer, 0), before)
    assert same(state_of(model, optimizer, 1), state_of(*source, 1))
    assert float(state_of(model, optimizer, 1)["step"]) == 3
    step(model, optimizer)


@pytest.mark.parametrize("make", [adam, lambda p: torch.optim.Adafactor(p), lambda p: torch.optim.Adam(p, amsgrad=True)])
def test_matchopt_1_strict_names_the_state_that_does_not_fit_although_the_optimizer_has_none_yet(make: Make) -> None:
    source = pair(10, make, steps=1)
    model, optimizer = pair(12, make)
    with pytest.raises(MismatchError) as caught:
        save({"m": source[0], "o": source[1]}).load({"m": model, "o": optimizer})
    assert [line.partition(":")[0] for line in caught.value.mismatches] == ["m.0.weight", "o.state.m.0.weight"]
    assert not optimizer.state


@pytest.mark.parametrize("stepped", [0, 1])
def test_matchopt_1_the_same_where_no_module_tells_the_names(stepped: int) -> None:
    """Then nobody knows what shape the parameter had, but most states have the shape of their parameter."""
    source = pair(10, adam, steps=1)
    saved = save({"o": source[1]})
    model, optimizer = pair(12, adam, steps=stepped)
    before = state_of(model, optimizer, 0)
    with pytest.raises(MismatchError, match=r"o\.state\.0"):
        saved.load({"o": optimizer})
    saved.load({"o": optimizer}, strict=False)
    assert same(state_of(model, optimizer, 0), before)
    assert same(state_of(model, optimizer, 1), state_of(*source, 1))
    step(model, optimizer)


def test_factored_state_by_number_fits_although_it_never_has_the_shape_of_its_parameter() -> None:
    def factored(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters)

    source = pair(10, factored, steps=1)
    model, optimizer = pair(10, factored)
    save({"o": source[1]}).load({"o": optimizer})
    assert same(state_of(model, optimizer, 0), state_of(*source, 0))
    assert same(state_of(model, optimizer, 1), state_of(*source, 1))


def test_matchopt_1_one_tensor_that_does_not_fit_leaves_the_whole_state_of_its_parameter() -> None:
    source = pair(10, adam, steps=2)
    model, optimizer = pair(10, adam, steps=1)
    kept = optimizer.state[model[0].weight]  # type: ignore[index]  # a Sequential
    kept["exp_avg_sq"] = kept["exp_avg_sq"].double()
    before = state_of(model, optimizer, 0)
    saved = save({"m": source[0], "o": source[1]})
    restoration = saved.prepare({"m": model, "o": optimizer}, strict=False)
    [told] = restoration.mismatched
    assert told.startswith("o.state.m.0.weight.exp_avg_sq: dtype float32 is stored, and float64 is there now")
    assert told.endswith("(so all that is stored at o.state.m.0.weight is left out)")
    saved.fill(restoration)
    restoration.finish()
    assert same(state_of(model, optimizer, 0), before)
    assert same(state_of(model, optimizer, 1), state_of(*source, 1))


def test_matchopt_1_state_in_the_dtype_of_another_parameter_is_left_where_it_would_break_the_next_step() -> None:
    source = pair(10, adam, steps=1)
    saved = save({"m": source[0], "o": source[1]})
    model = language_model(10).double()
    optimizer = adam(model.parameters())
    saved.load({"m": model, "o": optimizer}, strict=False)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.25
    step(model, optimizer)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [plain, sharded])
@pytest.mark.parametrize("stepped", [0, 2])
def test_matchopt_2_an_optimizer_of_another_class_keeps_its_groups_and_its_state(wrap: Wrap, stepped: int) -> None:
    source = pair(10, adam, wrap, steps=1)
    model, optimizer = pair(10, momentum, wrap, steps=stepped)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    before = [state_of(model, optimizer, at) for at in range(3)]
    saved = save({"m": source[0], "o": source[1]})
    restoration = saved.prepare({"m": model, "o": optimizer}, strict=False)
    [told] = restoration.mismatched
    assert told.startswith("o.param_groups.0: it was saved from another kind of optimizer")
    saved.fill(restoration)
    restoration.finish()
    assert [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups] == groups
    assert same([state_of(model, optimizer, at) for at in range(3)], before)
    step(model, optimizer)


def test_matchopt_2_with_nothing_else_to_load_nothing_fits() -> None:
    saved = save({"o": pair(10, adam, steps=1)[1]})
    with pytest.raises(MismatchError, match="nothing of the checkpoint fits"):
        saved.load({"o": pair(10, momentum)[1]}, strict=False)


class Lion(torch.optim.Optimizer):
    """One moment, and hyperparameters that AdamW has, too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.25, "betas": (0.5, 0.75), "weight_decay": 0.0})

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # as little as the test needs
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("was", "now"),
    [(torch.optim.Adamax, adam), (adam, torch.optim.Adamax), (Lion, adam), (torch.optim.RAdam, torch.optim.NAdam)],
)
def test_matchopt_2_an_optimizer_that_needs_other_state_is_of_another_kind_whatever_its_hyperparameters_are(
    was: Make, now: Make, strict: bool
) -> None:
    source = pair(10, was, steps=1)
    model, optimizer = pair(10, now)
    saved = save({"m": source[0], "o": source[1]})
    if strict:
        with pytest.raises(MismatchError, match=r"another kind of optimizer: the state of its parameters has .* needs"):
            saved.load({"m": model, "o": optimizer})
    else:
        saved.load({"m": model, "o": optimizer}, strict=False)
        assert not optimizer.state
    step(model, optimizer)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (adam, lambda p: torch.optim.Adam(p, amsgrad=True)),
        (lambda p: torch.optim.AdamW(p, fused=True), adam),
        (torch.optim.RAdam, adam),
    ],
)
def test_an_optimizer_that_can_go_on_with_the_state_is_loaded(was: Make, now: Make) -> None:
    source = pair(10, was, steps=2)
    model, optimizer = pair(10, now)
    save({"m": source[0], "o": source[1]}).load({"m": model, "o": optimizer})
    assert same(state_of(model, optimizer, 0), state_of(*source, 0))
    step(model, optimizer)


@pytest.mark.parametrize("of_the_user", [True, False])
def test_keys_of_the_users_and_names_of_parameters_say_nothing_of_a_groups_kind(of_the_user: bool) -> None:
    model, optimizer = pair(10, adam, steps=1)
    if of_the_user:
        optimizer.param_groups[0]["name"] = "all"
    else:
        optimizer = torch.optim.AdamW(model.named_parameters())
        step(model, optimizer)
        del optimizer.param_groups[0]["decoupled_weight_decay"]  # as in an older torch
    saved = save({"m": model, "o": optimizer})
    other, target = pair(10, adam)
    target.param_groups[0]["lr_scale"] = 2
    saved.load({"m": other, "o": target})
    assert same(state_of(other, target, 0), state_of(model, optimizer, 0))


def test_matchopt_2_a_group_that_does_not_fit_leaves_the_state_of_its_parameters() -> None:
    def float_lr(dtype: torch.dtype, **more: Any) -> Make:
        return lambda p: torch.optim.Adam(p, lr=torch.tensor(0.25, dtype=dtype), foreach=False, **more)

    source = pair(10, float_lr(torch.float64), steps=3)
    model, optimizer = pair(10, float_lr(torch.float32, amsgrad=True), steps=1)
    before = state_of(model, optimizer, 0)
    restoration = save({"m": source[0], "o": source[1]}).prepare({"m": model, "o": optimizer}, strict=False)
    [told] = restoration.mismatched
    assert told.endswith("so all that is stored at o.param_groups.0 is left out), and so is the state of its parameters")
    restoration.finish()
    assert same(state_of(model, optimizer, 0), before)
    step(model, optimizer)


@pytest.mark.parametrize("strict", [True, False])
def test_the_state_of_one_parameter_never_goes_to_another_by_its_place(strict: bool) -> None:
    """Layers that are unfrozen one after the other: each stage has an optimizer of its own."""
    model, first = pair(10, lambda p: adam(list(p)[:1]), steps=3)
    saved = save({"m": model, "o": first})
    other, second = pair(10, lambda p: adam(list(p)[1:2]))
    if strict:
        with pytest.raises(MismatchError, match=r"o\.state\.m\.1\.weight: missing"):
            saved.load({"m": other, "o": second})
    else:
        restoration = saved.prepare({"m": other, "o": second}, strict=False)
        assert restoration.missing == ("o.state.m.1.weight", "o.param_groups.0")
        assert restoration.unexpected == ("o.state.m.0.weight",)
    assert not second.state


def test_a_group_that_was_split_keeps_what_its_parts_differ_in() -> None:
    model, optimizer = pair(10, adam, steps=1)
    optimizer.param_groups[0]["lr"] = 0.5
    saved = save({"m": model, "o": optimizer})
    parts = {"weight_decay": 0.0}, {"weight_decay": 0.25}
    other, target = pair(10, lambda p: adam([{"params": [one], **part} for one, part in zip(list(p)[:2], parts, strict=True)]))
    restoration = saved.prepare({"m": other, "o": target}, strict=False)
    words = "its parameters were in one group and are in several now, so each group keeps its own value"
    assert restoration.mismatched == tuple(f"o.param_groups.{i}.weight_decay: {words}" for i in (0, 1))
    saved.fill(restoration)
    restoration.finish()
    assert [(group["lr"], group["weight_decay"]) for group in target.param_groups] == [(0.5, 0.0), (0.5, 0.25)]


def test_a_learning_rate_in_a_tensor_fills_one_part_of_a_group_that_was_split() -> None:
    def split(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [one], "lr": torch.tensor(0.5)} for one in list(parameters)[:2]]
        return torch.optim.AdamW(groups, foreach=False)

    model = language_model(10)
    optimizer = torch.optim.AdamW(list(model.parameters())[:2], lr=torch.tensor(0.25), foreach=False)
    saved = save({"m": model, "o": optimizer})
    other, target = pair(10, split)
    restoration = saved.prepare({"m": other, "o": target}, strict=False)
    assert [line.partition(":")[0] for line in restoration.mismatched] == ["o.param_groups.1.lr"]
    saved.fill(restoration)
    restoration.finish()
    assert [float(group["lr"]) for group in target.param_groups] == [0.25, 0.5]


def test_matchopt_1_what_the_ranks_had_different_values_of_leaves_the_rest_of_that_state() -> None:
    """A moment that is each rank's own, and a count of steps that is not."""
    model, optimizer = pair(10, adam, steps=3)
    saved = save({"m": model, "o": optimizer})
    other, target = pair(10, adam, steps=1)
    before = state_of(other, target, 1)
    restoration = saved.prepare({"m": other, "o": target}, strict=False, left=["o.state.m.1.weight.exp_avg"])
    saved.fill(restoration)
    restoration.finish()
    assert same(state_of(other, target, 1), before)
    assert same(state_of(other, target, 0), state_of(model, optimizer, 0))


@pytest.mark.usefixtures("one_rank")
def test_matchopt_1_a_flat_parameter_keeps_its_state_where_a_part_of_it_was_not_stored() -> None:
    def flat(*, new: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = [nn.Embedding(10, 4), nn.Linear(4, 3), *([nn.Linear(3, 3)] if new else [])]
        options: Any = {"use_orig_params": False, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(nn.Sequential(*layers), sharding_strategy=ShardingStrategy.NO_SHARD, **options)
        return model, adam(model.parameters())

    source, target = flat(new=False), flat(new=True)
    for one in (source, source, target):
        step(*one)
    before = state_of(*target, 0)
    restoration = save({"m": source[0], "o": source[1]}).prepare({"m": target[0], "o": target[1]}, strict=False)
    assert "here it is part of a flat parameter, together with others of which nothing is stored" in restoration.mismatched[0]
    restoration.finish()
    assert same(state_of(*target, 0), before)


def test_an_empty_state_does_not_hide_that_what_is_stored_is_of_another_dtype() -> None:
    source = pair(10, adam, steps=1)
    model, optimizer = pair(10, adam)
    model.double()
    _ = optimizer.state[next(model.parameters())]
    restoration = save({"m": source[0], "o": source[1]}).prepare({"m": model, "o": optimizer}, strict=False)
    assert any(line.startswith("o.state.m.0.weight: it is of a parameter of dtype") for line in restoration.mismatched)


def test_hyperparameters_that_were_not_stored_keep_their_values() -> None:
    """A class with fewer keys looks like an older version of torch: what it did not have must not be gone."""

    class Few(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.125})

    model, optimizer = pair(10, momentum)
    saved = save({"m": model, "o": Few(model.parameters())})
    saved.load({"m": model, "o": optimizer})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.125, 0.5)
    step(model, optimizer)


def test_matchopt_3_the_state_of_a_parameter_that_was_not_stored_stays() -> None:
    model, optimizer = pair(10, lambda p: adam(list(p)[1:]), steps=1)
    other, target = pair(10, adam, steps=2)
    before = state_of(other, target, 0)
    saved = save({"m": model, "o": optimizer})
    restoration = saved.prepare({"m": other, "o": target}, strict=False)
    assert restoration.missing == ("o.state.m.0.weight",)
    saved.fill(restoration)
    restoration.finish()
    assert same(state_of(other, target, 0), before)
    assert same(state_of(other, target, 1), state_of(model, optimizer, 1))


# --- tied now ----------------------------------------------------------------------------------------------------------


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(words))
        return logits


def tied_model(*, tied: bool, equal: bool = True) -> Any:
    torch.manual_seed(4)
    model: Any = TiedModel()
    if equal:
        model.head.weight.data.copy_(model.embedding.weight.data)
    if tied:
        model.head.weight = model.embedding.weight
        model.embedding.weight.data.zero_()
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrap", [plain, sharded])
def test_binding_3_weights_stored_apart_with_equal_values_fill_tied_ones(wrap: Wrap, strict: bool) -> None:
    source, target = wrap(tied_model(tied=False)), wrap(tied_model(tied=True))
    saved = save({"m": source})
    restoration = saved.prepare({"m": target}, strict=strict)
    assert (restoration.mismatched, len(restoration.targets)) == ((), 1)
    saved.fill(restoration)
    restoration.finish()
    found, expected = target.head.weight, source.head.weight
    assert found is target.embedding.weight
    assert same(full(found).detach(), full(expected).detach())


def test_binding_3_a_part_of_one_of_them_is_filled_with_it() -> None:
    """Three names of one memory, one of them for a row of it."""
    flat = torch.arange(6.0)
    saved = save({"a": flat.clone(), "b": (apart := flat.clone()), "row": apart[2:4]})
    memory = torch.zeros(6)
    target: dict[str, Any] = {"a": memory, "b": memory, "row": memory[2:4]}
    saved.load(target)
    assert memory.tolist() == flat.tolist()


@pytest.mark.parametrize("strict", [True, False])
def test_of_two_states_for_one_parameter_that_is_tied_now_the_first_counts_and_the_other_is_named(strict: bool) -> None:
    source, target = tied_model(tied=False), tied_model(tied=True)
    optimizers = [adam(model.parameters()) for model in (source, target)]
    for number, parameter in enumerate(source.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizers[0].step()
    source.head.weight.data.copy_(source.embedding.weight.data)
    saved = save({"m": source, "o": optimizers[0]})
    target_state = {"m": target, "o": optimizers[1]}
    if strict:
        with pytest.raises(MismatchError, match=r"o\.state\.m\.head\.weight: in the checkpoint, and nowhere in the objects"):
            saved.load(target_state)
        return
    saved.load(target_state, strict=False)
    assert same(optimizers[1].state[target.head.weight]["exp_avg"], optimizers[0].state[source.embedding.weight]["exp_avg"])


# --- said aloud --------------------------------------------------------------------------------------------------------


def warning_of(saved: Saved, state: dict[str, Any]) -> str:
    return saved.prepare(state, strict=False).left_out("global_step5")


def test_a_load_in_part_has_one_warning_with_the_counts_and_the_first_ten_names() -> None:
    saved = save({"same": torch.ones(1), "other": torch.ones(2), **{f"gone{n}": torch.ones(1) for n in range(20)}})
    words = warning_of(saved, {"same": torch.zeros(1), "other": torch.zeros(3), "new": torch.zeros(1)})
    assert "global_step5 was loaded in part" in words
    assert "1 missing, 20 unexpected and 1 mismatched" in words
    lines = words.splitlines()[1:]
    assert len(lines) == 10
    assert lines[0].strip().startswith("new: missing from the checkpoint, which has same, other, gone0")
    assert lines[1].strip() == "gone0: in the checkpoint, and nowhere in the objects"
    assert "The first 10 of them" in words
    assert warning_of(save({"same": torch.ones(1)}), {"same": torch.zeros(1)}) == ""


@pytest.mark.parametrize("strict", [True, False])
def test_a_part_of_another_name_names_what_the_checkpoint_has(strict: bool) -> None:
    saved = save({"model": nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match=r"net: missing from the checkpoint, which has model\n") as caught:
        saved.load({"net": nn.Linear(2, 2)}, strict=strict)
    assert caught.value.mismatches[0] == "net: missing from the checkpoint, which has model"
