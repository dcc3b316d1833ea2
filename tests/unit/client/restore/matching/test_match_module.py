"""A module is asked what it takes, as torch asks it, before anything is called a mismatch."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from checkpointd.errors import MismatchError, StateError
from tests.unit.client.capture_and_fill import same, save


class Plain(nn.Module):
    """Version 1: rows in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(12.0).reshape(6, 2))


class Turned(nn.Module):
    """Version 2: the same rows in another order, into which it converts those of version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(6, 2))

    def _load_from_state_dict(self, found: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            found[f"{prefix}rows"] = found[f"{prefix}rows"].flip(0)
        super()._load_from_state_dict(found, prefix, metadata, *rest)


class Transposed(Turned):
    """It hands on a view of what it gets, so its parameter must not be that memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(2, 6))

    def _load_from_state_dict(self, found: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            found[f"{prefix}rows"] = found[f"{prefix}rows"].t()
        nn.Module._load_from_state_dict(self, found, prefix, metadata, *rest)


class Split(nn.Module):
    """Its one tensor of earlier times is two, which a hook makes."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
        self.register_load_state_dict_pre_hook(self._split)

    @staticmethod
    def _split(_module: nn.Module, found: Any, prefix: str, *_: Any) -> None:
        whole = found.pop(f"{prefix}rows", None)
        if whole is not None:
            found[f"{prefix}upper"], found[f"{prefix}lower"] = whole.chunk(2)


class Renamed(nn.Module):
    """It calls its tensor by another name now, and once, and for all, forgets the hook that says so."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.lines = nn.Parameter(torch.zeros(6, 2, dtype=dtype))
        self._hook = self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, found: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}rows" in found:
            found[f"{prefix}lines"] = found.pop(f"{prefix}rows")
        module._hook.remove()


class Resizing(nn.Module):
    """Its buffer is empty before the first batch, as that of an observer."""

    def __init__(self, size: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("low", torch.arange(float(size)).to(dtype))

    def _load_from_state_dict(self, found: Any, prefix: str, *rest: Any) -> None:
        self.low.resize_(found[f"{prefix}low"].shape)
        super()._load_from_state_dict(found, prefix, *rest)


def by_torch(trained: nn.Module, mine: nn.Module) -> dict[str, Any]:
    """What torch.save and load_state_dict make of it."""
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    mine.load_state_dict(torch.load(file, weights_only=True))
    return mine.state_dict()


def weight_normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), norm(nn.Linear(3, 2)))


def observed(batches: int) -> nn.Module:
    found = torch.ao.quantization.PerChannelMinMaxObserver()
    for _ in range(batches):
        found(torch.randn(4, 5))
    return found


def faked(batches: int) -> nn.Module:
    observer = torch.ao.quantization.default_per_channel_weight_fake_quant
    found: nn.Module = observer()
    for _ in range(batches):
        found(torch.randn(4, 5))
    return found


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "version": (Plain, Turned),
    "version_of_a_part": (lambda: nn.Sequential(nn.ReLU(), Plain()), lambda: nn.Sequential(nn.ReLU(), Turned())),
    "version_and_shape": (Plain, Transposed),
    "same_version": (Turned, Turned),
    "split": (Plain, Split),
    "renamed": (Plain, Renamed),
    "weight_norm": (lambda: weight_normed(old_weight_norm), lambda: weight_normed(parametrizations.weight_norm)),
    "resized": (lambda: Resizing(4), Resizing),
    "observer": (lambda: observed(2), lambda: observed(0)),
    "fake_quantize": (lambda: faked(2), lambda: faked(0)),
    "lazy": (lambda: nn.Linear(3, 2), lambda: nn.LazyLinear(2)),
    "lazy_inside": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_torch_loads_is_loaded(name: str) -> None:
    torch.manual_seed(0)
    make, make_now = PAIRS[name]
    trained = make()
    want, mine = by_torch(trained, make_now()), make_now()
    save({"m": trained}).load({"m": mine})
    assert same(dict(mine.state_dict()), dict(want))


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "same_version"])
def test_a_trial_changes_nothing(name: str) -> None:
    """MODULETRIAL-1."""
    torch.manual_seed(0)
    make, make_now = PAIRS[name]
    mine = make_now()
    inside = [(part, dict(vars(part)), dict(part._parameters), dict(part._buffers)) for part in mine.modules()]
    hooks = [list(part._load_state_dict_pre_hooks) for part in mine.modules()]
    values = {key: value for key, value in mine.state_dict().items() if not nn.parameter.is_lazy(value)}
    copies = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
    save({"m": make()}).prepare({"m": mine})
    for part, attributes, parameters, buffers in inside:
        assert vars(part).keys() == attributes.keys()
        assert all(vars(part)[key] is value for key, value in attributes.items())
        assert {key: id(value) for key, value in part._parameters.items()} == {key: id(p) for key, p in parameters.items()}
        assert {key: id(value) for key, value in part._buffers.items()} == {key: id(b) for key, b in buffers.items()}
    assert [list(part._load_state_dict_pre_hooks) for part in mine.modules()] == hooks
    assert all(same(values[key].detach(), value.detach()) for key, value in copies.items())


def test_the_optimizer_finds_the_state_of_a_parameter_that_its_module_renames() -> None:
    trained, mine = Plain(), Renamed()
    adam, mine_adam = torch.optim.Adam(trained.parameters()), torch.optim.Adam(mine.parameters())
    trained.rows.sum().backward()
    adam.step()
    for order in (("m", "o"), ("o", "m")):
        now: dict[str, Any] = {"m": mine, "o": mine_adam}
        save({"m": trained, "o": adam}).load({key: now[key] for key in order})
        assert same(mine_adam.state[mine.lines], adam.state[trained.rows])
        mine, mine_adam = (again := Renamed()), torch.optim.Adam(again.parameters())


def test_what_the_module_does_not_take_is_told_as_before() -> None:
    with pytest.raises(MismatchError, match=r"m\.more: in the checkpoint, and nowhere") as told:
        save({"m": nn.ParameterDict({"more": torch.ones(1), "rows": torch.ones(1)})}).prepare({"m": Renamed()})
    assert "m.rows: " in str(told.value)  # its size is another one, so it is not taken under any name
    with pytest.raises(MismatchError, match=r"m\.lines: missing"):
        save({"m": nn.ParameterDict({})}).prepare({"m": Renamed()})


class Silent(nn.Linear):
    """Its load_state_dict() takes what it knows, and says nothing of the rest."""

    def load_state_dict(self, found: Any) -> None:  # type: ignore[override]  # as users write it
        super().load_state_dict({key: value for key, value in found.items() if key == "weight"}, strict=False)


def test_a_module_that_says_nothing_of_what_it_takes_hides_nothing() -> None:
    with pytest.raises(MismatchError, match=r"m\.bias: missing"):
        save({"m": nn.Linear(3, 2, bias=False)}).prepare({"m": Silent(3, 2)})
    more = nn.ParameterDict({"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)})
    with pytest.raises(MismatchError, match=r"m\.more: in the checkpoint, and nowhere"):
        save({"m": more}).prepare({"m": Silent(3, 2)})


@pytest.mark.parametrize("make", [lambda: Renamed(torch.bfloat16), lambda: Resizing(0, torch.bfloat16)])
def test_the_module_converts_no_dtype_unless_the_load_may(make: Callable[[], nn.Module]) -> None:
    trained = Plain() if isinstance(make(), Renamed) else Resizing(4)
    with pytest.raises(MismatchError, match="dtype float32 is stored, and bfloat16 is there now"):
        save({"m": trained}).prepare({"m": make()})
    mine = make()
    save({"m": trained}).load({"m": mine}, cast=True)
    [want], [value] = trained.state_dict().values(), mine.state_dict().values()
    assert same(value, want.to(torch.bfloat16))


def test_a_version_that_the_module_cannot_convert_is_a_mismatch_and_its_tensors_stay() -> None:
    class Strict(Turned):
        def _load_from_state_dict(self, found: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            raise NotImplementedError("rows of version 1 mean something else")

    mine = Strict()
    with pytest.raises(MismatchError, match=r"m.rows: .*another version of its module.*mean something else"):
        save({"m": Plain()}).prepare({"m": mine})
    saved = save({"m": Plain(), "other": torch.ones(2)})
    into: dict[str, Any] = {"m": mine, "other": torch.zeros(2)}
    restoration = saved.prepare(into, strict=False)
    saved.fill(restoration)
    restoration.finish()
    assert same(into["other"], torch.ones(2))
    assert not mine.rows.any()


def test_a_state_dict_in_place_of_a_module_of_another_version_is_a_mismatch() -> None:
    trained, mine = Plain(), Turned()
    with pytest.raises(MismatchError, match="pass the module itself"):
        save({"m": trained.state_dict()}).prepare({"m": mine.state_dict()})


def test_attributes_of_a_dict_come_back() -> None:
    class Versioned:
        """Its state_dict() has more than items, as that of a TensorDict."""

        def __init__(self, value: float) -> None:
            self.value = torch.tensor(value)

        def state_dict(self) -> Any:
            found = Plain().state_dict()
            found.clear()
            found["value"] = self.value
            found._metadata = {"": {"shape": [2, 3]}}
            found.more = {"inner": torch.full((2,), float(self.value))}
            return found

        def load_state_dict(self, state: Any) -> None:
            assert state._metadata == {"": {"shape": [2, 3]}}
            assert same(state.more["inner"], torch.full((2,), 7.0))
            self.value = state["value"]

    mine = Versioned(0.0)
    save({"buffer": Versioned(7.0)}).load({"buffer": mine})
    assert mine.value == 7.0


def test_an_attribute_that_cannot_be_stored_is_refused_by_name() -> None:
    found: Any = collections.OrderedDict(a=1)
    found.hook = lambda: None
    with pytest.raises(StateError, match=r"m\.hook: .*function"):
        save({"m": found})


# --- what a module with hooks or methods of its own gets ------------------------------------------------------------


class Gated(nn.Module):
    """Two tensors of one shape, and a hook that changes what is loaded."""

    def __init__(self, number: float = 0.0, *, legacy: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.full((2, 2), number)), nn.Parameter(torch.full((2, 2), number + 1))
        self.up.data[0, 1] += 5
        self.register_buffer("form", torch.tensor(1 if legacy else 2))
        if legacy:
            self.register_buffer("legacy", torch.tensor(1))
        self.register_load_state_dict_pre_hook(lambda _, found, prefix, *__: self.change(found, prefix))

    def change(self, found: dict[str, Any], prefix: str) -> None: ...


class SwapsByKey(Gated):
    def change(self, found: dict[str, Any], prefix: str) -> None:
        if found.pop(f"{prefix}legacy", None) is not None:
            found[f"{prefix}gate"], found[f"{prefix}up"] = found[f"{prefix}up"], found[f"{prefix}gate"]


class SwapsByValue(Gated):
    def change(self, found: dict[str, Any], prefix: str) -> None:
        found.pop(f"{prefix}legacy", None)
        if found[f"{prefix}form"] < 2:
            found[f"{prefix}form"] = torch.tensor(2)
            found[f"{prefix}gate"], found[f"{prefix}up"] = found[f"{prefix}up"], found[f"{prefix}gate"]


class Transposes(Gated):
    def change(self, found: dict[str, Any], prefix: str) -> None:
        found.pop(f"{prefix}legacy", None)
        found[f"{prefix}up"] = found[f"{prefix}up"].t()


class KeepsItsOwn(Gated):
    def change(self, found: dict[str, Any], prefix: str) -> None:
        found.pop(f"{prefix}legacy", None)
        found[f"{prefix}up"] = self.up.detach().clone()


class Merges(Gated):
    def change(self, found: dict[str, Any], prefix: str) -> None:
        found.pop(f"{prefix}legacy", None)
        mask = torch.tensor([[True, False], [False, True]])
        found[f"{prefix}gate"] = torch.where(mask, found[f"{prefix}gate"], self.gate.detach())


class LooksAtNumbers(Gated):
    def change(self, found: dict[str, Any], prefix: str) -> None:
        found.pop(f"{prefix}legacy", None)
        assert not found[f"{prefix}gate"].isnan().any()
        found[f"{prefix}gate"] = torch.from_numpy(found[f"{prefix}gate"].numpy() + 1)


class TakesNothing(Gated):
    def _load_from_state_dict(self, found: Any, prefix: str, *rest: Any) -> None:
        found.pop(f"{prefix}legacy", None)


@pytest.mark.parametrize("kind", [SwapsByKey, SwapsByValue, Transposes, KeepsItsOwn, Merges, LooksAtNumbers, TakesNothing])
@pytest.mark.parametrize("nested", [False, True])
def test_a_module_with_its_own_way_of_loading_gets_what_torch_gives_it(kind: type[Gated], nested: bool) -> None:
    def made(number: float, legacy: bool = False) -> nn.Module:
        one = kind(number, legacy=legacy)
        return nn.Sequential(nn.Linear(2, 2), one) if nested else one

    source, target, expected = made(1.0, True), made(7.0), made(7.0)
    expected.load_state_dict(source.state_dict())
    held = dict(target.named_parameters())
    save({"m": source}).load({"m": target})
    assert same(dict(target.state_dict()), dict(expected.state_dict()))
    assert all(one is held[name] for name, one in target.named_parameters())


def test_a_trial_leaves_no_trace_in_nested_containers() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.told = {"deep": collections.deque([0]), "by": collections.defaultdict(list)}
            self.register_load_state_dict_pre_hook(lambda *_: self.told["deep"].append(1) or self.told["by"]["x"].append(2))

    target = Counts()
    save({"m": Counts()}).load({"m": target})
    assert (list(target.told["deep"]), target.told["by"]["x"]) == ([0, 1], [2])


class Named(nn.Module):
    """A layer whose weight had another name in earlier times."""

    def __init__(self, *, legacy: bool = False) -> None:
        super().__init__()
        self.register_parameter("w" if legacy else "weight", nn.Parameter(torch.randn(4, 4)))
        if not legacy:
            self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_module: nn.Module, found: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}w" in found:
            found[f"{prefix}weight"] = found.pop(f"{prefix}w")


def test_a_hook_renames_the_shards_of_fsdp2() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source, target = nn.Sequential(Named(legacy=True)), nn.Sequential(Named())
        for one in (source, target):
            fully_shard(one, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(target.parameters(), lr=0.5)
        save({"m": source}).load({"m": target})
        assert optimizer.param_groups[0]["params"][0] is target[0].weight
        assert same(target[0].weight.full_tensor(), source[0].w.full_tensor())
    finally:
        dist.destroy_process_group()
