"""RESTORE-1 of plan.py: what does not fit is found before anything is touched, all of it; impossible trees are refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpointd.errors import FormatError, MismatchError, StateError
from checkpointd.layout import indexes, tree
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.plan import LoadOptions, Restoration
from checkpointd_client.restore.plan import prepare as prepare_content
from checkpointd_client.restore.stored import Entries
from tests.unit.client.capture_and_fill import Saved, bytes_of, same, save


def prepare(target: dict[str, Any], root: tree.Node, entries: Entries, aliases: tuple[indexes.Alias, ...] = ()) -> Restoration:
    """What a checkpoint of one rank with this tree and these tensors would load into `target`."""
    content = RankContent(root=root, entries=entries, owners={}, aliases=aliases, excluded=())
    return prepare_content(target, content, LoadOptions())


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
    target: dict[str, Any] = {"d": {"a": 1}, "l": [1], "t": (1, [2]), "m": nn.Linear(2, 2), "o": None}
    before = copy.deepcopy({key: value for key, value in target.items() if key != "m"})
    weights = bytes_of(target["m"].weight)
    save({"d": {"a": 2}, "l": [3, 4], "t": (5, [6]), "m": nn.Linear(2, 2), "o": torch.ones(1)}).prepare(target)
    assert same({key: value for key, value in target.items() if key != "m"}, before)
    assert bytes_of(target["m"].weight) == weights


@pytest.mark.parametrize(
    ("stored", "live", "words"),
    [
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


def test_a_lazy_module_must_have_been_run_if_its_optimizer_is_loaded() -> None:
    """Its module gives it a shape only once it is loaded."""
    trained, lazy = nn.Linear(2, 2), nn.LazyLinear(2)
    saved = save({"m": trained, "o": torch.optim.SGD(trained.parameters(), 0.5)})
    with pytest.raises(StateError, match="run one forward pass"):
        saved.prepare({"m": lazy, "o": torch.optim.SGD(lazy.parameters(), 0.5)})


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
        stored(tree.NumpyScalar("f4,(1", b"12345678")),
        stored(tree.Array("x", "f4,(1")),
        stored(tree.NumpyScalar("<f8", b"1")),
        stored(tree.BigInt("xyz")),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(root: tree.Node) -> None:
    target: dict[str, Any] = {"x": None}
    with pytest.raises(FormatError):
        prepare(target, root, {"x": ("float32", (2,))})
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
    alias = indexes.Alias("x", "owner", shape, stride, offset)
    with pytest.raises(FormatError, match="shares memory outside owner"):
        prepare({"x": None}, stored(tree.Tensor("x")), {"owner": ("float32", (2,))}, (alias,))


@pytest.mark.parametrize("dtype", ["float7", "qint8", "os"])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(FormatError, match=dtype):
        prepare({"x": None}, stored(tree.Tensor("x")), {"x": (dtype, (2,))})


@pytest.mark.parametrize("device", ["cuda", "nn", "meta", "privateuseone"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the tensor goes back to the device")
def test_what_was_on_a_device_that_is_not_here_comes_to_the_host(device: str) -> None:
    target: dict[str, Any] = {"x": None}
    prepare(target, stored(tree.Tensor("x", device=device)), {"x": ("int64", (2,))}).finish()
    assert target["x"].device.type == "cpu"


def test_a_tensor_larger_than_any_memory_is_refused() -> None:
    with pytest.raises(StateError, match="x: there is no memory on cpu"):
        prepare({"x": None}, stored(tree.Tensor("x")), {"x": ("int64", (2**62,))})


def test_a_tree_deeper_than_pythons_stack_is_refused() -> None:
    node: tree.Node = None
    for _ in range(2000):
        node = tree.Sequence("list", (node,))
    with pytest.raises(FormatError, match="nested too deeply"):
        prepare({"x": None}, stored(node), {})


def test_gradients_are_not_asked_of_what_cannot_have_them() -> None:
    target: dict[str, Any] = {"x": None}
    prepare(target, stored(tree.Tensor("x", True)), {"x": ("int64", (2,))}).finish()
    assert not target["x"].requires_grad


def test_of_many_mismatches_the_first_ten_are_told_and_all_are_kept() -> None:
    saved = save({f"w{number}": torch.ones(2) for number in range(37)})
    with pytest.raises(MismatchError, match="differ in 37 places; nothing was loaded") as raised:
        saved.prepare({f"w{number}": torch.ones(3) for number in range(37)})
    assert len(raised.value.mismatches) == 37
    assert [line.strip() for line in str(raised.value).splitlines()[1:]] == list(raised.value.mismatches[:10])
