"""The state tree: every value comes back bit for bit and in kind; what is no tree is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.tree import Node

texts = st.text(st.characters(codec="utf-8"), max_size=10)
floats = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
overlaps = st.none() | st.builds(
    tree.Overlap,
    group=st.integers(0, 9),
    offset=st.integers(0, 2**40),
    stride=st.lists(st.integers(-(2**40), 2**40), max_size=3).map(tuple),
    conjugate=st.booleans(),
    negative=st.booleans(),
)
splits = st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9))
leaves: st.SearchStrategy[Node] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    floats,
    texts,
    st.builds(tree.Tensor, fqn=texts, requires_grad=st.booleans(), device=texts, overlap=overlaps),
    st.builds(
        tree.MeshTensor,
        fqn=texts,
        requires_grad=st.booleans(),
        device=texts,
        overlap=overlaps,
        mesh=st.lists(st.tuples(st.integers(1, 2**20), st.none() | texts), max_size=3).map(tuple),
        placements=st.lists(splits, max_size=3).map(tuple),
    ),
    st.builds(tree.Array, fqn=texts, dtype=texts, overlap=overlaps),
    st.builds(tree.NumpyScalar, dtype=texts, data=st.binary(max_size=16)),
    st.builds(tree.Bytes, data=st.binary(max_size=16)),
    st.builds(tree.BigInt, hexadecimal=st.integers().map(lambda n: format(n << 64, "x"))),
    st.builds(tree.Complex, real=floats, imag=floats),
    st.builds(tree.TorchName, kind=st.sampled_from(["dtype", "device", "layout", "memory_format"]), name=texts),
)
trees: st.SearchStrategy[Node] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            tree.Dict,
            kind=st.sampled_from(["dict", "OrderedDict", "Counter", *tree.NAMESPACES]),
            items=st.lists(st.tuples(inner, inner), max_size=4).map(tuple),
        ),
        st.builds(
            tree.Sequence,
            kind=st.sampled_from(["list", "tuple", "set", "frozenset", "Size"]),
            items=st.lists(inner, max_size=4).map(tuple),
        ),
        st.builds(
            tree.Deque,
            kind=st.just("deque"),
            items=st.lists(inner, max_size=4).map(tuple),
            maxlen=st.none() | st.integers(0, 9),
        ),
        st.builds(
            tree.NamedTuple,
            kind=st.just("namedtuple"),
            items=st.lists(inner, max_size=4).map(tuple),
            module=texts,
            qualname=texts,
            fields=st.lists(texts, max_size=4).map(tuple),
        ),
        st.builds(tree.Member, module=texts, qualname=texts, name=st.none() | texts, value=inner),
        st.builds(tree.LibraryValue, kind=st.sampled_from(["datetime", "slice"]), parts=st.lists(inner, max_size=3).map(tuple)),
    ),
    max_leaves=20,
)


def nested(depth: int) -> bytes:
    """`depth` lists inside one another, the innermost with one None."""
    return b"\x93\xa1L\xa4list\x91" * depth + b"\xc0"


@given(trees)
def test_a_tree_comes_back_in_kind_and_bit_for_bit(root: Node) -> None:
    data = tree.encode(root)
    found = tree.decode(data)
    assert type(found) is type(root)
    # Not ==, which takes True for 1 and no NaN for itself: the bytes tell all of them apart.
    assert tree.encode(found) == data
    assert repr(found) == repr(root)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_tree_or_are_refused(data: bytes) -> None:
    try:
        found = tree.decode(data)
    except FormatError:
        return
    tree.encode(found)


@given(trees, st.data())
def test_a_tree_with_bytes_changed_is_read_or_refused(root: Node, data: st.DataObject) -> None:
    changed = bytearray(tree.encode(root))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        tree.decode(bytes(changed))
    except FormatError:
        return


@pytest.mark.parametrize(
    "node",
    [
        ["X", "unknown kind"],
        ["T"],
        ["T", 7],
        ["T", "w", "yes"],
        ["T", "w", True, "cpu", None, "one too many"],
        ["D", "UserDict", []],
        ["D", "dict", {"a": 1}],
        ["D", "dict", [["key alone"]]],
        ["L", "deque", []],
        ["Q", "list", [], None],
        ["Q", "deque", [], "many"],
        ["U", "tuple", [], "m", "C", []],
        ["E", "os", "system"],
        ["V", "os.system", ["id"]],
        ["Y", "class", "os.system"],
        ["C", 1.0],
        ["B", "text"],
        [],
        {"a": 1},
        [["T", "w"]],
    ],
)
def test_what_is_no_node_is_refused(node: object) -> None:
    with pytest.raises(FormatError, match=r"the state tree in model\.index cannot be read"):
        tree.decode(msgspec.msgpack.encode(node), "model.index")


def test_what_a_writer_may_nest_is_read() -> None:
    assert tree.encode(tree.decode(nested(tree.DEPTH_MAX - 1))) == nested(tree.DEPTH_MAX - 1)


@pytest.mark.parametrize("depth", [tree.DEPTH_MAX, 500, 1000, 100_000, 1_000_000])
def test_what_is_nested_too_deeply_is_refused_at_any_depth(depth: int) -> None:
    with pytest.raises(FormatError, match=r"nested deeper|recursion"):
        tree.decode(nested(depth))


@pytest.mark.parametrize(
    "around",
    [
        lambda node: tree.Sequence("tuple", (node,)),
        lambda node: tree.Member("m", "C", "A", node),
        lambda node: tree.LibraryValue("slice", (None, node, None)),
    ],
)
def test_nesting_in_keys_members_and_values_counts_as_well(around: Callable[[Node], Node]) -> None:
    key: Node = None
    for _ in range(tree.DEPTH_MAX):
        key = around(key)
    with pytest.raises(FormatError, match="nested deeper"):
        tree.decode(tree.encode(tree.Dict("dict", ((key, 1),))))
