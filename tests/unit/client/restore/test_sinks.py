"""Sinks for host memory: any strides and dtype, whole or in part, from runs of elements in any order."""

from __future__ import annotations

import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.layout.boxes import Box
from checkpointd.pipeline.read.plan import ByteMemory
from checkpointd_client.capture.dtypes import NAMES
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.sinks import box_sink, host_sink, sink_for, sinks_for
from checkpointd_client.restore.uploads import Uploads

DTYPES = [torch.bool, torch.float16, torch.float32, torch.int64, torch.complex128]


def empty_like(source: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Memory of the same shape whose dimensions lie in this order."""
    shape = [source.shape[dim] for dim in order]
    return torch.zeros(shape, dtype=source.dtype).permute(*np.argsort(order).tolist())


@given(order=st.permutations(range(3)), dtype=st.sampled_from(DTYPES), cuts=st.sets(st.integers(1, 59)), seed=st.randoms())
def test_runs_of_elements_fill_a_tensor_of_any_strides(
    order: list[int], dtype: torch.dtype, cuts: set[int], seed: random.Random
) -> None:
    source = torch.arange(60).reshape(3, 4, 5).to(dtype)
    raw = source.reshape(-1).view(torch.uint8).numpy()
    target = empty_like(source, order)
    with Uploads(0) as uploads:
        sink = sink_for(target, "t", NAMES[dtype], uploads)
        ends = [0, *sorted(cuts), 60]
        runs = list(itertools.pairwise(ends))
        seed.shuffle(runs)
        for first, last in runs:
            sink(first * source.itemsize, raw[first * source.itemsize : last * source.itemsize])
    assert torch.equal(target, source)


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_a_box_fills_a_part_and_is_converted_where_that_was_asked_for(wanted: torch.dtype) -> None:
    stored = torch.arange(60.0).reshape(6, 10)
    target = torch.full((4, 8), -1, dtype=wanted)
    with Uploads(0) as uploads:
        sink = box_sink(target[1:, 2:5], Box((2, 4), (3, 3)), "t", "float32", uploads)
    sink(Box((3, 5), (2, 2)), stored[3:5, 5:7].numpy().view(np.uint32))
    expected = torch.full((4, 8), -1, dtype=wanted)
    expected[2:4, 3:5] = stored[3:5, 5:7].to(wanted)
    assert torch.equal(target, expected)


def test_a_sink_may_fill_the_conjugate_of_memory() -> None:
    source, memory = torch.randn(3, 4, dtype=torch.complex64), torch.zeros(3, 4, dtype=torch.complex64)
    host_sink(memory.conj(), Box((0, 0), (3, 4)), "complex64")(Box((0, 0), (3, 4)), source.numpy().view(np.uint64))
    assert torch.equal(memory, source.conj().resolve_conj())


def test_a_tensor_without_elements_takes_nothing() -> None:
    with Uploads(0) as uploads:
        sink_for(torch.zeros(0, 3).t(), "t", "float32", uploads)(0, np.zeros(0, dtype=np.uint8))


def test_the_sinks_of_many_tensors_are_their_own_memory_and_keep_it_alive() -> None:
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(2, 4).t(), torch.zeros(5, dtype=torch.bfloat16)[1:]]
    targets = [Target(str(i), tensor) for i, tensor in enumerate(tensors)]
    entries = {target.fqn: (NAMES[target.tensor.dtype], tuple(target.tensor.shape)) for target in targets}
    alive = [weakref.ref(tensor) for tensor in tensors]
    with Uploads(0) as uploads:
        sinks = sinks_for(targets, entries, uploads)
    for target in targets:
        sinks[target.fqn](0, np.full(target.tensor.nbytes, 1, np.uint8))
    assert all(bool((tensor.contiguous().view(torch.uint8) == 1).all()) for tensor in tensors)
    of_first = sinks["0"]
    del tensors, targets, target, sinks
    assert isinstance(of_first, ByteMemory)
    assert alive[0]() is not None
    del of_first
    assert alive[0]() is None
