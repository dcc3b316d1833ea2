"""Whatever state, whatever memory: what is captured, written and loaded again is what it was, to the bit."""

from __future__ import annotations

import collections
import contextlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from checkpointd.errors import MismatchError, StateError
from checkpointd_client.capture.dtypes import DTYPES, NAMES
from tests.unit.client.capture_and_fill import Saved, bytes_of, same, save, tensor_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
keys = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.tuples(texts, st.integers()), st.floats(allow_nan=False))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    st.sampled_from(
        [torch.bfloat16, torch.device("cpu"), torch.Size([1, 2]), np.float32(-0.0), np.int16(-3), np.datetime64("NaT")]
    ),
)
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(shapes)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if tensor.is_floating_point() and dtype.itemsize > 1 and draw(st.booleans()):
        tensor.requires_grad_()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["<f4", ">f8", "|b1", "<u8", ">i2", "<c8", "<M8[s]", "<U2", "|S3", "<f2"])))
    shape = draw(shapes)
    count = int(np.prod(shape, dtype=int))
    if dtype.kind in "US":
        return np.array(draw(st.lists(st.text("ab", max_size=2), min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array.copy(order=draw(st.sampled_from("CF"))) if draw(st.booleans()) else array


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=3).map(collections.OrderedDict),
        st.dictionaries(texts, st.integers(), max_size=3).map(collections.Counter),
        st.frozensets(st.one_of(st.integers(), texts), max_size=3),
        st.sets(st.one_of(st.integers(), texts), max_size=3),
    )


values = st.recursive(st.one_of(scalars, tensors(), arrays()), containers, max_leaves=12)
states = st.dictionaries(texts.filter(lambda name: name != "client_state"), values, max_size=4)


def saved_unless_names_collide(state: dict[str, Any], client: dict[str, Any] | None = None) -> Saved:
    try:
        return save(state, client)
    except StateError as error:
        assume("would get this name" not in str(error))
        raise


def bare(value: Any) -> Any:
    """`value` as a load makes it anew: contiguous, with every FQN's own memory."""
    if isinstance(value, torch.Tensor):
        made = tensor_of(bytes_of(value), NAMES[value.dtype], tuple(value.shape))
        return made.requires_grad_(value.requires_grad) if value.requires_grad else made
    if isinstance(value, np.ndarray):
        return np.array(value, order="C")
    if isinstance(value, collections.Counter | set | frozenset | torch.Size):
        return value
    if isinstance(value, dict):
        return type(value)((key, bare(child)) for key, child in value.items())
    return type(value)(map(bare, value)) if isinstance(value, list | tuple) else value


def zeroed(value: Any) -> Any:
    """A template of the same structure with other content."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.numel() * value.itemsize, dtype=torch.uint8).view(value.dtype).view(value.shape)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, collections.Counter):
        return collections.Counter({"old": 1})
    if isinstance(value, dict):
        return type(value)((key, zeroed(child)) for key, child in value.items())
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map(zeroed, value))
    if isinstance(value, set | frozenset):
        return type(value)({"old"})
    return torch.Size([]) if isinstance(value, torch.Size) else 0


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states, st.none() | states)
def test_every_state_comes_back_anew(state: dict[str, Any], client: dict[str, Any] | None) -> None:
    saved = saved_unless_names_collide(state, client)
    target: dict[str, Any] = dict.fromkeys(state)
    loaded = saved.load(target)
    assert same(target, bare(state))
    assert same(loaded, bare(client or {}))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states)
def test_every_state_comes_back_in_place(state: dict[str, Any]) -> None:
    saved = saved_unless_names_collide(state)
    target = zeroed(state)
    restoration = saved.prepare(target)
    assert same(target, zeroed(state))
    saved.fill(restoration)
    restoration.finish()
    assert save(target).data == saved.data
    assert same(_without_gradients(target), _without_gradients(bare(state)))


def _without_gradients(value: Any) -> Any:
    """In place, requires_grad is the template's own affair."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict) and not isinstance(value, collections.Counter):
        return type(value)((key, _without_gradients(child)) for key, child in value.items())
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map(_without_gradients, value))
    return value


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states, states)
def test_what_does_not_fit_is_never_half_loaded(state: dict[str, Any], other: dict[str, Any]) -> None:
    """A state loaded into another one either fits, or is refused with nothing touched."""
    saved = saved_unless_names_collide(state)
    before = bare(other)
    with contextlib.suppress(MismatchError):
        saved.prepare(other)
    assert same(_without_gradients(bare(other)), _without_gradients(before))
    with contextlib.suppress(MismatchError):
        restoration = saved.prepare(other, strict=False)
        saved.fill(restoration)
        restoration.finish()
        return
    assert same(_without_gradients(bare(other)), _without_gradients(before))


ELEMENTS = 64
Layout = list[tuple[int, tuple[int, ...], tuple[int, ...]]]
"""Offset, shape and stride of views of one memory, overlapping each other and themselves in any way."""


def layouts(shapes: list[tuple[int, ...]]) -> st.SearchStrategy[Layout]:
    """Layouts of views of these shapes; the strides are small so that views meet often."""
    one = [
        st.tuples(st.integers(0, 6), st.just(shape), st.tuples(*(st.integers(0, 5) for _ in shape)))
        | st.just((0, shape, torch.empty(shape).stride()))
        for shape in shapes
    ]
    return st.tuples(*one).map(list)


view_shapes = st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=4)


def viewed(base: torch.Tensor, layout: Layout) -> dict[str, Any]:
    return {str(i): base.as_strided(shape, stride, offset) for i, (offset, shape, stride) in enumerate(layout)}


def all_bytes(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: bytes_of(view) for name, view in state.items()}


@example([(0, (2,), (2,)), (0, (), ()), (0, (), ())], torch.float32, False)
@example([(0, (2,), (0,)), (1, (), ()), (0, (2,), (0,))], torch.float32, False)
@given(view_shapes.flatmap(layouts), st.sampled_from([torch.float32, torch.complex64]), st.booleans())
def test_views_of_one_memory_come_back_in_place_anew_and_apart(layout: Layout, dtype: torch.dtype, with_base: bool) -> None:
    base, blank = torch.arange(ELEMENTS).to(dtype), torch.zeros(ELEMENTS, dtype=dtype)
    state, target = viewed(base, layout), viewed(blank, layout)
    if with_base:
        state["base"], target["base"] = base, blank
    saved = save(state)
    anew: dict[str, Any] = dict.fromkeys(state)
    apart = {name: torch.zeros(view.shape, dtype=dtype) for name, view in state.items()}
    for there in (target, anew, apart):
        saved.load(there)
        assert all_bytes(there) == all_bytes(state)


@given(view_shapes.flatmap(lambda shapes: st.tuples(layouts(shapes), layouts(shapes))))
def test_memory_laid_out_in_another_way_is_refused_or_comes_out_right(both: tuple[Layout, Layout]) -> None:
    state = viewed(torch.arange(float(ELEMENTS)), both[0])
    target = viewed(torch.zeros(ELEMENTS), both[1])
    saved = save(state)
    restoration = saved.prepare(target, strict=False)
    saved.fill(restoration)
    restoration.finish()
    refused = {name for words in restoration.mismatched for name in re.findall(r"\d+", words)}
    right = set(state) - refused
    assert all_bytes({name: target[name] for name in right}) == all_bytes({name: state[name] for name in right})
