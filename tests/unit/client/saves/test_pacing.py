"""Which overhead synthetic step times show, and which pace follows from it."""

from __future__ import annotations

import random

import pytest

from checkpointd_client.saves.pacing import SHARE_MIN, next_share, overhead_of


def steps(count: int, seconds: float, *, noise: float = 0.0, drift: float = 0.0, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [seconds * (1 + drift * n / count) * (1 + noise * rng.uniform(-1, 1)) for n in range(count)]


def test_constant_steps_show_their_difference() -> None:
    assert overhead_of(steps(20, 0.1), steps(10, 0.11)) == pytest.approx(0.1)


def test_without_a_difference_there_is_no_overhead() -> None:
    assert overhead_of(steps(20, 0.1), steps(10, 0.1)) == 0.0
    assert overhead_of(steps(20, 0.1), steps(10, 0.09)) == 0.0


@pytest.mark.parametrize(("alone", "during"), [(0, 0), (0, 50), (7, 50), (50, 3)])
def test_too_few_steps_show_nothing(alone: int, during: int) -> None:
    assert overhead_of(steps(alone, 0.1), steps(during, 0.2)) is None


def test_steps_that_take_no_time_show_nothing() -> None:
    assert overhead_of([0.0] * 20, [0.1] * 20) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_shows_hardly_ever_more_than_the_noise(seed: int) -> None:
    found = overhead_of(steps(64, 0.1, noise=0.5, seed=seed), steps(64, 0.1, noise=0.5, seed=seed + 100))
    assert found is not None
    assert found < 0.15


@pytest.mark.parametrize("seed", range(20))
def test_a_large_difference_shows_through_noise(seed: int) -> None:
    found = overhead_of(steps(64, 0.1, noise=0.3, seed=seed), steps(64, 0.15, noise=0.3, seed=seed + 100))
    assert found == pytest.approx(0.5, abs=0.15)


def test_a_drift_of_all_steps_counts_as_noise() -> None:
    drifting = steps(64, 0.1, drift=0.2)
    assert overhead_of(drifting[::2], drifting[1::2]) == 0.0


def test_one_evaluation_among_the_steps_counts_only_as_five_steps() -> None:
    assert overhead_of([*steps(63, 0.1), 60.0], steps(64, 0.1)) == 0.0
    found = overhead_of(steps(64, 0.1), [*steps(63, 0.11), 60.0])
    assert found is not None
    assert found < 0.2


@pytest.mark.parametrize(
    ("share", "overhead", "becomes"),
    [
        (1.0, None, 1.0),
        (0.3, None, 0.3),
        (1.0, 0.06, 0.5),
        (1.0, 0.04, 0.75),
        (1.0, 3.0, 0.5),
        (0.06, 3.0, SHARE_MIN),
        (0.4, 0.0, 0.5),
        (1.0, 0.0, 1.0),
        (0.4, 0.02, 0.4),
    ],
)
def test_the_next_pace(share: float, overhead: float | None, becomes: float) -> None:
    assert next_share(share, overhead, 0.03) == pytest.approx(becomes)


@pytest.mark.parametrize("cost", [0.01, 0.05, 0.2, 1.0])
def test_decision_after_decision_ends_below_the_limit(cost: float) -> None:
    """Where the overhead is in proportion to the pace."""
    share = 1.0
    for _ in range(30):
        share = next_share(share, cost * share, 0.03)
    assert share == SHARE_MIN or cost * share <= 0.03 * 1.01
