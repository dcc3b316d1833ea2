"""TORN-1 and PLACES-1: what a sample sees, that it sees nothing where nothing changed, that its places follow the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd_client.capture.dtypes import DTYPES, copy_bits
from checkpointd_client.staging.places import EVERY, LINE, SMALL, Points, Remembered, sampled
from checkpointd_client.staging.torn_check import Sample

Sampler = Remembered[tuple[Points, ...]]

SIZES = [1, 4, 8, 63, 64, 65, 127, SMALL - 4, SMALL, SMALL + 4, 4096, EVERY, EVERY + 64, 5 * EVERY + 12]


class Slot:
    """Memory for some tensors, as a slot of the arena holds them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self.offsets = list(tensors), []
        offset = 0
        for tensor in tensors:
            self.offsets.append(offset)
            offset += -(-tensor.nbytes // LINE) * LINE
        self.memory = torch.full((-(-offset // 4096) * 4096,), 0xA5, dtype=torch.uint8)

    def fill(self) -> None:
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            there = self.memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy_bits(there, tensor)

    def sample(self, sampler: Sampler | None = None) -> Sample:
        return Sample.take((sampler or Remembered(sampled)).of(self.tensors, self.offsets), self.memory.numpy())


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def shapes_of_memory() -> list[torch.Tensor]:
    """Every way in which a tensor can lie: at odd addresses, transposed, with gaps, as one element, of any item size."""
    flat = random_bytes(1 << 20)
    images = flat[: 64 * 48 * 9 * 4].view(torch.float32).view(64, 48, 3, 3)
    return [
        *(random_bytes(nbytes) for nbytes in SIZES),
        *(flat[shift : shift + 70_000] for shift in (1, 2, 8, 33, 63)),
        flat[2:70_002].view(torch.bfloat16).view(35, 1000),
        flat.view(torch.float32).view(512, 512).t(),
        flat.view(torch.bfloat16).view(512, 1024)[:, ::3],
        flat.view(torch.complex128).view(-1, 64)[1:, 3:9],
        images.contiguous(memory_format=torch.channels_last),
        flat[:96].view(torch.float32)[::5],
        flat[:1].expand(3000),
        torch.tensor(3.0),
    ]


def test_where_nothing_changes_every_sampled_byte_agrees() -> None:
    slot = Slot(shapes_of_memory())
    sample = slot.sample()
    slot.fill()
    assert sample.torn() is None


@pytest.mark.parametrize("number", range(len(shapes_of_memory())))
def test_a_tensor_that_changes_everywhere_before_it_is_copied_is_named(number: int) -> None:
    slot = Slot([torch.zeros(3), shapes_of_memory()[number]])
    sample = slot.sample()
    torch.empty(0, dtype=torch.uint8).set_(slot.tensors[1].untyped_storage()).bitwise_not_()
    slot.fill()
    assert sample.torn() == 1


@pytest.mark.parametrize("nbytes", [4, 64, 100, SMALL])
def test_of_a_small_tensor_every_byte_is_compared(nbytes: int) -> None:
    tensor = random_bytes(nbytes)
    for at in range(nbytes):
        slot = Slot([torch.zeros(3), tensor])
        sample = slot.sample()
        tensor[at] += 1
        slot.fill()
        assert sample.torn() == 1


@pytest.mark.parametrize("nbytes", [SMALL + 1, 5 * EVERY, 5 * EVERY + 12])
def test_a_run_of_twice_the_distance_and_the_end_are_always_met(nbytes: int) -> None:
    for start in range(0, nbytes, EVERY // 3):
        tensor = random_bytes(nbytes)
        slot = Slot([tensor])
        sample = slot.sample()
        tensor[start : start + 2 * EVERY] += 1
        slot.fill()
        assert sample.torn() == 0
    slot = Slot([tensor])
    sample = slot.sample()
    tensor[-1] += 1
    slot.fill()
    assert sample.torn() == 0


def test_a_change_of_a_column_of_a_matrix_is_met() -> None:
    """Whichever column: lines are sampled at other places of each EVERY bytes."""
    for column in range(0, 1024, 16):
        matrix = torch.zeros(4096, 1024, dtype=torch.float32)
        slot = Slot([matrix])
        sample = slot.sample()
        matrix[:, column : column + 16] = 1.0
        slot.fill()
        assert sample.torn() == 0


def test_what_changes_after_it_was_copied_is_not_torn() -> None:
    slot = Slot([random_bytes(100_000), random_bytes(10)])
    sample = slot.sample()
    slot.fill()
    for tensor in slot.tensors:
        tensor.add_(1)
    assert sample.torn() is None


def test_the_plan_follows_tensors_that_move_or_lie_in_another_way() -> None:
    sampler = Remembered(sampled)
    square = random_bytes(1 << 16).view(256, 256)
    slot = Slot([square, random_bytes(300)])
    for first in (square, square.t(), square.clone(), square):
        slot.tensors[0] = first
        sample = slot.sample(sampler)
        slot.fill()
        assert sample.torn() is None
    sample = slot.sample(sampler)
    slot.tensors[1].add_(1)
    slot.fill()
    assert sample.torn() == 1


def test_others_at_the_same_address_are_planned_anew() -> None:
    """Two that begin at one address, of which now one is copied later and now the other."""
    sampler, memory = Remembered(sampled), random_bytes(1 << 16)
    slot = Slot([memory[: 1 << 15], memory])
    slot.fill()
    both = list(zip(slot.tensors, slot.offsets, strict=True))
    for tensor, offset in (both[0], both[1], both[0]):
        slot.tensors, slot.offsets = [tensor], [offset]
        assert slot.sample(sampler).torn() is None


@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(sorted(DTYPES)),
    shift=st.integers(0, 7),
)
def test_any_strides_of_any_dtype_agree_with_their_copy(shape: list[int], order: object, dtype: str, shift: int) -> None:
    item = DTYPES[dtype].itemsize
    count = int(np.prod(shape, dtype=np.int64))
    memory = random_bytes((count * 2 + shift) * item)[shift * item :].view(DTYPES[dtype])
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]  # a random.Random
    strided = memory[: count * 2 : 2].view([shape[dim] for dim in dims]).permute([dims.index(dim) for dim in range(len(shape))])
    slot = Slot([strided, memory[:count]])
    sample = slot.sample()
    slot.fill()
    assert sample.torn() is None
