"""Where tensors lie in a slot."""

from __future__ import annotations

import torch

from checkpointd_client.capture.state import capture
from checkpointd_client.staging.slot_layout import plan_slot


def test_tensors_follow_one_another_at_multiples_of_64_bytes() -> None:
    state = {"a": torch.ones(3), "b": torch.ones(0), "c": torch.ones(17, dtype=torch.float64), "d": torch.tensor(1)}
    layout = plan_slot(capture(state, None, exclude_frozen_parameters=False))
    assert [part[:2] for part in layout.parts] == [(0, 12), (64, 0), (64, 136), (256, 8)]
    assert [tensor.offset for tensor in layout.tensors] == [0, 64, 64, 256]
    assert layout.nbytes == 4096


def test_a_state_without_tensors_takes_a_page() -> None:
    assert plan_slot(capture({"n": 3}, None, exclude_frozen_parameters=False)).nbytes == 4096
