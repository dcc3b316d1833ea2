"""How the values of a state tree are shown, which needs none of their classes."""

from __future__ import annotations

import pytest

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.tree import Node
from checkpointd.report.values import Value, values_of

TIME = "2026-01-01T12:00:00"


@pytest.mark.parametrize(
    ("node", "kind", "text"),
    [
        (tree.Member("job", "Phase", "MAIN", 2), "enum", "job.Phase.MAIN = 2"),
        (tree.Member("job", "Access", None, 0), "enum", "job.Access.None = 0"),
        (tree.NamedTuple("namedtuple", (1, 2), "job", "Pair", ("x", "y")), "namedtuple", "job.Pair(x=1, y=2)"),
        (tree.Deque("deque", (1, 2), 5), "deque", "[1, 2]"),
        (tree.LibraryValue("PosixPath", ("/a",)), "PosixPath", "/a"),
        (tree.LibraryValue("datetime", (TIME, 0, None)), "datetime", TIME),
        (
            tree.LibraryValue("datetime", (TIME, 1, tree.LibraryValue("ZoneInfo", ("Europe/Berlin",)))),
            "datetime",
            f"{TIME} Europe/Berlin fold=1",
        ),
        (tree.LibraryValue("timedelta", (1, 2, 3)), "timedelta", "1 d 2 s 3 us"),
        (tree.LibraryValue("timezone", (tree.LibraryValue("timedelta", (0, 3600, 0)), None)), "timezone", "0 d 3600 s 0 us"),
        (tree.LibraryValue("UUID", ("u", "unknown")), "UUID", "u"),
        (tree.LibraryValue("Fraction", (1, 3)), "Fraction", "1/3"),
        (tree.LibraryValue("slice", (None, 3, 1)), "slice", "(None, 3, 1)"),
        (tree.LibraryValue("bytearray", (tree.Bytes(b"ab"),)), "bytearray", "6162"),
        (tree.TorchName("memory_format", "channels_last"), "memory_format", "channels_last"),
        (True, "bool", "True"),
        (None, "None", "None"),
        (tree.BigInt("-0xffffffffffffffffffff"), "int", "-0xffffffffffffffffffff"),
        (tree.Complex(1.0, -2.0), "complex", "(1-2j)"),
        (tree.NumpyScalar("<f4", b"\x00\x00\x80\x3f"), "<f4", "0000803f"),
        (tree.Dict("OrderedDict", ()), "OrderedDict", "{}"),
        (tree.Sequence("list", ()), "list", "[]"),
    ],
)
def test_a_value_is_one_line(node: Node, kind: str, text: str) -> None:
    root = tree.Dict("dict", (("state", tree.Dict("dict", (("v", node),))),))
    assert list(values_of(root)) == [Value(path="v", kind=kind, text=text)]


def test_the_attributes_of_a_namespace_are_shown_like_the_items_of_a_dict() -> None:
    root = tree.Dict("dict", (("client_state", tree.Dict("Namespace", (("lr", 0.5), ("w", tree.Tensor("w"))))),))
    assert list(values_of(root)) == [Value(path="client_state.lr", kind="float", text="0.5")]


def test_names_that_are_too_long_together_are_refused_before_they_are_made() -> None:
    child = tree.Dict("dict", ())
    root = tree.Dict("dict", (("k" * 100_000, tree.Sequence("list", (child,) * 2_000)),))
    with pytest.raises(FormatError, match="without --values"):
        list(values_of(root))


def test_a_very_deep_tree_needs_no_recursion() -> None:
    node: Node = 1
    for _ in range(5000):
        node = tree.Dict("dict", (("a", node),))
    [value] = values_of(node)
    assert value.path == ".".join("a" * 5000)
