"""The containers that a state may hold, and the values in them."""

from __future__ import annotations

import argparse
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

NamespaceKind = Literal["SimpleNamespace", "Namespace"]
NAMESPACES: dict[type, NamespaceKind] = {types.SimpleNamespace: "SimpleNamespace", argparse.Namespace: "Namespace"}


def pairs_in(value: object) -> Iterable[tuple[Any, Any]]:
    """The values directly in a mapping, list, tuple, deque or namespace, each with its key, position or name.

    Nothing for any other object.
    """
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    return vars(value).items() if type(value) in NAMESPACES else ()


def is_container(value: object) -> bool:
    """Whether `pairs_in` looks into it."""
    return isinstance(value, Mapping | list | tuple | deque) or type(value) in NAMESPACES


def namespace(kind: str, attributes: Mapping[Any, Any]) -> Any:
    """A namespace with these attributes. TypeError if a name is no string."""
    if not all(type(name) is str for name in attributes):
        raise TypeError("an attribute has no name")
    made = next(cls for cls, name in NAMESPACES.items() if name == kind)()
    vars(made).update(attributes)  # not by setattr(): a name such as __class__ must not do anything
    return made
