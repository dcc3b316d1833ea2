"""The same sums by torch and over the slot, for any cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd_client.staging.block_sums import LANES, Row, add_up, lane_of


def summed(row: Row, data: torch.Tensor) -> list[int]:
    sums = torch.zeros(row.at + row.count + 1, dtype=torch.int64)
    row.queue(data, sums)
    assert sums[: row.at].count_nonzero() == 0
    assert sums[-1] == 0, "nothing beyond the row's place"
    return sums[row.at : -1].tolist()


@given(
    st.lists(st.integers(1, 3 * LANES), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_a_slot_of_any_pieces_has_the_sums_of_their_bytes(lanes: list[int], lane: int, at: int, seed: int) -> None:
    buffer = np.random.default_rng(seed).integers(0, 256, 3 * 64 + 8 * sum(lanes) + 64 * len(lanes), dtype=np.uint8)
    pieces, offset = [], 64
    for count in reversed(lanes):  # in another order than they lie
        pieces.append((offset, count * lane))
        offset += -(-count * lane // 64) * 64
    row = Row(tuple(pieces), lane, at)
    together = np.concatenate([buffer[start : start + nbytes] for start, nbytes in pieces])
    assert row.of_slot(buffer).tolist() == summed(row, torch.from_numpy(together))
    assert row.count == -(-sum(lanes) // LANES)
    covered = [place for k in range(row.count) for place in row.bytes_of(k)]
    assert sum(nbytes for _, nbytes in covered) == row.nbytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_a_strided_tensor_has_one_sum_whatever_the_order(dtype: torch.dtype) -> None:
    data = torch.randn(48, 20, dtype=torch.float64).to(dtype)
    row = Row(((0, data.nbytes),), min(dtype.itemsize, 8), 0, in_blocks=False)
    values = torch.view_as_real(data) if dtype.is_complex else data
    memory = values.contiguous().view(-1).view(torch.uint8).numpy()
    assert summed(row, data.t()) == summed(row, data) == row.of_slot(memory).tolist()
    assert list(row.bytes_of(0)) == [(0, data.nbytes)]


def test_a_block_that_changed_shows_where_it_lies() -> None:
    row = Row(((0, 5 * 8 * LANES), (6 * 8 * LANES, 8)), 8, 0)
    buffer = np.zeros(7 * 8 * LANES, dtype=np.uint8)
    before = row.of_slot(buffer)
    buffer[2 * 8 * LANES + 5] = 1
    buffer[6 * 8 * LANES] = 1
    assert (row.of_slot(buffer) != before).nonzero()[0].tolist() == [2, 5]
    assert [list(row.bytes_of(k)) for k in (2, 5)] == [[(2 * 8 * LANES, 8 * LANES)], [(6 * 8 * LANES, 8)]]


def test_the_widest_lane_divides_the_bytes_and_the_address() -> None:
    assert [lane_of(n, 64) for n in (8, 12, 6, 3)] == [8, 4, 2, 1]
    assert lane_of(64, 2) == 2


def test_this_machine_adds_with_64_bits() -> None:
    assert add_up(torch.device("cpu"))
