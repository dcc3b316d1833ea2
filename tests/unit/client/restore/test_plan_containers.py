"""Deques, named tuples and namespaces in a state: their tensors are filled in place, and what does not fit is named."""

from __future__ import annotations

import argparse
import collections
import enum
import io
from collections import deque
from datetime import UTC, datetime
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from checkpointd.errors import FormatError, MismatchError, StateError
from checkpointd.layout import tree
from checkpointd_client import RngState
from checkpointd_client.capture.plain.classes import StoredMember
from checkpointd_client.restore import building
from tests.unit.client.capture_and_fill import save


class Batch(NamedTuple):
    tokens: torch.Tensor
    mask: torch.Tensor | None
    name: str = "b"


class Phase(enum.Enum):
    WARMUP = 1
    MAIN = 2


def everything(value: float) -> dict[str, Any]:
    memory = torch.full((4,), value)
    return {
        "recent": deque([memory, torch.full((2,), value)], maxlen=3),
        "losses": deque([value, 2.0], maxlen=5),
        "batch": Batch(torch.full((2,), value), None, f"name {value}"),
        "args": argparse.Namespace(lr=value, weights=memory, model=SimpleNamespace(depth=int(value))),
        "phase": Phase(1 + int(value) % 2),
        "table": {Phase.WARMUP: torch.full((3,), value), datetime(2026, 1, 1, tzinfo=UTC): 1, PurePosixPath("a/b"): value},
        "log": bytearray(b"x" * int(value)),
        "buffer": io.BytesIO(b"y" * int(value)),
        "array": deque([np.full(2, value)]),
    }


def test_everything_comes_back_anew_with_its_class() -> None:
    found: dict[str, Any] = {}
    save(everything(7.0)).load(found)
    assert list(found) == list(everything(7.0))
    assert found["recent"].maxlen == 3
    assert found["losses"] == deque([7.0, 2.0])
    assert (type(found["batch"]), found["batch"].name, found["batch"].mask) == (Batch, "name 7.0", None)
    assert found["batch"].tokens.tolist() == [7.0, 7.0]
    assert (type(found["args"]), type(found["args"].model)) == (argparse.Namespace, SimpleNamespace)
    assert (found["args"].lr, found["args"].model.depth) == (7.0, 7)
    assert found["args"].weights.data_ptr() == found["recent"][0].data_ptr()  # they were tied
    assert found["phase"] is Phase.MAIN
    assert list(found["table"]) == [Phase.WARMUP, datetime(2026, 1, 1, tzinfo=UTC), PurePosixPath("a/b")]
    assert (found["log"], found["buffer"].getvalue()) == (bytearray(b"x" * 7), b"y" * 7)


def test_tensors_have_names_like_those_in_lists_and_dicts() -> None:
    saved = save(everything(7.0))
    names = {"recent.0", "recent.1", "batch.0", "table.Phase.WARMUP", "array.0"}
    assert saved.entries.keys() == names
    assert [(alias.fqn, alias.owner) for alias in saved.aliases] == [("args.weights", "recent.0")]


def test_objects_that_are_there_are_filled_in_place() -> None:
    target = everything(1.0)
    before = dict(target)
    tensors = [target["recent"][0], target["batch"].tokens, target["args"].weights, target["table"][Phase.WARMUP]]
    array = target["array"][0]
    save(everything(7.0)).load(target)
    for name in ("recent", "losses", "args", "table", "log", "buffer", "array"):
        assert target[name] is before[name], name
    assert [tensor.tolist()[:2] for tensor in tensors] == [[7.0, 7.0]] * 4
    assert target["batch"].tokens is tensors[1]
    assert (type(target["batch"]), target["batch"].name) == (Batch, "name 7.0")
    assert array.tolist() == [7.0, 7.0]
    assert target["losses"] == deque([7.0, 2.0])
    assert (target["args"].lr, target["args"].model.depth) == (7.0, 7)
    assert (target["log"], target["buffer"].getvalue()) == (bytearray(b"x" * 7), b"y" * 7)


def test_modules_and_optimizers_in_them_are_found() -> None:
    def made(value: float) -> tuple[SimpleNamespace, nn.Linear, torch.optim.SGD]:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, value)
        optimizer = torch.optim.SGD(model.parameters(), lr=value)
        return SimpleNamespace(parts=deque([model]), optimizer=optimizer), model, optimizer

    saved = save({"run": made(3.0)[0]})
    assert saved.entries.keys() == {"run.parts.0.weight", "run.parts.0.bias"}
    run, model, optimizer = made(1.0)
    saved.load({"run": run})
    assert model.weight.tolist() == [[3.0, 3.0]]
    assert optimizer.param_groups[0]["lr"] == 3.0


def test_a_namespace_with_functions_of_an_object_is_an_object() -> None:
    rng = RngState()
    duck = SimpleNamespace(state_dict=rng.state_dict, load_state_dict=rng.load_state_dict)
    saved, drawn = save({"rng": duck}), torch.rand(2)
    saved.load({"rng": duck})
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize(
    ("stored", "live", "words"),
    [
        (deque([1], maxlen=3), deque([2], maxlen=4), "a deque with maxlen 3 is stored, and 4 is there now"),
        (deque([torch.ones(1)]), deque([torch.ones(2)]), r"v\.0: shape \(1,\) is stored"),
        (deque([1]), [1], "a deque is stored, and list is there now"),
        ([1], deque([1]), "a list is stored, and collections.deque is there now"),
        (
            Batch(torch.ones(1), None),
            (torch.ones(1), None, "b"),
            r"Batch of \(tokens, mask, name\) is stored, and tuple is there",
        ),
        ((1, 2, 3), Batch(torch.ones(1), None), "a tuple is stored"),
        (SimpleNamespace(a=1), {"a": 2}, "a SimpleNamespace is stored, and dict is there now"),
        ({"a": 1}, SimpleNamespace(a=2), "a dict is stored"),
        (SimpleNamespace(a=1), argparse.Namespace(a=1), "a SimpleNamespace is stored, and argparse.Namespace is there now"),
        (SimpleNamespace(a=1), SimpleNamespace(b=1), r"v\.b: missing from the checkpoint"),
        (Phase.MAIN, [1], r"the value <Phase.MAIN: 2> is stored, and list is there now"),
    ],
)
def test_what_does_not_fit_is_named(stored: object, live: object, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        save({"v": stored}).load({"v": live})


def test_a_named_tuple_of_another_class_with_the_same_fields_does_not_fit() -> None:
    other = collections.namedtuple("other", Batch._fields)
    with pytest.raises(
        MismatchError, match=r"named tuple .*Batch of \(tokens, mask, name\) is stored, and .*other is there now"
    ):
        save({"v": Batch(torch.ones(1), None)}).load({"v": other(1, 2, 3)})


def test_a_value_whose_class_is_gone_ends_the_load_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save({"w": torch.ones(2)}, {"phase": Phase.MAIN, "batch": Batch(torch.ones(1), None)})
    monkeypatch.delitem(globals(), "Phase")
    target = {"w": torch.zeros(2)}
    with pytest.raises(StateError, match=r"Phase is stored, and this process does not have the class"):
        saved.load(target)
    assert target["w"].tolist() == [0.0, 0.0]


def test_a_cycle_is_refused() -> None:
    ring: deque[object] = deque()
    ring.append(ring)
    loop = SimpleNamespace()
    loop.self = loop
    for value in (ring, loop):
        with pytest.raises(StateError, match="contains itself"):
            save({"v": value})


def test_a_state_dict_in_them_is_refused_as_anywhere() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for value in (deque([optimizer.state_dict()]), SimpleNamespace(a=optimizer.state_dict())):
        with pytest.raises(StateError, match="is the state_dict\\(\\) of an optimizer"):
            save({"v": value})


@pytest.mark.parametrize(
    "node",
    [
        tree.Deque("deque", (1, 2), 1),
        tree.Deque("deque", (), -1),
        tree.Deque("deque", (), 1 << 63),
        tree.NamedTuple("namedtuple", (1,), __name__, "Batch", ("tokens", "mask", "name")),
        tree.Dict("SimpleNamespace", ((1, 2),)),
        tree.Sequence("set", (tree.LibraryValue("bytearray", (tree.Bytes(b""),)),)),
    ],
)
def test_a_container_that_contradicts_itself_is_refused(node: tree.Node) -> None:
    with pytest.raises(FormatError):
        building.value_of(node)


def test_a_namespace_with_a_name_of_pythons_own_changes_no_class() -> None:
    found = building.value_of(tree.Dict("Namespace", (("__class__", "str"), ("__dict__", 1))))
    assert type(found) is argparse.Namespace
    assert vars(found) == {"__class__": "str", "__dict__": 1}


def test_plain_values_stand_in_for_classes_that_are_not_there() -> None:
    node = tree.Dict(
        "dict",
        (
            (tree.Member("gone", "Phase", "MAIN", 2), tree.NamedTuple("namedtuple", (1, 2), "gone", "Pair", ("x", "y"))),
            ("known", tree.Member(__name__, "Phase", "MAIN", 2)),
        ),
    )
    assert building.value_of(node) == {StoredMember("gone.Phase", "MAIN", 2): {"x": 1, "y": 2}, "known": Phase.MAIN}
