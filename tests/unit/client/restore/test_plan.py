"""RESTORE-1 to RESTORE-3 of restore/plan.py: captured, written, and loaded into other objects, everything is what it
was, to the bit.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpointd_client.capture.dtypes import DTYPES
from tests.unit.client.capture_and_fill import bytes_of, same, save


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
    assert ran == ["before", "after"] * 2  # of the trial, and of the load


def test_parts_of_a_module_are_told_the_stored_version_and_nothing_that_is_not_stored() -> None:
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
    assert (target[0].told, target[0].extra) == (1, "not loaded")
    save({"m": nn.Sequential(Versioned(2, 2))}).load({"m": target})
    assert (target[0].told, target[0].extra) == (7, {"loaded": True})


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
