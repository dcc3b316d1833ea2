"""RngState: every generator goes on where it was, whatever else is loaded beside it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from checkpointd_client.capture.rng import RngState
from tests.unit.client.capture_and_fill import same, save


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(3), np.random.randn(), torch.rand(3)]


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # leaves a cached second normal value in Python's and numpy's generators


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


def test_every_generator_goes_on_where_it_was() -> None:
    saved = save({"rng": RngState()})
    expected = draw()
    draw()
    saved.load({"rng": RngState()})
    assert same(draw(), expected)


def test_looking_at_the_state_draws_nothing() -> None:
    expected = draw()
    seed()
    save({"rng": RngState()})
    assert same(draw(), expected)


def test_random_numbers_that_other_objects_draw_while_loading_do_not_matter() -> None:
    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            draw()

    saved = save({"rng": RngState(), "loader": Drawing()})
    expected = draw()
    saved.load({"rng": RngState(), "loader": Drawing()})
    assert same(draw(), expected)


def test_states_taken_by_hand_round_trip() -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    expected = draw()
    target: dict[str, Any] = dict.fromkeys(state)
    save(state).load(target)
    random.setstate(target["python"])
    np.random.set_state(target["numpy"])
    torch.set_rng_state(target["torch"])
    assert same(draw(), expected)


class TwoDevices:
    """What torch.get_device_module gives for a kind of accelerator."""

    def __init__(self) -> None:
        self.restored: list[tuple[int, int]] = []

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self, index: int) -> torch.Tensor:
        return torch.full((16,), index, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.restored.append((int(state[0]), index))


def test_devices_that_are_missing_are_skipped_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = TwoDevices()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: backend)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    saved = save({"rng": RngState()})
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    saved.load({"rng": RngState()})
    assert backend.restored == [(0, 0)]
    assert "2 cuda devices were saved and 1 devices are here" in caplog.text
