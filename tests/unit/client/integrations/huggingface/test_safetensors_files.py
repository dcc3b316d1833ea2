"""Tensors that are captured as a file of safetensors."""

from __future__ import annotations

import pytest
import torch

from checkpointd.errors import StateError
from checkpointd_client.capture.torch_files import CapturedFile
from checkpointd_client.integrations.huggingface.safetensors_files import capture_safetensors


def written(file: CapturedFile) -> bytes:
    """The bytes of a captured file whose sums are not needed."""
    tensors = {leaf.fqn: bytes(leaf.tensor.numpy()) for leaf in file.leaves}
    around, found = tensors[file.node.hollow], b""
    for start, fqn in sorted(file.node.placeholders):
        take = start - len(found)
        found, around = found + around[:take] + tensors[fqn], around[take:]
    assert len(found + around) == file.node.size
    return found + around


def test_the_file_is_what_the_library_reads() -> None:
    load = pytest.importorskip("safetensors.torch", reason="needs safetensors: make test-all installs it").load
    tensors = {
        "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "one": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
    }
    found = load(written(capture_safetensors("model.safetensors", tensors, {"format": "pt"}, ())))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in tensors.items())


def test_only_memory_that_steps_alone_change_may_be_copied_later() -> None:
    stepped, other = torch.zeros(4), torch.zeros(4)
    file = capture_safetensors("m", {"a": stepped, "b": other}, None, {stepped.untyped_storage().data_ptr()})
    assert [leaf.optimizer_only for leaf in file.leaves] == [False, True, False]
    assert file.leaves[1].tensor.data_ptr() == stepped.data_ptr(), "nothing is copied"


def test_what_the_format_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"m.safetensors cannot be saved .*: z has the dtype complex128"):
        capture_safetensors("m.safetensors", {"z": torch.zeros(1, dtype=torch.complex128)}, None, ())
