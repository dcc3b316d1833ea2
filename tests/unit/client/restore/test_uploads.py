"""Uploads without a device: what is cut how, and that host memory asks no accelerator. `tests/accelerator` has the rest."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.pipeline.read.plan import CARRIERS
from checkpointd.pipeline.shard import PAGE
from checkpointd_client import Checkpointer
from checkpointd_client.restore.uploads import BLOCK_BYTES, Uploads, _Block, _pieces, _sizes_of_blocks, fill_at_once

SIZES = st.integers(0, 1 << 40)


@given(share=SIZES, wanted=st.integers(1, 1 << 40))
def test_upload_3_the_blocks_of_a_device_fit_into_its_share(share: int, wanted: int) -> None:
    nbytes, count = _sizes_of_blocks(share, wanted)
    assert PAGE <= nbytes <= BLOCK_BYTES
    assert nbytes % PAGE == 0
    assert count >= 1
    if share >= PAGE:
        assert nbytes * count <= share
    assert nbytes * count <= max(wanted + PAGE, PAGE)


def test_large_loads_get_several_blocks() -> None:
    assert _sizes_of_blocks(256 << 20, 80 << 30) == (8 << 20, 32)
    assert _sizes_of_blocks(1 << 20, 80 << 30) == (256 << 10, 4)
    assert _sizes_of_blocks(0, 80 << 30) == (8 << 20, 4)
    assert _sizes_of_blocks(256 << 20, 100) == (PAGE, 1)


@given(shape=st.lists(st.integers(1, 9), max_size=4), items_max=st.integers(1, 40))
def test_pieces_hold_each_element_once_and_are_contiguous_where_the_tensor_is(shape: list[int], items_max: int) -> None:
    elements = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    part = torch.full(shape, -1, dtype=torch.int32)
    for piece, some in _pieces(part, elements, items_max * 4):
        assert some.nbytes <= items_max * 4
        assert piece.is_contiguous()
        assert tuple(piece.shape) == some.shape
        assert not piece.numel() or piece.max() == -1
        piece.copy_(torch.from_numpy(some.view(np.int32)))
    assert torch.equal(part, torch.from_numpy(elements.view(np.int32)))


def test_a_block_gives_each_byte_to_one_thread() -> None:
    block = _Block(PAGE)
    first, second = block.reserve(100, "a"), block.reserve(4, "b")
    first[0][:] = 1
    second[0][:] = 2
    assert (first[1].unique().tolist(), second[1].tolist()) == ([1], [2] * 4)
    assert not block.has(PAGE - 128)
    assert (block.busy, block.fqns) == (2, ["a", "b"])
    block.empty()
    assert block.has(PAGE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128], ids=str)
def test_host_memory_of_any_strides_is_filled_at_once(dtype: torch.dtype) -> None:
    source = torch.arange(24).reshape(2, 3, 4).to(dtype)
    carriers = source.reshape(-1).view(torch.uint8).numpy().view(CARRIERS[source.itemsize]).reshape(2, 3, 4)
    target = torch.zeros(4, 3, 2, dtype=dtype).permute(2, 1, 0)
    fill_at_once(target, carriers)
    assert torch.equal(target, source)
    scalar = torch.zeros((), dtype=dtype)
    fill_at_once(scalar, carriers[1, 2, 3])
    assert torch.equal(scalar, source[1, 2, 3])


def test_what_is_filled_at_once_may_be_the_conjugate_of_memory() -> None:
    source = torch.randn(3, 4, dtype=torch.complex64)
    memory = torch.zeros(3, 4, dtype=torch.complex64)
    fill_at_once(memory.conj(), source.numpy().view(np.uint64))
    assert torch.equal(memory, source.conj().resolve_conj())


def test_a_load_to_host_memory_asks_no_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("an accelerator was asked")

    source, target = torch.randn(8, 8), torch.zeros(8, 8)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"s": {"t": source}}).wait()
        for name in ("current_accelerator", "current_stream", "current_device_index", "set_stream", "set_device_index"):
            monkeypatch.setattr(torch.accelerator, name, asked)
        ckpt.load({"s": {"t": target}})
    assert torch.equal(target, source)
    with Uploads(1 << 20) as uploads:
        assert uploads.into(target, "s.t") is fill_at_once
