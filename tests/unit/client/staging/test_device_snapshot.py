"""What is cloned on a device, tried with tensors of the host. The rest is tried on the simulated device."""

from __future__ import annotations

import pytest
import torch

from checkpointd_client.staging import device_snapshot
from checkpointd_client.staging.device_snapshot import cloned, leaf_at


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


def test_a_byte_of_the_slot_is_found_in_its_leaf() -> None:
    starts = [0, 0, 64, 128, 128]  # the first and the fourth leaf are empty
    assert [leaf_at(offset, starts) for offset in (0, 63, 64, 127, 128, 500)] == [1, 1, 2, 2, 4, 4]
