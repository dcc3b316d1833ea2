"""GOVERNOR-1 to GOVERNOR-3 of governor.py, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from checkpointd.pipeline.pace import Pace
from checkpointd_client.saves.governor import COPY_PART, PART, Governor
from checkpointd_client.saves.pacing import spacing_s


class Optimizer:
    """It can be referred to weakly."""


@dataclass
class Training:
    overhead_max: float | None = 0.03
    now: float = 100.0
    in_flight: list[Pace] = field(default_factory=list)
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        self.governor = Governor(self.overhead_max, lambda: self.in_flight, clock=lambda: self.now)

    def step(self, seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.now += seconds
            self.governor.stepped(self.optimizer)

    def save(self) -> Pace:
        pace = self.governor.begin(600.0)
        self.in_flight.append(pace)
        return pace


def test_steps_with_a_save_in_flight_that_take_longer_slow_it_down() -> None:
    training = Training()
    training.step(0.1, 20)
    pace = training.save()
    training.step(0.12, 6)
    assert training.governor.overhead == pytest.approx(0.2)
    assert training.governor.share == pace.share == 0.5
    training.step(0.101, 9)
    assert training.governor.overhead is not None
    assert training.governor.overhead < 0.03
    assert pace.share > 0.5


def test_without_a_limit_it_only_measures() -> None:
    training = Training(overhead_max=None)
    training.step(0.1, 20)
    pace = training.save()
    training.step(0.2, 20)
    assert training.governor.overhead == pytest.approx(1.0)
    assert pace.share == 1.0


def test_too_few_steps_change_nothing() -> None:
    training = Training()
    training.step(0.1, 4)
    pace = training.save()
    training.step(0.3, 40)
    assert (training.governor.overhead, pace.share) == (None, 1.0)


def test_governor_1_what_pacing_cannot_change_is_left_out() -> None:
    training = Training()
    training.step(0.1, 20)
    training.save()
    for _ in range(20):
        training.now += 0.5
        training.governor.exclude(0.5)
        training.step(0.1)
    assert training.governor.overhead == 0.0


def test_governor_2_only_steps_of_one_optimizer_count() -> None:
    training, other = Training(), Optimizer()
    for n in range(40):
        if n == 20:
            training.save()
        training.step(0.1)
        training.governor.stepped(other)
    assert training.governor.overhead == 0.0
    assert len(training.governor._undisturbed) + len(training.governor._disturbed) == 39


def test_governor_3_the_copy_ends_in_the_first_part_of_the_shortest_step() -> None:
    training = Training()
    assert training.save().copy_until is None
    training.in_flight.clear()
    training.step(0.1, 4)
    training.step(0.08)
    training.step(0.1, 4)
    assert training.save().copy_until == pytest.approx(training.now + COPY_PART * 0.08)


def test_saves_are_spaced_by_what_the_last_one_cost() -> None:
    assert spacing_s(held_s=0.03, lasted_s=0.7, overhead=0.2, overhead_max=0.03) == pytest.approx((0.03 + 0.14) / 0.03)
    assert spacing_s(held_s=0.03, lasted_s=9.0, overhead=None, overhead_max=0.03) == 9.0
    training = Training(overhead_max=None)
    training.governor.saved(held_s=1.0, lasted_s=1.0)
    assert training.governor.spacing_s == 0.0


def test_an_optimizer_that_is_gone_makes_room_for_the_next() -> None:
    training = Training()
    training.step(0.1, 5)
    training.optimizer = Optimizer()
    training.step(0.1, 5)
    assert len(training.governor._undisturbed) == 8


def test_a_save_is_due_before_the_next_one_and_before_its_deadline() -> None:
    training = Training()
    assert training.save().until == pytest.approx(100.0 + PART * 600.0)
    training.now += 50.0
    first = training.in_flight[0]
    first.share = 0.5
    assert training.save().until == pytest.approx(150.0 + PART * 50.0)
    assert first.reason == "late"
    assert first.rest_after(1.0, None) == 0.0
