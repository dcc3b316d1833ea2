"""R1 to R3 of restore.py: captured, written, and loaded into other objects, everything is what it was, to the bit."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from checkpointd.errors import FormatError, MismatchError, StateError
from checkpointd.layout import manifest, tree
from checkpointd_client.dtypes import DTYPES
from checkpointd_client.restore import prepare
from tests.unit.client.restoring import Saved, bytes_of, same, save


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Conv2d(1, 2, 3))
        conv: Any = self.layers[2]
        conv.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(()))
        self.seen: torch.Tensor = nn.Buffer(torch.zeros(3, dtype=torch.int64))
        self.note: Any = {"calls": 0, "history": [torch.zeros(2)]}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def test_a_module_is_filled_in_place_with_its_buffers_and_extra_state() -> None:
    source, target = Model(), Model()
    source.note = {"calls": 7, "history": [torch.ones(2), torch.full((3,), 2.0)]}
    source.seen.fill_(5)
    held: Any = dict(target.named_parameters()), target.seen
    save({"model": source}).load({"model": target})
    assert same(list(target.state_dict().items()), list(source.state_dict().items()))
    assert all(parameter is held[0][name] for name, parameter in target.named_parameters())
    assert target.seen is held[1]
    assert target.layers[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_load_hooks_of_a_module_run() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    ran: list[str] = []
    target.register_load_state_dict_pre_hook(lambda *_: ran.append("before"))
    target.register_load_state_dict_post_hook(lambda *_: ran.append("after"))
    save({"m": source}).load({"m": target})
    assert ran == ["before", "after"]


def test_parts_of_a_module_are_told_their_version_and_nothing_that_is_not_stored() -> None:
    class Versioned(nn.Linear):
        _version = 7
        told: Any = None
        extra: Any = "not loaded"

        def get_extra_state(self) -> Any:
            return {"loaded": True}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

        def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            self.told = local_metadata.get("version")
            super()._load_from_state_dict(state, prefix, local_metadata, *rest)

    target = nn.Sequential(Versioned(2, 2))
    save({"m": nn.Sequential(nn.Linear(2, 2))}).load({"m": target}, strict=False)
    assert isinstance(target[0], Versioned)
    assert (target[0].told, target[0].extra) == (7, "not loaded")
    save({"m": nn.Sequential(Versioned(2, 2))}).load({"m": target})
    assert target[0].extra == {"loaded": True}


def test_a_module_whose_state_dict_hands_out_copies_is_loaded_all_the_same() -> None:
    class Copies(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {key: value.detach().clone() for key, value in super().state_dict(*args, **kwargs).items()}

        def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]  # without strict, as users write it
            return super().load_state_dict(state)

    source, target = Copies(2, 2), Copies(2, 2)
    save({"m": source}).load({"m": target})
    assert same(target.state_dict(), source.state_dict())


def test_wrapped_and_bare_modules_load_each_others_checkpoints() -> None:
    class Holder(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.block = block

    source = Holder(nn.Linear(2, 2))
    saved = save({"m": source})
    for wrap in (nn.DataParallel, torch.compile, lambda module: Holder(torch.compile(module.block))):
        inner = Holder(nn.Linear(2, 2))
        saved.load({"m": wrap(inner)})
        assert same(inner.block.weight, source.block.weight)
        assert save({"m": wrap(inner)}).data == saved.data


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
    lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
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


def test_grad_scaler_and_generator() -> None:
    scaler, other = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    generator, target = torch.Generator().manual_seed(5), torch.Generator()
    torch.rand(7, generator=generator)
    off = torch.amp.GradScaler("cpu", enabled=False)
    save({"s": scaler, "off": off, "deep": {"g": generator}}).load({"s": other, "off": off, "deep": {"g": target}})
    assert other.state_dict() == scaler.state_dict()
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=target))


def test_objects_are_told_to_load_and_not_asked_for_their_state() -> None:
    class Loader:
        def __init__(self, position: int) -> None:
            self.position = position

        def state_dict(self) -> dict[str, Any]:
            assert self.position >= 0, "asked for its state while loading"
            return {"position": self.position, "buffer": [torch.arange(self.position)]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    target = Loader(-1)
    save({"loader": Loader(3)}).load({"loader": target})
    assert same(target.state, {"position": 3, "buffer": [torch.arange(3)]})


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_comes_back_to_the_bit(name: str) -> None:
    """Every byte value, so every class of bit pattern: NaN payloads, -0.0, denormals, bools that are neither 0 nor 1."""
    dtype = DTYPES[name]

    def tensors(raw: torch.Tensor) -> dict[str, Any]:
        whole = raw.clone().view(dtype)
        return {"flat": whole, "scalar": raw[:16].clone().view(dtype)[0], "strided": raw.clone().view(dtype).view(-1, 2).t()}

    raw = torch.arange(256, dtype=torch.uint8).repeat_interleave(3).flip(0)[:512].contiguous()
    saved = save(tensors(raw))
    target = tensors(torch.zeros(512, dtype=torch.uint8))
    held = target["strided"].data_ptr()
    saved.load(target)
    assert save(target).data == saved.data
    assert target["strided"].data_ptr() == held
    anew: dict[str, Any] = dict.fromkeys(target)
    saved.load(anew)
    assert all(value.dtype == dtype and bytes_of(value) == saved.data[fqn] for fqn, value in anew.items())


def test_plain_containers_are_changed_in_place() -> None:
    source: dict[str, Any] = {
        "deep": {"list": [torch.ones(2), 5, {"k": np.arange(3)}], "scalar": 1.5, "none": None},
        "data": [0.1, 0.2, 0.3],
        "tuple": (torch.full((2,), 3.0), "b", [torch.full((1,), 4.0)]),
        "set": {1, 2},
        "counter": collections.Counter("aab"),
        "step": 7,
    }
    target: dict[str, Any] = {
        "deep": {"list": [torch.zeros(2), 0, {"k": np.zeros(3, dtype=np.int64)}], "scalar": 0.0, "none": 3},
        "data": [9.0],
        "tuple": (torch.zeros(2), "a", [torch.zeros(1)]),
        "set": {9},
        "counter": collections.Counter("z"),
        "step": 0,
    }
    held = [target["deep"], target["deep"]["list"], target["deep"]["list"][0], target["deep"]["list"][2]["k"], target["data"]]
    held += [target["tuple"][0], target["tuple"][2], target["tuple"][2][0], target["set"], target["counter"]]
    save(source).load(target)
    assert same(target, source)
    after = [target["deep"], target["deep"]["list"], target["deep"]["list"][0], target["deep"]["list"][2]["k"], target["data"]]
    after += [target["tuple"][0], target["tuple"][2], target["tuple"][2][0], target["set"], target["counter"]]
    assert all(one is two for one, two in zip(held, after, strict=True))


def test_empty_and_none_templates_take_whatever_is_stored() -> None:
    source: dict[str, Any] = {"d": {"a": [torch.ones(2, requires_grad=True)]}, "l": [1, (2, torch.zeros(1))], "n": {"x": {3}}}
    target: dict[str, Any] = {"d": {}, "l": [], "n": None}
    held = target["d"], target["l"]
    save(source).load(target)
    assert same(target, source)
    assert (target["d"], target["l"]) == held
    assert target["d"] is held[0]
    assert target["d"]["a"][0].is_leaf
    everything: dict[str, Any] = {}
    save(source).load(everything)
    assert same(everything, source)


def test_values_of_every_kind() -> None:
    nan = np.frombuffer(b"\x01\x02\x03\x04\x05\x06\xf8\xff", "<f8")[0].item()
    values: list[Any] = [
        *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**5000, -(16**300)),
        *(0.0, -0.0, float("inf"), -float("inf"), nan, 5e-324, 1.0),
        *(complex(-0.0, nan), 1j, "", "ünï\0code", "a" * 70_000, b"", bytes(range(256)), torch.float8_e4m3fn, torch.qint8),
        *(torch.device("cuda:3"), torch.device("cpu"), torch.Size([2, 0]), (), [], {}, set(), frozenset({1, (2, "x")})),
        *(np.float32(-0.0), np.int8(-3), np.bool_(True), np.complex64(1j), np.datetime64("2020-01-01T00", "h")),
        *(np.timedelta64(5, "s"), np.longdouble(1) / 3, np.float64(nan), np.uint64(2**64 - 1)),
        collections.OrderedDict([("b", 1), ("a", {None: 1, True: 2, 2: 3, 1.5: 4, (1, ("x", None)): 5, 10**5000: 6})]),
        collections.Counter({"a": -2, "b": 0}),
    ]
    target: dict[str, Any] = {"v": None}
    client = save({"v": values}, {"v": values}).load(target)
    assert same(target["v"], values)
    assert same(client, {"v": values})


def test_a_defaultdict_loads_as_a_dict_and_into_a_defaultdict() -> None:
    source = collections.defaultdict(list, {"a": [1]})
    target: dict[str, Any] = {"new": None, "there": collections.defaultdict(list, {"a": [0]})}
    save({"new": source, "there": source}).load(target)
    assert type(target["new"]) is dict
    assert same(target["there"], source)


ARRAYS: list[Any] = [
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.array(3.5),
    np.zeros((0, 4), dtype=np.float16),
    np.array([1.5, -0.0, np.nan], dtype=">f8"),
    np.array(["a", "ünï"]),
    np.array([b"ab", b"c\0d"]),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([1, 2], dtype=np.longdouble) / 3,
    np.array([True, False]),
    np.array([1j, 2], dtype=np.complex64),
]


@pytest.mark.parametrize("array", ARRAYS, ids=[array.dtype.str + str(array.shape) for array in ARRAYS])
def test_arrays_of_every_kind(array: Any) -> None:
    views = {"whole": array, "reversed": array[::-1] if array.ndim else array, "fortran": array.copy(order="F")}
    saved = save(views)
    anew: dict[str, Any] = dict.fromkeys(views)
    saved.load(anew)
    assert all(same(anew[name], np.ascontiguousarray(view).reshape(view.shape)) for name, view in views.items())
    there = {name: np.zeros_like(array) for name in views}
    held = dict(there)
    saved.load(there)
    assert all(same(there[name], np.ascontiguousarray(view).reshape(view.shape)) for name, view in views.items())
    assert all(there[name] is held[name] for name in views)


def test_an_array_that_cannot_be_filled_is_replaced() -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    backwards = np.zeros(3)[::-1]
    target: dict[str, Any] = {"fixed": fixed, "backwards": backwards}
    save({"fixed": np.arange(3.0), "backwards": np.arange(3.0)}).load(target)
    assert same(target, {"fixed": np.arange(3.0), "backwards": np.arange(3.0)})
    assert not fixed.any()


def test_client_state_comes_back() -> None:
    client = {"epoch": 3, "t": torch.arange(3), "a": np.ones(2), "deep": [{"x": (1, None)}]}
    assert same(save({}, client).load({}), client)
    assert save({"x": 1}).load({"x": 0}) == {}


def test_frozen_parameters_left_out_are_not_missed() -> None:
    def model() -> Any:
        made: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        made[0].requires_grad_(False)
        return made

    source, target = model(), model()
    frozen = bytes_of(target[0].weight)
    saved = save({"m": source}, exclude_frozen=True)
    saved.load({"m": target})
    assert same(target[1].weight, source[1].weight)
    assert bytes_of(target[0].weight) == frozen


# --- what does not fit -------------------------------------------------------------------------------------------------


def mismatching() -> tuple[Saved, dict[str, Any]]:
    saved = save(
        {
            "model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(1, 1)),
            "dtype": torch.ones(2),
            "kind": [1],
            "gone": 3,
            "list": [torch.ones(1), torch.ones(1)],
            "tensor": torch.ones(1),
            "fits": torch.ones(2),
        }
    )
    target: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.ReLU(), nn.Linear(1, 1)),
        "dtype": torch.zeros(2, dtype=torch.float64),
        "kind": {"a": 1},
        "new": 5,
        "list": [torch.zeros(1)],
        "tensor": 4,
        "fits": torch.zeros(2),
    }
    return saved, target


def test_every_mismatch_is_listed_and_nothing_is_touched() -> None:
    saved, target = mismatching()
    before = save(target).data
    with pytest.raises(MismatchError) as raised:
        saved.prepare(target)
    told = "\n".join(raised.value.mismatches)
    assert len(raised.value.mismatches) == 12
    for words in (
        "model.3.weight: missing",
        "model.3.bias: missing",
        "new: missing",
        "model.2.weight: in the checkpoint",
        "model.2.bias: in the checkpoint",
        "gone: in the checkpoint",
        "list.1: in the checkpoint",
        "model.1.weight: shape (3, 3) is stored, and (2, 3) is there now",
        "model.1.bias: shape (3,) is stored, and (2,) is there now",
        "dtype: dtype float32 is stored, and float64 is there now",
        "kind: a list is stored, and dict is there now",
        "tensor: a tensor is stored, and int is there now",
    ):
        assert words in told
    assert "nothing was loaded" in str(raised.value)
    assert save(target).data == before


def test_without_strict_what_fits_is_loaded_and_the_rest_named() -> None:
    saved, target = mismatching()
    untouched = bytes_of(target["model"][1].weight)
    restoration = saved.prepare(target, strict=False)
    assert restoration.missing == ("model.3.weight", "model.3.bias", "new")
    assert restoration.unexpected == ("model.2.weight", "model.2.bias", "list.1", "gone")
    assert len(restoration.mismatched) == 5
    saved.fill(restoration)
    restoration.finish()
    assert {t.fqn for t in restoration.targets} == {"model.0.weight", "model.0.bias", "list.0", "fits"}
    assert target["fits"].tolist() == [1, 1]
    assert target["new"] == 5
    assert target["tensor"] == 4
    assert bytes_of(target["model"][1].weight) == untouched


def test_prepare_allocates_nothing_that_the_objects_have() -> None:
    model = nn.Linear(2, 2)
    saved = save({"m": model, "t": torch.ones(3)})
    other = nn.Linear(2, 2)
    tensor = torch.zeros(3)
    targets = {t.fqn: t.tensor.data_ptr() for t in saved.prepare({"m": other, "t": tensor}).targets}
    assert targets == {"m.weight": other.weight.data_ptr(), "m.bias": other.bias.data_ptr(), "t": tensor.data_ptr()}


def test_prepare_changes_nothing_until_it_is_finished() -> None:
    target: dict[str, Any] = {"d": {"a": 1}, "l": [1], "t": (1, [2]), "m": Model(), "o": None}
    before = copy.deepcopy({key: value for key, value in target.items() if key != "m"})
    weights = bytes_of(target["m"].layers[0].weight)
    save({"d": {"a": 2}, "l": [3, 4], "t": (5, [6]), "m": Model(), "o": torch.ones(1)}).prepare(target)
    assert same({key: value for key, value in target.items() if key != "m"}, before)
    assert bytes_of(target["m"].layers[0].weight) == weights


@pytest.mark.parametrize(
    ("stored", "live", "words"),
    [
        (torch.ones(2), torch.empty(2, device="meta"), "meta tensor"),
        (torch.ones(2), np.zeros(2), "a tensor is stored, and numpy.ndarray"),
        (np.ones(2), torch.zeros(2), "a numpy array is stored"),
        (np.ones(2), np.ones(2, dtype=">f8"), "dtype <f8 is stored, and >f8"),
        ({"a": 1}, torch.zeros(2), "a dict is stored"),
        ((1, 2), [1], "a tuple is stored"),
        ({1}, [1], "a set is stored"),
        (None, torch.ones(1), "the value None is stored"),
        (torch.ones(3), torch.Generator(), r"dtype float32 is stored, and uint8"),
        ([1], nn.Linear(1, 1), "a list is stored"),
        ({"a": 1}, torch.optim.SGD([torch.ones(1)]), "a dict is stored"),
        (1, lambda: 1, "function is there now"),
    ],
)
def test_values_of_another_kind_are_mismatches(stored: Any, live: Any, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        save({"x": stored}).prepare({"x": live})


def test_a_lazy_module_must_have_been_run() -> None:
    with pytest.raises(MismatchError, match="run one forward pass"):
        save({"m": nn.Linear(2, 2)}).prepare({"m": nn.LazyLinear(2)})


def test_an_object_that_fails_to_load_is_named() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("position")

    with pytest.raises(
        StateError, match=r"^deep\.loader: load_state_dict\(\) of .*Broken failed.*in part: KeyError: 'position'"
    ):
        save({"deep": {"loader": Broken()}}).load({"deep": {"loader": Broken()}})


# --- trees that no capture made ----------------------------------------------------------------------------------------


def stored(value: tree.Node) -> tree.Node:
    return tree.Dict("dict", (("state", tree.Dict("dict", (("x", value),))), ("client_state", None)))


@pytest.mark.parametrize(
    "root",
    [
        None,
        tree.Dict("dict", ()),
        tree.Dict("dict", (("state", 1), ("client_state", None))),
        tree.Dict("dict", (("state", tree.Dict("dict", ())), ("client_state", 1))),
        stored(tree.Tensor("elsewhere")),
        stored(tree.Sequence("list", (tree.Tensor("x"), tree.Tensor("x")))),
        stored(tree.Array("x", "O")),
        stored(tree.Array("x", "<f8")),
        stored(tree.Array("x", "no such dtype")),
        stored(tree.Sequence("set", (tree.Dict("dict", ()),))),
        stored(tree.Sequence("Size", ("a",))),
        stored(tree.Dict("dict", ((tree.Tensor("x"), 1),))),
        stored(tree.TorchName("dtype", "os")),
        stored(tree.TorchName("device", "nowhere")),
        stored(tree.NumpyScalar("O", b"12345678")),
        stored(tree.NumpyScalar("<f8", b"1")),
        stored(tree.BigInt("xyz")),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(root: tree.Node) -> None:
    target: dict[str, Any] = {"x": None}
    with pytest.raises(FormatError):
        prepare(target, root, {"x": ("float32", (2,))}, (), (), strict=True)
    assert target == {"x": None}


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((2,), (1,), 1),
        ((2,), (2,), 0),
        ((2,), (-1,), 1),
        ((2,), (1,), -1),
        ((-2,), (1,), 0),
        ((2,), (), 0),
        ((2, 2), (1, 1), 0),
    ],
)
def test_an_alias_outside_its_owner_is_refused(shape: Any, stride: Any, offset: int) -> None:
    alias = manifest.Alias("x", "owner", shape, stride, offset)
    with pytest.raises(FormatError, match="shares memory outside owner"):
        prepare({"x": None}, stored(tree.Tensor("x")), {"owner": ("float32", (2,))}, (alias,), (), strict=True)


@pytest.mark.parametrize("dtype", ["float7", "qint8", "os"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(FormatError, match=dtype):
        prepare({"x": None}, stored(tree.Tensor("x")), {"x": (dtype, (2,))}, (), (), strict=True)


@pytest.mark.parametrize("device", ["cuda", "nn", "meta", "privateuseone"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the tensor goes back to the device")
def test_what_was_on_a_device_that_is_not_here_comes_to_the_host(device: str) -> None:
    target: dict[str, Any] = {"x": None}
    prepare(target, stored(tree.Tensor("x", device=device)), {"x": ("int64", (2,))}, (), (), strict=True).finish()
    assert target["x"].device.type == "cpu"


def test_a_tensor_larger_than_any_memory_is_refused() -> None:
    with pytest.raises(StateError, match="x: there is no memory on cpu"):
        prepare({"x": None}, stored(tree.Tensor("x")), {"x": ("int64", (2**62,))}, (), (), strict=True)


def test_a_tree_deeper_than_pythons_stack_is_refused() -> None:
    node: tree.Node = None
    for _ in range(2000):
        node = tree.Sequence("list", (node,))
    with pytest.raises(FormatError, match="nested too deeply"):
        prepare({"x": None}, stored(node), {}, (), (), strict=True)


def test_gradients_are_not_asked_of_what_cannot_have_them() -> None:
    target: dict[str, Any] = {"x": None}
    prepare(target, stored(tree.Tensor("x", True)), {"x": ("int64", (2,))}, (), (), strict=True).finish()
    assert not target["x"].requires_grad
