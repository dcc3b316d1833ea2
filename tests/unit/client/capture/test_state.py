"""CAPTURE-1 to CAPTURE-4 of state.py: what capture() finds, under which names, and what it refuses."""

from __future__ import annotations

import collections
import enum
import functools
import io
import pathlib
import sys
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture.dtypes import ALL, DTYPES
from checkpointd_client.capture.flatten import DEPTH_MAX
from checkpointd_client.capture.state import Captured, capture
from tests.unit.client.capture_and_fill import bytes_of, same, save
from tests.unit.client.simulated_ranks import rank_of


def captured(state: dict[str, Any], client_state: dict[str, Any] | None = None, *, exclude_frozen: bool = False) -> Captured:
    return capture(state, client_state, exclude_frozen_parameters=exclude_frozen)


def fqns(found: Captured) -> list[str]:
    return [leaf.fqn for leaf in found.leaves]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Compiled(nn.Module):
    """A block that holds a compiled one inside, as regional compilation leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.compile(nn.Linear(2, 2))
        self.plain = nn.Linear(2, 2)


def test_fqns_are_paths_in_the_order_of_the_state() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model[0].parameters())
    stepped(model[0], optimizer)
    found = captured({"model": model, "optimizer": optimizer, "more": {"deep": [torch.ones(1), {1: np.ones(2)}]}})
    assert fqns(found) == [
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
        "model.1.running_mean",
        "model.1.running_var",
        "model.1.num_batches_tracked",
        *(f"optimizer.state.model.0.{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")),
        "more.deep.0",
        "more.deep.1.1",
    ]


def test_leaves_are_the_live_memory_detached_and_share_the_version_counter() -> None:
    weight = nn.Parameter(torch.ones(3))
    (leaf,) = captured({"w": weight}).leaves
    assert not leaf.tensor.requires_grad
    assert leaf.tensor.data_ptr() == weight.data_ptr()
    before = leaf.tensor._version
    with torch.no_grad():
        weight.add_(1)
    assert leaf.tensor.tolist() == [2, 2, 2]
    assert leaf.tensor._version > before


def test_a_leaf_keeps_the_memory_of_the_save_when_the_user_swaps_it() -> None:
    weight = torch.ones(3)
    (leaf,) = captured({"w": weight}).leaves
    weight.data = torch.zeros(3)
    assert leaf.tensor.tolist() == [1, 1, 1]


def test_only_what_an_optimizer_steps_is_lazy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    stepped(model, optimizer)
    found = captured({"average": average, "model": model, "optimizer": optimizer, "loose": torch.ones(1)})
    lazy = {leaf.fqn for leaf in found.leaves if leaf.optimizer_only}
    parameters = {f"model.{name}" for name, _ in model.named_parameters()}
    assert lazy == parameters | {f for f in fqns(found) if f.startswith("optimizer.state.")}
    assert "optimizer.param_groups.0.lr" in fqns(found)


def test_a_module_without_its_optimizer_in_the_state_is_not_lazy() -> None:
    model = nn.Linear(2, 2)
    torch.optim.SGD(model.parameters())
    assert not any(leaf.optimizer_only for leaf in captured({"model": model}).leaves)


def test_a_state_dict_handed_over_counts_like_its_module() -> None:
    model = nn.Linear(2, 2)
    found = captured({"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters())})
    assert [leaf.optimizer_only for leaf in found.leaves] == [True, True]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_sharded_state_dict_handed_over_counts_like_its_module() -> None:
    with rank_of(1, 4):
        model = nn.Linear(8, 2, bias=False)
        local = torch.ones(2, 2)
        model.weight = nn.Parameter(DTensor.from_local(local, DeviceMesh("cpu", range(4)), [Shard(1)], run_check=False))
        found = captured({"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters())})
    assert [leaf.optimizer_only for leaf in found.leaves] == [True]


class Optimizers(torch.optim.Optimizer):
    """An optimizer that consists of others, and whose state_dict() is one flat dict, as torchtitan's."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def state_dict(self) -> dict[str, Any]:
        entries = [entry for one in self.optimizers for entry in one.state_dict()["state"].values()]
        return {f"state.{i}.{key}": value for i, entry in enumerate(entries) for key, value in entry.items()}


def test_the_state_of_an_optimizer_that_consists_of_others_is_lazy() -> None:
    models = [nn.Linear(2, 2, bias=False), nn.Linear(3, 3, bias=False)]
    inside = [torch.optim.Adam(model.parameters()) for model in models]
    for model, one in zip(models, inside, strict=True):
        stepped(model, one)
    found = captured({"a": models[0].weight.detach(), "b": models[1].weight.detach(), "optimizer": Optimizers(*inside)})
    assert len(found.leaves) == 8
    assert all(leaf.optimizer_only for leaf in found.leaves)


def test_what_a_state_dict_hook_adds_to_an_optimizer_is_not_lazy() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    shadow = torch.zeros(2)
    optimizer.register_state_dict_post_hook(lambda _, found: found["state"].update(shadow=shadow))
    stepped(model, optimizer)
    lazy = {leaf.fqn: leaf.optimizer_only for leaf in captured({"optimizer": optimizer}).leaves}
    assert lazy["optimizer.state.0.exp_avg"]
    assert not lazy["optimizer.state.shadow"]


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_is_stored_under_torchs_name(name: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = raw.view(DTYPES[name])
    scalar = raw[:16].clone().view(DTYPES[name])[0]
    saved = save({"t": tensor, "scalar": scalar, "none": tensor[:0]})
    assert saved.entries["t"] == (name, tuple(tensor.shape))
    assert saved.data["t"] == bytes(range(48))
    assert saved.data["scalar"] == bytes(range(tensor.itemsize))
    assert saved.entries["scalar"] == (name, ())
    assert saved.entries["none"] == (name, (0,))


def test_torch_has_no_dtype_that_was_forgotten() -> None:
    assert set(ALL) - set(DTYPES) <= {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


def test_strided_expanded_and_conjugate_tensors_are_stored_as_their_elements() -> None:
    numbers = torch.arange(12.0).view(3, 4)
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j])
    views = {
        "transposed": numbers.clone().t(),
        "every_other": numbers.clone()[:, ::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "scalar_expanded": torch.tensor(3.0).expand(4),
        "conjugate": complex_numbers.clone().conj(),
        "negative": complex_numbers.clone().conj().imag,
    }
    saved = save(views)
    for name, view in views.items():
        assert saved.data[name] == view.contiguous().resolve_conj().resolve_neg().numpy().tobytes(), name


def test_tied_weights_are_one_leaf_and_an_alias() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    found = captured({"model": model})
    assert fqns(found) == ["model.embedding.weight"]
    (alias,) = found.aliases
    assert (alias.fqn, alias.owner, alias.shape, alias.offset) == ("model.head.weight", "model.embedding.weight", (4, 2), 0)


def test_views_inside_an_owner_are_aliases_whatever_comes_first() -> None:
    flat = torch.arange(10.0)
    found = captured({"part": flat[2:6].view(2, 2), "reversed": flat.view(2, 5).t(), "flat": flat})
    assert fqns(found) == ["flat"]
    assert {alias.fqn: (alias.shape, alias.stride, alias.offset) for alias in found.aliases} == {
        "part": ((2, 2), (2, 1), 2),
        "reversed": ((5, 2), (1, 5), 0),
    }


def test_arrays_and_tensors_on_one_memory_are_aliases() -> None:
    array = np.arange(4.0)
    assert fqns(captured({"array": array, "tensor": torch.from_numpy(array)})) == ["array"]


def test_views_that_no_alias_can_express_are_stored_in_full() -> None:
    base = torch.arange(10.0)
    found = captured({"low": base[:6], "high": base[4:], "bits": base[:2].view(torch.int32), "window": base.unfold(0, 3, 1)})
    assert not found.aliases
    assert fqns(found) == ["low", "high", "bits", "window"]


def test_tensors_side_by_side_in_one_storage_are_no_aliases() -> None:
    base = torch.arange(10.0)
    found = captured({"left": base[:5], "right": base[5:]})
    assert not found.aliases
    assert all(isinstance(node, tree.Tensor) and node.overlap is None for node in _tensors(found.tree))


def _tensors(node: tree.Node) -> list[tree.Node]:
    match node:
        case tree.Dict(_, items):
            return [leaf for _, child in items for leaf in _tensors(child)]
        case tree.Sequence(_, items):
            return [leaf for child in items for leaf in _tensors(child)]
        case tree.Tensor():
            return [node]
    return []


def test_a_flat_buffer_with_parameters_inside_is_not_lazy() -> None:
    # The buffer is the owner, and nothing says that only an optimizer changes it.
    flat = torch.zeros(4)
    weight = nn.Parameter(flat[:2])
    found = captured({"flat": flat, "weight": weight, "optimizer": torch.optim.SGD([weight])})
    assert [(leaf.fqn, leaf.optimizer_only) for leaf in found.leaves] == [("flat", False)]


def test_compiled_and_parallel_wrappers_leave_no_trace_in_the_names() -> None:
    inner = nn.Linear(2, 2)
    plain = fqns(captured({"model": inner}))
    assert fqns(captured({"model": nn.DataParallel(inner)})) == plain
    assert fqns(captured({"model": torch.compile(inner)})) == plain
    assert fqns(captured({"model": torch.compile(nn.DataParallel(inner))})) == plain
    assert fqns(captured({"model": Compiled()})) == [
        f"model.{part}.{p}" for part in ("block", "plain") for p in ("weight", "bias")
    ]


def test_a_module_of_the_users_called_module_keeps_its_name() -> None:
    assert fqns(captured({"model": nn.ModuleDict({"a": nn.ModuleDict({"module": nn.ReLU(), "b": nn.PReLU()})})})) == [
        "model.a.b.weight"
    ]
    holder = nn.ModuleDict({"a": nn.ModuleDict({"module": nn.PReLU()})})
    assert fqns(captured({"model": holder})) == ["model.a.module.weight"]


def test_frozen_parameters_are_left_out_on_demand_and_listed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    everything = fqns(captured({"model": model}))
    found = captured({"model": model, "kept": {"w": torch.ones(1)}}, exclude_frozen=True)
    assert found.excluded == ("model.0.weight", "model.0.bias")
    # Buffers have requires_grad off as well, and stay.
    assert fqns(found) == [*everything[2:], "kept.w"]


def test_frozen_parameters_are_known_under_an_overridden_state_dict() -> None:
    class Own(nn.Linear):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # as users write it
            return super().state_dict()

    model = Own(2, 2)
    model.weight.requires_grad_(False)
    assert fqns(captured({"model": model})) == ["model.weight", "model.bias"]
    assert captured({"model": model}, exclude_frozen=True).excluded == ("model.weight",)


@pytest.mark.parametrize(
    ("state", "name", "places"),
    [
        ({"d": {0: torch.ones(1), "0": torch.zeros(1)}}, "d.0", ("state['d'][0]", "state['d']['0']")),
        ({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}, "a.b.c", ("state['a']['b.c']", "state['a.b']['c']")),
        ({"a": [torch.ones(1)], "a.0": np.ones(1)}, "a.0", ("state['a'][0]", "state['a.0']")),
        ({"d": {True: torch.ones(1), "True": torch.ones(1)}}, "d.True", ("state['d'][True]", "state['d']['True']")),
    ],
)
def test_colliding_names_are_refused_naming_both(state: dict[str, Any], name: str, places: tuple[str, str]) -> None:
    with pytest.raises(StateError, match="2 tensors") as raised:
        captured(state)
    assert str(raised.value).startswith(f"{name}: ")
    assert all(f" {place}" in str(raised.value) for place in places)


def test_client_state_has_a_root_of_its_own() -> None:
    found = captured({"t": torch.ones(1)}, {"t": torch.zeros(1), "epoch": 3})
    assert fqns(found) == ["t", "client_state.t"]
    with pytest.raises(StateError, match=r"'client_state'.*reserved"):
        captured({"client_state": 1})
    with pytest.raises(StateError, match=r"client_state\.model: .*Linear.*put it into the state"):
        captured({}, {"model": nn.Linear(1, 1)})


class Opaque(enum.Enum):
    ONE = object()


class Text(str):
    __slots__ = ()


class Table(dict[str, int]):
    pass


class Tagged(torch.Tensor):
    pass


class Moment(datetime):
    pass


class Window(collections.deque[int]):
    pass


class Elsewhere(tzinfo):
    pass


class Noted(NamedTuple("_Noted", [("one", int), ("two", int)])):
    def with_note(self) -> Noted:
        self.note = 3
        return self


Renamed = collections.namedtuple("Other", "one")


def _local_colour() -> enum.Enum:
    class Colour(enum.Enum):
        RED = 1

    return Colour.RED


def _local_pair() -> object:
    class Pair(NamedTuple):
        one: int

    return Pair(1)


def _closed() -> io.BytesIO:
    buffer = io.BytesIO(b"abc")
    buffer.close()
    return buffer


def _named_buffer() -> io.BytesIO:
    buffer = io.BytesIO(b"abc")
    buffer.name = "model.bin"  # type: ignore[misc]  # as people do for torch.save
    return buffer


def function() -> None: ...


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(2, device="meta"), "meta tensor"),
    (lambda: torch.ones(0, device="meta"), "meta tensor"),
    (lambda: torch.eye(2).to_mkldnn(), r"a _mkldnn tensor cannot be stored.*to_dense"),
    (lambda: torch.ones(2).as_subclass(Tagged), "Tagged would lose its class"),
    (lambda: nn.Parameter(torch.ones(2).as_subclass(Tagged)), "Tagged would lose its class"),
    (lambda: nn.UninitializedParameter(), "run one forward pass"),
    (lambda: _freed(), "storage was freed"),
    (lambda: function, "code is never stored"),
    (lambda: lambda: 1, "code is never stored"),
    (lambda: len, "code is never stored"),
    (lambda: [].append, "code is never stored"),
    (lambda: functools.partial(function), "functools.partial"),
    (lambda: object(), "state_dict"),
    (lambda: DataLoader([1]), "use torchdata's StatefulDataLoader"),
    (lambda: nn.Linear, "store its name"),
    (lambda: Opaque.ONE, r"store its \.name"),
    (lambda: _local_colour(), "is defined inside a function"),
    (lambda: _local_pair(), "at the top level of a module"),
    (lambda: Renamed(1), "is not what the module .* has under the name Other"),
    (lambda: Noted(1, 2).with_note(), r"attributes beside its fields \(note\)"),
    (lambda: Text("a"), r"str\(\.\.\.\)"),
    (lambda: Table(a=1), r"dict\(\.\.\.\)"),
    (lambda: Moment(2026, 1, 1), r"come back as datetime: .*datetime\(\.\.\.\)"),
    (lambda: Window([1]), r"come back as deque: .*deque\(\.\.\.\)"),
    (lambda: datetime(2026, 1, 1, tzinfo=Elsewhere()), r"Elsewhere: use datetime\.timezone or zoneinfo\.ZoneInfo"),
    (lambda: _closed(), "it is closed"),
    (lambda: _named_buffer(), r"attributes of its own \(name\)"),
    (lambda: time.gmtime(0), r"come back as tuple: .*tuple\(\.\.\.\)"),
    (lambda: memoryview(b"a"), "plain values"),
    (lambda: "\ud800", "lone surrogate"),
    (lambda: {"\udfff": 1}, "lone surrogate"),
    (lambda: {frozenset({1}): 1}, "dict key of type frozenset"),
    (lambda: {(1, function): 1}, "dict key of type function"),
    (lambda: {pathlib.PurePosixPath("\udfff"): 1}, "lone surrogate"),
    (lambda: np.array([object()]), "dtype object"),
    (lambda: np.zeros(2, dtype=[("a", "i4")]), "cannot be stored"),
    (lambda: np.matrix([[1]]), r"np\.asarray"),
    (lambda: np.ma.masked_array([1], [True]), r"np\.asarray"),
    (lambda: np.str_("a"), r"\.item\(\)"),
]


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    part = tensor[2:]
    tensor.untyped_storage().resize_(0)
    return part


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning", "ignore:Sparse CSR")
def test_what_cannot_be_stored_is_refused_with_its_name_and_what_to_do(make: Callable[[], Any], words: str) -> None:
    value = make()
    with pytest.raises(StateError, match=words) as raised:
        captured({"fine": 1, "outer": [0, {"bad": value}]})
    assert str(raised.value).startswith("outer.1.bad")
    with pytest.raises(StateError, match=r"^client_state\.bad"):
        captured({}, {"bad": value})


def test_a_sharded_tensor_of_the_older_kind_is_refused_with_the_kind_to_use() -> None:
    class ShardedTensor(torch.Tensor):
        pass

    with pytest.raises(StateError, match=r"^model\.weight: a .*ShardedTensor cannot be stored: use a DTensor"):
        captured({"model": {"weight": torch.ones(2).as_subclass(ShardedTensor)}})


@pytest.mark.parametrize("make", [list, dict, collections.OrderedDict])
def test_cycles_are_refused(make: Callable[[], Any]) -> None:
    outer, inner = make(), [0]
    (outer.append if isinstance(outer, list) else functools.partial(outer.__setitem__, "k"))(inner)
    inner.append(outer)
    with pytest.raises(StateError, match=r"^x\..*contains itself"):
        captured({"x": outer})


def test_one_container_in_two_places_is_no_cycle() -> None:
    shared = {"a": 1}
    assert captured({"x": [shared, shared]}).tree


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_the_deepest_state_that_is_taken_can_be_read_back() -> None:
    saved = save({"x": nested(DEPTH_MAX)})
    target: dict[str, Any] = {"x": None}
    saved.load(target)
    assert same(target["x"], nested(DEPTH_MAX))
    with pytest.raises(StateError, match=rf"nested deeper than {DEPTH_MAX}"):
        captured({"x": nested(DEPTH_MAX + 1)})
    with pytest.raises(StateError, match="nested too deeply"):
        captured({"x": nested(5 * sys.getrecursionlimit())})


def test_an_object_whose_state_dict_fails_is_named() -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("call consolidate first")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(StateError, match=r"^loader: state_dict\(\) of .*Broken failed: RuntimeError: call consolidate first"):
        captured({"loader": Broken()})


@pytest.mark.parametrize("state", [None, [1], nn.Linear(1, 1), {1: torch.ones(1)}])
def test_a_state_that_is_no_mapping_of_names_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="names"):
        capture(state, None, exclude_frozen_parameters=False)


def test_capture_changes_nothing_and_leaves_random_numbers_alone() -> None:
    tensor = torch.randn(3)
    before = bytes_of(tensor), torch.get_rng_state()
    captured({"t": tensor, "generator": torch.Generator()})
    assert bytes_of(tensor) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_default_device_of_the_users_does_not_matter() -> None:
    with torch.device("meta"):
        found = captured({"t": torch.ones(2, device="cpu")})
    assert [leaf.tensor.device.type for leaf in found.leaves] == ["cpu"]
