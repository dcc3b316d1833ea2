"""The same sums by torch and over the slot, for any cut into pieces."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd_client.staging import block_sums
from checkpointd_client.staging.block_sums import LANES, Row, add_up, strided, sums_of_slot


def summed(row: Row, data: torch.Tensor) -> list[int]:
    sums = torch.zeros(row.at + row.count + 1, dtype=torch.int64)
    row.queue(data, sums)
    assert sums[: row.at].count_nonzero() == 0
    assert sums[-1] == 0, "nothing beyond the row's place"
    return sums[row.at : -1].tolist()


@given(
    st.lists(st.integers(1, 3 * LANES), min_size=1, max_size=4), st.integers(0, 7), st.integers(0, 3), st.integers(0, 2**32 - 1)
)
def test_a_slot_of_any_pieces_has_the_sums_of_their_bytes(lanes: list[int], rest: int, at: int, seed: int) -> None:
    """Only the last piece may end with bytes that fill no lane."""
    buffer = np.random.default_rng(seed).integers(0, 256, 128 + sum(8 * count + 128 for count in lanes), dtype=np.uint8)
    sizes = [8 * count for count in lanes]
    sizes[-1] += rest
    pieces, offset = [], 64
    for nbytes in reversed(sizes):  # in another order than they lie
        pieces.insert(0, (offset, nbytes))
        offset += -(-nbytes // 64) * 64
    row = Row(tuple(pieces), at)
    together = np.concatenate([buffer[start : start + nbytes] for start, nbytes in pieces])
    assert row.of_slot(buffer).tolist() == summed(row, torch.from_numpy(together))
    assert row.count == -(-sum(lanes) // LANES) + bool(rest)
    covered = [place for k in range(row.count) for place in row.bytes_of(k)]
    assert sum(nbytes for _, nbytes in covered) == row.nbytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("at_once", [1, 2000, 1 << 20])
def test_a_strided_tensor_has_a_sum_for_some_of_its_rows(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sums, "STRIDED_BYTES", at_once)
    data = torch.randn(48, 20).mul(100).to(dtype).t()[None]
    row = strided(0, tuple(data.shape), dtype.itemsize)
    values = torch.view_as_real(data) if dtype.is_complex else data
    memory = values.contiguous().view(-1).view(torch.uint8).numpy()
    assert summed(row, data) == summed(row, data.contiguous()) == row.of_slot(memory).tolist()
    rows = max(at_once // (48 * dtype.itemsize), 1)
    assert row.count == -(-20 // rows)
    assert next(row.bytes_of(row.count - 1))[0] == (row.count - 1) * min(rows, 20) * 48 * dtype.itemsize


def most_allocated(row: Row, data: torch.Tensor) -> int:
    """The largest memory that torch allocates at once while it adds up."""
    sums = torch.zeros(row.count, dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        row.queue(data, sums)
    return max([0, *(int(event.self_cpu_memory_usage) for event in profile.events() or [])])


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("count", [1 << 18, (1 << 18) - 1])
def test_adding_up_takes_little_memory_whatever_the_address(offset: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies integers of less than 64 bits before it adds them: 16-bit ones take four times their memory."""
    monkeypatch.setattr(block_sums, "UNALIGNED_BYTES", 64 << 10)
    data = torch.randn(count + 4).to(torch.bfloat16)[offset : offset + count]
    row = Row(((0, data.nbytes),))
    assert most_allocated(row, data) <= 64 << 10
    assert summed(row, data) == row.of_slot(data.view(torch.uint8).numpy()).tolist()


def test_bytes_of_a_storage_that_lies_anywhere_are_added_up() -> None:
    """As memory of another library may lie."""
    memory = np.random.default_rng(0).integers(0, 256, 100_001, dtype=np.uint8)
    data = torch.from_numpy(memory[1:])
    row = Row(((0, data.nbytes),))
    assert summed(row, data) == row.of_slot(memory[1:]).tolist()


def test_adding_up_a_strided_tensor_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sums, "STRIDED_BYTES", 16 << 10)
    data = torch.randn(512, 512).to(torch.bfloat16).t()
    assert most_allocated(strided(0, (512, 512), 2), data) <= 4 * (16 << 10)


def test_threads_give_the_sums_of_each_row_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    buffer = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    rows = [Row(((k << 17, 1000 * (k + 1)),), k) for k in range(8)]
    expected = [row.of_slot(buffer).tolist() for row in rows]
    assert [found.tolist() for found in sums_of_slot(rows, buffer)] == expected
    assert sums_of_slot([], buffer) == []

    def none_starts(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", none_starts)
    assert [found.tolist() for found in sums_of_slot(rows, buffer)] == expected


def test_a_block_that_changed_shows_where_it_lies() -> None:
    row = Row(((0, 5 * 8 * LANES), (6 * 8 * LANES, 8)))
    buffer = np.zeros(7 * 8 * LANES, dtype=np.uint8)
    before = row.of_slot(buffer)
    buffer[2 * 8 * LANES + 5] = 1
    buffer[6 * 8 * LANES] = 1
    assert (row.of_slot(buffer) != before).nonzero()[0].tolist() == [2, 5]
    assert [list(row.bytes_of(k)) for k in (2, 5)] == [[(2 * 8 * LANES, 8 * LANES)], [(6 * 8 * LANES, 8)]]


def test_this_machine_adds_with_64_bits() -> None:
    assert add_up(torch.device("cpu"))
