"""ALLOWED-1 and ALLOWED-2, and CONTEXT-1 of contexts.py: which classes are stored and made."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from checkpointd.errors import FormatError, StateError, UsageError
from checkpointd.layout import tree
from checkpointd_client.capture.tensor_kinds import contexts
from checkpointd_client.capture.tensor_kinds.classes import BUILT_IN, ONLY_BUILT_IN, TensorClasses
from tests.unit.client.capture_and_fill import same, save
from tests.unit.client.composite_tensors import OWN, Halves, Recipe, Rounding, halves


@pytest.mark.parametrize("wrong", [[int], [torch.Tensor], ["Halves"], [halves()], 3])
def test_what_is_no_class_of_tensors_or_contexts_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"tensor_classes (has|is)"):
        TensorClasses.of(wrong)


def test_a_class_of_the_same_name_is_another_class() -> None:
    other = type("Halves", (Halves,), {"__module__": Halves.__module__, "__qualname__": Halves.__qualname__})
    assert TensorClasses.of([Halves]).kind_of(halves()) is not None
    assert TensorClasses.of([other]).kind_of(halves()) is None


def test_a_class_that_is_allowed_and_not_imported_is_named_and_not_imported() -> None:
    missing = [name for name in BUILT_IN if name.partition(":")[0] not in sys.modules]
    for name in missing:
        module = name.partition(":")[0]
        with pytest.raises(StateError, match=rf"has not imported: import {module} before the load"):
            ONLY_BUILT_IN.kind(name)
        assert module not in sys.modules


def test_a_context_comes_back_with_its_classes() -> None:
    classes = TensorClasses.of(OWN)
    context = {"recipe": Recipe(4, Rounding.DOWN), "more": [(1, None), torch.Size((2, 3)), torch.float16, "x"]}
    node = contexts.encode(context, "x", classes.allows)
    assert contexts.decode(tree.decode(tree.encode(node)), classes.in_context) == context


@pytest.mark.parametrize(
    "node",
    [
        tree.Sequence("set", ()),
        tree.Named(contexts.name_of(Halves), ()),
        tree.Named(contexts.name_of(Rounding), (("name", "UP"),)),
        tree.Member(Rounding.__module__, "Rounding", "DOWN", 1),
        tree.Tensor("x"),
    ],
)
def test_a_context_that_no_save_makes_is_an_error(node: tree.Node) -> None:
    with pytest.raises(FormatError):
        contexts.decode(node, TensorClasses.of(OWN).in_context)


class Manifold(nn.Parameter):
    """One tensor, as nn.Parameter; it knows more about itself."""


def of_manifold() -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = Manifold(model.weight.detach())
    model.weight.of = "sphere"
    return model


def test_an_allowed_subclass_of_parameter_is_filled_in_place_with_its_optimizer() -> None:
    classes, trained, mine = TensorClasses.of([Manifold]), of_manifold(), of_manifold()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (trained, mine)]
    trained(torch.ones(3)).sum().backward()
    optimizers[0].step()
    weight = mine.weight
    save({"m": trained, "o": optimizers[0]}, classes=classes).load({"m": mine, "o": optimizers[1]}, classes=classes)
    assert mine.weight is weight
    assert (type(weight), weight.of) == (Manifold, "sphere")
    assert same(dict(mine.state_dict()), dict(trained.state_dict()))
    assert same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


def test_the_refusal_names_what_works_in_a_module_and_what_elsewhere() -> None:
    with pytest.raises(StateError, match=r"m\.weight: .*tensor_classes=\[Manifold\].*exclude_frozen_parameters=True"):
        save({"m": of_manifold()})
    with pytest.raises(StateError, match=r"x: .*as_subclass\(torch.Tensor\)"):
        save({"x": Manifold(torch.ones(1))}, classes=TensorClasses.of([Manifold]))
    frozen = of_manifold().requires_grad_(False)
    assert save({"m": frozen}, exclude_frozen=True).excluded == ("m.weight", "m.bias")
