"""Strides of dense tensors: which are possible, and the same order of dimensions for another shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import FormatError
from checkpointd.layout.strides import check_dense, contiguous_stride, stride_in_order_of

SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))))
def test_every_order_of_dimensions_is_dense_and_keeps_its_order_in_another_shape(made: tuple[list[int], list[int]]) -> None:
    shape, order = made
    turned = torch.empty(shape).permute(order)
    check_dense("x", turned.stride(), tuple(turned.shape))
    other = [n + 2 for n in turned.shape]
    again = torch.empty([other[order.index(dim)] for dim in range(len(order))]).permute(order)
    if 0 not in shape and 1 not in shape:
        assert stride_in_order_of(turned.stride(), other) == again.stride()
    check_dense("x", stride_in_order_of(turned.stride(), other), other)


@given(SHAPES)
def test_a_row_major_tensor_stays_row_major(shape: list[int]) -> None:
    assert stride_in_order_of(contiguous_stride(shape), shape) == contiguous_stride(shape)


@pytest.mark.parametrize(
    ("stride", "shape"),
    [
        ((1, 1), (2, 3)),
        ((3, 2), (2, 3)),
        ((6, 1), (2, 3)),
        ((0, 1), (2, 3)),
        ((-3, 1), (2, 3)),
        ((1,), (2, 3)),
        ((3, 1, 1), (2, 3)),
    ],
)
def test_strides_that_overlap_or_leave_gaps_are_damage(stride: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="which a tensor of shape"):
        check_dense("x", stride, shape)
