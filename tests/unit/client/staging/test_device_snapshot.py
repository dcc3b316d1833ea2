"""What is cloned on a device, tried with tensors of the host. The rest is tried on the simulated device."""

from __future__ import annotations

import pytest
import torch

from checkpointd_client.staging import device_snapshot
from checkpointd_client.staging.device_snapshot import cloned, leaf_at, queue_copy


class NoRoom(torch.Tensor):
    """For whose clone there is no memory."""

    def clone(self, *_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    def detach(self) -> torch.Tensor:
        return self


def test_tensors_that_may_change_are_cloned() -> None:
    moving = torch.ones(4)
    [clone], urgent = cloned([moving])
    assert clone is not moving
    assert torch.equal(clone.view(torch.float32), moving)
    assert urgent == [False]


def test_what_is_too_large_to_be_cloned_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_snapshot, "CLONED_BYTES_MAX", 40)
    tensors = [torch.ones(5), torch.ones(9), torch.ones(5), torch.ones(1)]
    sources, urgent = cloned(tensors)
    assert [source is tensor for source, tensor in zip(sources, tensors, strict=True)] == urgent == [False, True, False, True]


def test_where_memory_runs_out_nothing_more_is_cloned() -> None:
    tensors = [torch.ones(2), torch.ones(2).as_subclass(NoRoom), torch.ones(2)]
    sources, urgent = cloned(tensors)
    assert [source is tensor for source, tensor in zip(sources, tensors, strict=True)] == urgent == [False, True, True]


class LittleRoom(torch.Tensor):
    """Memory of the host into which a device copies strided tensors of at most 6 elements."""

    def copy_(self, source: torch.Tensor, *_: object, **__: object) -> LittleRoom:
        if not source.is_contiguous() and source.numel() > 6:
            raise torch.OutOfMemoryError("no room to make it contiguous")
        self.as_subclass(torch.Tensor).copy_(source)
        return self


def test_without_memory_to_make_a_tensor_contiguous_it_is_copied_in_parts() -> None:
    source = torch.arange(60.0).view(5, 2, 6).permute(1, 2, 0)
    target = torch.zeros(2, 6, 5).as_subclass(LittleRoom)
    queue_copy(target, source)
    assert torch.equal(target.as_subclass(torch.Tensor), source)
    with pytest.raises(RuntimeError, match="must match"):
        queue_copy(torch.zeros(3), source)


def test_a_byte_of_the_slot_is_found_in_its_leaf() -> None:
    starts = [0, 0, 64, 128, 128]  # the first and the fourth leaf are empty
    assert [leaf_at(offset, starts) for offset in (0, 63, 64, 127, 128, 500)] == [1, 1, 2, 2, 4, 4]
