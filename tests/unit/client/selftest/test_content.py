"""What the selftest saves and loads, here in host memory: every dtype and shape, compared bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd_client import Checkpointer
from checkpointd_client.selftest import content

HOST = torch.device("cpu")


def test_every_dtype_is_there_or_named_as_missing() -> None:
    state, missing = content.of_every_dtype(HOST)
    assert {*state, *missing} == set(ITEM_BYTES)
    assert {"bool", "bfloat16", "complex128", "float8_e4m3fn"} <= set(state)
    assert all(tensor.nbytes == content.ODD for tensor in state.values())


def test_shapes_are_those_that_are_hard_to_store() -> None:
    shapes = content.of_every_shape(HOST)
    assert [name for name, tensor in shapes.items() if tensor.is_contiguous()] == [
        *("shifted", "one byte shifted", "scalar", "empty", "empty rows")
    ]
    assert [name for name, tensor in shapes.items() if tensor.numel() == 0] == ["empty", "empty rows"]


def test_what_comes_back_is_the_same(tmp_path: Path) -> None:
    state, _ = content.of_every_dtype(HOST)
    assert content.differences(str(tmp_path), state | content.of_every_shape(HOST)) == []


def test_a_bit_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Checkpointer.load

    def wrong(self: Checkpointer, state: dict[str, dict[str, torch.Tensor]]) -> None:
        load(self, state)
        state["tensors"]["columns"][-1, -1] ^= 1

    monkeypatch.setattr(Checkpointer, "load", wrong)
    assert content.differences(str(tmp_path), content.of_every_shape(HOST)) == ["columns"]
