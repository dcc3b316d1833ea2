"""COMPOSITE-1 to COMPOSITE-3 of match_composite.py: composite tensors come back bit for bit, or are reported."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpointd.errors import FormatError, MismatchError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture.state import capture
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from tests.unit.client.capture_and_fill import Saved, bytes_of, save
from tests.unit.client.composite_tensors import KINDS, OWN, Halves, Recipe, Rounding, facts_of, halves, made, quietly

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse .* tensor support:UserWarning")
ALLOWED = TensorClasses.of(OWN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_every_kind_comes_back_bit_for_bit_into_an_empty_dict(kind: str) -> None:
    tensor = made(kind)
    saved = quietly(lambda: save({"x": [tensor]}, {"y": tensor}))
    target: dict[str, Any] = {}
    client_state: Any = quietly(lambda: saved.load(target))
    assert facts_of(target["x"][0]) == facts_of(tensor)
    assert facts_of(client_state["y"]) == facts_of(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_tensor_of_every_kind_gets_the_stored_content_and_stays_the_same_object(kind: str) -> None:
    tensor, other, alike = made(kind), made(kind, 1), made(kind)
    saved = quietly(lambda: save({"x": tensor}))
    for live in (other, alike):
        target = {"x": live}
        quietly(lambda target=target: saved.load(target))
        assert target["x"] is live
        assert facts_of(live) == facts_of(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_with_a_tensor_of_every_kind_is_loaded(kind: str) -> None:
    def module(seed: int) -> nn.Module:
        one = nn.Linear(2, 2)
        one.register_buffer("held", made(kind, seed))
        if one.held.is_floating_point():
            one.weight_of_its_own = nn.Parameter(made(kind, seed))
        return one

    one, two = module(0), module(1)
    saved = quietly(lambda: save({"model": one}))
    quietly(lambda: saved.load({"model": two}))
    assert facts_of(two.held) == facts_of(one.held)
    assert torch.equal(two.weight, one.weight)
    if hasattr(one, "weight_of_its_own"):
        assert facts_of(two.weight_of_its_own) == facts_of(one.weight_of_its_own)


def test_filling_in_place_keeps_the_memory_of_the_inner_tensors() -> None:
    saved = save({"x": made("sparse_coo")})
    live = made("sparse_coo")
    live._values().zero_()
    before = live._values().data_ptr()
    saved.load({"x": live})
    assert live._values().data_ptr() == before
    assert facts_of(live) == facts_of(made("sparse_coo"))


def test_two_nested_tensors_with_one_offsets_object_fit_each_other_after_a_load() -> None:
    one = made("jagged")
    two = quietly(lambda: one * 2)
    saved = save({"one": one, "two": two})
    target: dict[str, Any] = {}
    saved.load(target)
    assert bytes_of((target["one"] + target["two"])._values) == bytes_of((one + two)._values)


@pytest.mark.parametrize(
    ("stored", "live", "words"),
    [
        ("sparse_coo", "sparse_csr", r"a sparse_coo tensor of float32\[4, 6\] is stored, and a sparse_csr tensor"),
        ("quint8", "qint8", r"of quint8\[4, 6\] is stored, and a quantized tensor of qint8\[4, 6\]"),
    ],
)
def test_another_kind_is_a_mismatch_that_names_both(stored: str, live: str, words: str) -> None:
    saved = quietly(lambda: save({"x": made(stored), "y": 1}))
    with pytest.raises(MismatchError, match=words):
        quietly(lambda: saved.load({"x": made(live), "y": 0}))
    target = {"x": made(live), "y": 0}
    quietly(lambda: saved.load(target, strict=False))
    assert facts_of(target["x"]) == facts_of(made(live))
    assert target["y"] == 1


@pytest.mark.parametrize(("stored", "live"), [("sparse_coo", "plain"), ("plain", "sparse_coo")])
def test_a_composite_and_a_plain_tensor_do_not_match(stored: str, live: str) -> None:
    def tensor(kind: str) -> torch.Tensor:
        return torch.ones(4, 6) if kind == "plain" else made(kind)

    saved = save({"x": tensor(stored)})
    with pytest.raises(MismatchError, match="is stored, and"):
        saved.load({"x": tensor(live)})


# --- tensors that cannot be filled in place -----------------------------------------------------------------------------


def _coo(shape: tuple[int, ...], *indices: list[int]) -> torch.Tensor:
    dense = shape[len(indices) :]
    values = torch.rand(len(indices[0]), *dense)
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=True)


def _csr(dtype: torch.dtype) -> torch.Tensor:
    pointers, indices = torch.tensor([0, 1, 2], dtype=dtype), torch.tensor([0, 1], dtype=dtype)
    tensor: torch.Tensor = quietly(
        lambda: torch.sparse_csr_tensor(pointers, indices, torch.rand(2), (2, 2), check_invariants=True)
    )
    return tensor


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (made("qint8"), made("qint8, per channel")),
        (made("qint8, per channel"), made("qint8")),
        (_coo((4, 3), [0, 1]), _coo((4, 3), [0, 1], [0, 1])),
        (_csr(torch.int32), _csr(torch.int64)),
    ],
)
def test_another_layout_inside_is_taken_over_exactly(stored: torch.Tensor, live: torch.Tensor) -> None:
    saved = quietly(lambda: save({"x": stored}))
    target = {"x": live}
    quietly(lambda: saved.load(target))
    assert target["x"] is live
    assert facts_of(live) == facts_of(stored)


@pytest.mark.parametrize("live", [None, made("nested")])
def test_a_nested_tensor_of_no_components_comes_back(live: torch.Tensor | None) -> None:
    saved = save({"x": torch.nested.nested_tensor([], dtype=torch.float32)})
    target: dict[str, Any] = {} if live is None else {"x": live}
    saved.load(target)
    assert target["x"].is_nested
    assert target["x"].size(0) == 0


def test_a_tensor_that_torch_cannot_change_is_a_mismatch_before_anything_is_loaded() -> None:
    saved = quietly(lambda: save({"x": made("jagged"), "y": 1}))
    live = made("jagged", 1)
    held = weakref.ref(live)
    target = {"x": live, "y": 0}
    with pytest.raises(MismatchError, match=r"x: a jagged tensor .* holds a weak reference"):
        saved.load(target)
    assert target["y"] == 0
    assert held() is live


@pytest.mark.parametrize("live", [made("sparse_coo", 1), torch.zeros(4, 6)])
def test_a_tensor_that_is_tied_now_is_not_filled_from_two_stored_ones_that_differ(live: torch.Tensor) -> None:
    saved = save({"a": made("sparse_coo"), "b": made("sparse_coo", 2)})
    with pytest.raises(MismatchError, match="b: this tensor is tied to another one now"):
        saved.load({"a": live, "b": live}, cast=True)
    equal = save({"a": made("sparse_coo"), "b": made("sparse_coo")})
    equal.load({"a": live, "b": live}, cast=True)
    assert torch.equal(live.to_dense(), made("sparse_coo").to_dense())


@pytest.mark.parametrize("composite_first", [False, True])
def test_a_tensor_that_is_tied_now_does_not_get_the_values_of_a_composite_and_of_an_ordinary_one(
    *, composite_first: bool
) -> None:
    stored = {"a": torch.ones(4, 6), "b": made("sparse_coo")}
    live = torch.zeros(4, 6)
    target = dict.fromkeys(sorted(stored, reverse=composite_first), live)
    with pytest.raises(MismatchError, match="b and a share memory now, and were stored as different tensors"):
        save(stored).load(target, cast=True)
    assert not live.any()


def test_two_views_of_one_memory_do_not_get_the_values_of_two_composite_tensors() -> None:
    saved = save({"a": made("sparse_coo"), "b": made("sparse_coo", 2)})
    live = torch.zeros(24)
    with pytest.raises(MismatchError, match="a and b share memory now, and were stored as different tensors"):
        saved.load({"a": live.view(4, 6), "b": live.view(4, 6)}, cast=True)
    assert not live.any()
    equal = save({"a": made("sparse_coo"), "b": made("sparse_coo")})
    equal.load({"a": live.view(4, 6), "b": live.view(4, 6)}, cast=True)
    assert torch.equal(live.view(4, 6), made("sparse_coo").to_dense())


def test_what_shares_memory_and_is_reported_is_left_as_it_is_without_strict() -> None:
    live = torch.zeros(4, 6)
    target = {"a": live, "b": live, "c": torch.zeros(4, 6)}
    saved = save({"a": torch.ones(4, 6), "b": made("sparse_coo"), "c": made("sparse_coo", 2)})
    restoration = saved.prepare(target, strict=False, cast=True)
    saved.fill(restoration, cast=True)
    restoration.finish()
    assert restoration.mismatched == ("b and a share memory now, and were stored as different tensors",)
    assert not live.any()
    assert torch.equal(target["c"], made("sparse_coo", 2).to_dense())


def test_composite_2_without_strict_no_inner_tensor_is_loaded_beside_one_that_shares_memory() -> None:
    one, two = halves(2), halves(3)
    two.high = one.high
    before = [bytes_of(memory) for memory in (one.high, one.low, two.low)]
    saved = save({"one": halves(0), "two": halves(1), "x": torch.ones(1)}, classes=ALLOWED)
    restoration = saved.prepare({"one": one, "two": two, "x": torch.zeros(1)}, strict=False, classes=ALLOWED)
    saved.fill(restoration)
    restoration.finish()
    assert len(restoration.mismatched) == 1
    assert [bytes_of(memory) for memory in (one.high, one.low, two.low)] == before


@pytest.mark.parametrize("live", [made("sparse_coo", 1), torch.zeros(4, 6)], ids=["made anew", "converted"])
def test_without_strict_the_state_of_a_parameter_that_fits_in_part_stays_as_it_is(live: torch.Tensor) -> None:
    def optimizer_of(state: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.zeros(4, 6))
        optimizer = torch.optim.SGD([parameter])
        optimizer.state[parameter] = state
        return optimizer

    before = facts_of(live)
    saved = save({"o": optimizer_of({"a": made("sparse_coo"), "b": torch.ones(3)}), "x": torch.ones(1)})
    saved.load({"o": optimizer_of({"a": live, "b": torch.zeros(5)}), "x": torch.zeros(1)}, strict=False, cast=True)
    assert facts_of(live) == before


def test_tied_dtensors_do_not_get_the_values_of_a_composite_and_of_an_ordinary_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        live = torch.zeros(4, 6)
        tied = distribute_tensor(live, DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(MismatchError, match="head and embedding share memory now"):
            save({"embedding": torch.ones(4, 6), "head": made("sparse_coo")}).load({"embedding": tied, "head": tied}, cast=True)
        assert not tied.to_local().any()
    finally:
        dist.destroy_process_group()


# --- conversions ------------------------------------------------------------------------------------------------------


def test_a_conversion_of_float64_loses_nothing() -> None:
    stored, live = torch.rand(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.float64)
    save({"x": stored.to_sparse()}).load({"x": live}, cast=True)
    assert torch.equal(live, stored)


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.ones(4, 6).to_sparse(), torch.zeros(6, 4)),
        (torch.ones(4, 6), halves(0, (6, 4))),
        (torch.ones(4, 6, dtype=torch.complex64).to_sparse(), torch.zeros(4, 6)),
        (torch.ones(4, 6).to_sparse(), torch.zeros(4, 6, device="meta")),
    ],
)
def test_another_shape_and_what_has_no_real_numbers_is_not_converted(stored: torch.Tensor, live: torch.Tensor) -> None:
    with pytest.raises(MismatchError, match=r"^[^@]*x: "):
        save({"x": stored}).load({"x": live}, cast=True, classes=ALLOWED)


# --- classes of the user's ------------------------------------------------------------------------------------------


def of_class(tensor: Any) -> tuple[Any, ...]:
    assert type(tensor) is Halves
    return bytes_of(tensor.high), bytes_of(tensor.low), tensor.recipe, tensor.requires_grad


def test_a_tensor_of_an_allowed_class_comes_back_bit_for_bit() -> None:
    saved = save({"x": halves(), "y": {"z": halves(1, recipe=Recipe(2, Rounding.DOWN))}}, classes=ALLOWED)
    assert set(saved.entries) == {"x.high", "x.low", "y.z.high", "y.z.low"}
    target: dict[str, Any] = {}
    saved.load(target, classes=ALLOWED)
    assert of_class(target["x"]) == of_class(halves())
    assert of_class(target["y"]["z"]) == of_class(halves(1, recipe=Recipe(2, Rounding.DOWN)))


def test_parameters_of_an_allowed_class_are_filled_in_place_and_stay_tied() -> None:
    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.one = nn.Parameter(halves(seed))
            self.two = self.one

    saved = save({"model": Model(0)}, classes=ALLOWED)
    assert [alias.fqn for alias in saved.aliases] == ["model.two.high", "model.two.low"]
    model = Model(1)
    before = model.one
    saved.load({"model": model}, classes=ALLOWED)
    assert model.one is before
    assert model.one is model.two
    assert of_class(model.one.detach()) == of_class(halves())


def test_another_context_is_taken_over_with_the_content() -> None:
    saved = save({"x": halves()}, classes=ALLOWED)
    live = halves(1, recipe=Recipe(4))
    saved.load({"x": live}, classes=ALLOWED)
    assert of_class(live) == of_class(halves())


def test_a_class_that_is_not_allowed_is_refused_at_the_save_and_at_the_load() -> None:
    with pytest.raises(StateError, match=r"^x: the class .*Halves is not allowed.*tensor_classes=\[Halves\]"):
        save({"x": halves()})
    with pytest.raises(StateError, match=r"^x: the context .*Recipe, a class that may not be stored"):
        save({"x": halves()}, classes=TensorClasses.of([Halves]))
    saved = save({"x": halves()}, classes=ALLOWED)
    with pytest.raises(MismatchError, match=r"x: it is of the class '.*:Halves', which is not allowed"):
        saved.load({})
    with pytest.raises(MismatchError, match=r"x: it is of the class '.*:Recipe', which is not allowed"):
        saved.load({}, classes=TensorClasses.of([Halves]))


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_live_tensor_does_not_hide_that_the_stored_class_is_not_allowed(*, is_plain: bool) -> None:
    live = torch.zeros(4, 6) if is_plain else halves(1)
    words = "tensor" if is_plain else r"tests\S*:Halves tensor"
    with pytest.raises(MismatchError, match=rf"and a {words} of .* is there now.*tensor_classes=\[Halves\]"):
        save({"x": halves()}, classes=ALLOWED).load({"x": live})


def test_a_class_that_was_moved_is_named_with_its_old_and_new_module(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Halves.__module__, "job.tensors"
    saved = save({"x": halves()}, classes=ALLOWED)
    monkeypatch.setattr(Halves, "__module__", new)
    with pytest.raises(
        MismatchError, match=rf"class '{old}:Halves', and tensor_classes has '{new}:Halves'.*__module__ to '{old}'"
    ):
        saved.load({"x": halves(1)}, classes=TensorClasses.of(OWN))
    monkeypatch.setattr(Halves, "__module__", old)
    live = halves(1)
    saved.load({"x": live}, classes=TensorClasses.of(OWN))
    assert of_class(live) == of_class(halves())


# --- trees that no save makes ---------------------------------------------------------------------------------------


def forged(saved: Saved, **changes: Any) -> Saved:
    """`saved` with changes to the composite tensor at `x`."""
    assert isinstance(saved.tree, tree.Dict)
    parts: dict[Any, Any] = dict(saved.tree.items)
    node = dict(parts["state"].items)["x"]
    state = tree.Dict("dict", (("x", msgspec.structs.replace(node, **changes)),))
    return Saved(saved.data, saved.entries, saved.aliases, tree.Dict("dict", (("state", state), ("client_state", None))), ())


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "torch:Tensor", "torch.nn:Linear", "", "torchao.optim:Evil"])
def test_a_tree_that_names_any_other_class_makes_nothing_of_it(name: str) -> None:
    saved = forged(save({"x": made("sparse_coo")}), kind=name)
    with pytest.raises(MismatchError, match="not allowed"):
        saved.load({})


def test_a_tree_whose_context_names_any_other_class_makes_nothing_of_it() -> None:
    bad = tree.Dict("dict", (("recipe", tree.Named("subprocess:Popen", (("args", "true"),))),))
    saved = forged(save({"x": halves()}, classes=ALLOWED), context=bad)
    with pytest.raises(MismatchError, match="subprocess:Popen', which is not allowed"):
        saved.load({}, classes=ALLOWED)


def test_a_context_whose_class_cannot_be_made_of_its_fields_is_an_error() -> None:
    bad = tree.Dict("dict", (("recipe", tree.Named(f"{Recipe.__module__}:Recipe", (("lock", 1),))),))
    with pytest.raises(FormatError, match="cannot be made"):
        forged(save({"x": halves()}, classes=ALLOWED), context=bad).load({}, classes=ALLOWED)


def test_inner_tensors_that_are_missing_or_unknown_are_an_error() -> None:
    saved = save({"x": made("sparse_coo")})
    assert isinstance(saved.tree, tree.Dict)
    parts: Any = dict(saved.tree.items)
    inner = dict(parts["state"].items)["x"].inner
    for wrong in ((), inner[:1], (*inner, ("more", inner[0][1])), (inner[0], inner[0])):
        with pytest.raises(FormatError, match="cannot have the inner tensors"):
            forged(saved, inner=wrong).load({})
    with pytest.raises(FormatError, match="not stored"):
        forged(saved, inner=(inner[0], ("values", tree.Tensor("y")))).load({})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        ("sparse_coo", "indices"),
        ("sparse_csr", "col_indices"),
        ("sparse_bsc", "ccol_indices"),
        ("jagged", "offsets"),
    ],
)
def test_indices_that_point_outside_are_an_error_before_anything_uses_them(kind: str, inner: str, *, in_place: bool) -> None:
    saved = quietly(lambda: save({"x": made(kind)}))
    fqn = f"x.{inner}"
    saved.data[fqn] = b"\x7f" * len(saved.data[fqn])
    target = {"x": made(kind)} if in_place else {}
    with pytest.raises(FormatError, match=r"^x: the stored .* (contradicts itself|cannot be made)"):
        quietly(lambda: saved.load(target))


def test_a_nested_tensor_whose_components_lie_outside_its_buffer_is_an_error() -> None:
    saved = quietly(lambda: save({"x": made("nested")}))
    context = tree.Dict(
        "dict",
        tuple(
            (name, tree.Sequence("list", values))
            for name, values in (
                ("sizes", (tree.Sequence("list", (1000, 3)),)),
                ("strides", (tree.Sequence("list", (3, 1)),)),
                ("offsets", (0,)),
            )
        ),
    )
    with pytest.raises(FormatError, match="outside the buffer"):
        quietly(lambda: forged(saved, context=context).load({}))


# --- classes that lie -----------------------------------------------------------------------------------------------


class Lying(Halves):
    """`answer` is what its `__tensor_flatten__` returns."""

    answer: Any = None

    def __tensor_flatten__(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RuntimeError("no"), "__tensor_flatten__ failed: RuntimeError: no"),
        (None, "failed: TypeError"),
        (([], None), r"returned \[\]"),
        (("high", None), "returned 'high'"),
        ((["high", "none"], None), "names 'none', which are not its inner tensors"),
        ((["high", "high"], None), "not its inner tensors"),
        ((["high", "recipe"], None), "names 'recipe'"),
        ((["high", "low"], object()), "the context of this tensor holds a object"),
        ((["high", "low"], [lambda: 1]), "the context of this tensor holds a function"),
    ],
)
def test_a_class_whose_flatten_lies_is_refused_by_name(answer: Any, words: str) -> None:
    tensor = Lying.of(torch.ones(2))
    tensor.answer = answer
    with pytest.raises(StateError, match=rf"^x: .*{words}"):
        save({"x": tensor}, classes=TensorClasses.of([Lying, *OWN]))


def test_a_class_that_unflattens_into_something_else_is_an_error() -> None:
    saved = save({"x": halves()}, classes=ALLOWED)
    other = forged(saved, shape=(5, 3))
    with pytest.raises(FormatError, match=r"made a torch.float32\[3, 5\] in place of torch.float32\[5, 3\]"):
        other.load({}, classes=ALLOWED)


class Copying(Halves):
    """Its flatten names a property that makes a new tensor at each access."""

    @property
    def copied(self) -> torch.Tensor:
        return self.high.clone()

    def __tensor_flatten__(self) -> Any:
        return ["copied", "low"], {"recipe": self.recipe}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Copying:
        return cls(inner["copied"], inner["low"], context["recipe"])


def test_inner_tensors_that_are_copies_are_not_filled_in_vain() -> None:
    classes = TensorClasses.of([Copying, *OWN])
    saved = save({"x": Copying.of(halves().dequantize())}, classes=classes)
    live = Copying.of(torch.zeros(3, 5))
    saved.load({"x": live}, classes=classes)
    assert bytes_of(live.high) == bytes_of(halves().high)


# --- the walk -------------------------------------------------------------------------------------------------------


def test_a_tensor_that_contains_itself_is_refused() -> None:
    one = halves()
    two = Halves(one.high, one.low, Recipe(8))
    two.high = Halves(two, one.low, Recipe(8))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="contains itself"):
        capture(OrderedDict(x=two), None, exclude_frozen_parameters=False, classes=ALLOWED)


# --- sizes that no memory has -----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_sizes_that_nobody_has_memory_for_end_in_an_error_before_they_are_allocated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.client.restore.matching.hostile_sizes"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = [line.split("\t")[1] for line in done.stdout.splitlines()]
    assert {"StateError", "FormatError", "MismatchError"} < set(outcomes)
