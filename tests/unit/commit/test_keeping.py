"""R6 of commit/retention.py: which checkpoints go by rule, and which never do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.retention import AttemptFacts, CheckpointFacts, Retention, retired
from checkpointd.errors import UsageError
from checkpointd.layout.keys import AttemptId


def checkpoint(n: int, **options: Any) -> CheckpointFacts:
    """The `n`th checkpoint, of step 10 * n."""
    facts = AttemptFacts(f"step{10 * n}", AttemptId(1, 0), "committed", (1, n), True)
    return CheckpointFacts(attempt=facts, order=(1, n), step=10 * n, **options)


def left(checkpoints: list[CheckpointFacts], rules: Retention) -> list[int]:
    gone = {facts.order for facts, _ in retired(checkpoints, rules)}
    return [c.order[1] for c in checkpoints if c.order not in gone]


TEN = [checkpoint(n) for n in range(10)]


def test_without_rules_all_stay() -> None:
    assert left(TEN, Retention()) == list(range(10))


def test_the_last_ones_stay() -> None:
    assert left(TEN, Retention(keep_last=3)) == [7, 8, 9]


def test_every_so_many_steps_stay_and_the_newest() -> None:
    assert left(TEN, Retention(every_steps=40)) == [0, 4, 8, 9]


def test_young_ones_stay_and_those_whose_age_cannot_be_told() -> None:
    known = [checkpoint(0, age_s=None), checkpoint(1, age_s=100.0), checkpoint(2, age_s=99.0), checkpoint(3, age_s=1.0)]
    assert left(known, Retention(younger_than_s=100.0)) == [0, 2, 3]


@pytest.mark.parametrize(("mode", "stays"), [("min", [1, 3, 5]), ("max", [0, 4, 5])])
def test_the_best_stay(mode: Any, stays: list[int]) -> None:
    losses = [9.0, 1.0, 5.0, 2.0, 8.0]
    known = [checkpoint(n, metrics={"loss": loss, "other": -loss}) for n, loss in enumerate(losses)] + [checkpoint(5)]
    assert left(known, Retention(best=2, metric="loss", mode=mode)) == stays


def test_of_equally_good_ones_the_newer_stays() -> None:
    known = [checkpoint(n, metrics={"loss": 1.0}) for n in range(3)] + [checkpoint(3)]
    assert left(known, Retention(best=1, metric="loss")) == [2, 3]


def test_rules_add_up() -> None:
    assert left(TEN, Retention(keep_last=2, every_steps=50)) == [0, 5, 8, 9]


def test_the_newest_verified_one_stays_and_what_latest_names_and_the_newest_that_asked_for_it() -> None:
    known = [
        checkpoint(0, verified=True),
        checkpoint(1, verified=True),
        checkpoint(2, is_latest=True),
        checkpoint(3),
        checkpoint(4),
        checkpoint(5, save_latest=False),
        checkpoint(6, save_latest=False),
    ]
    assert left(known, Retention(keep_last=1)) == [1, 2, 4, 6]


def test_the_reason_names_the_rules() -> None:
    rules = Retention(keep_last=2, every_steps=1000, younger_than_s=60, best=1, metric="loss")
    [(_, reason), *_] = retired([checkpoint(n, age_s=100.0) for n in range(1, 5)], rules)
    assert reason == "retention keeps the last 2, every 1000 steps, those younger than 60 s, the best 1 by loss (min)"


facts = st.builds(
    lambda step, latest, named, verified, age, loss: {
        "step": step,
        "save_latest": latest,
        "is_latest": named,
        "verified": verified,
        "age_s": age,
        "metrics": {} if loss is None else {"loss": loss},
    },
    st.integers(0, 100),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.none() | st.floats(0, 1e6),
    st.none() | st.floats(-1e3, 1e3),
)
counts = st.none() | st.integers(1, 5)


@given(st.lists(facts, max_size=12), counts, counts, st.none() | st.floats(1, 1e6), counts, st.sampled_from(["min", "max"]))
def test_r6_holds_for_all_rules(
    drawn: list[dict[str, Any]], last: int | None, every: int | None, age: float | None, best: int | None, mode: Any
) -> None:
    known = [
        CheckpointFacts(attempt=AttemptFacts("t", AttemptId(1, n), "committed", (1, n), True), order=(1, n), **options)
        for n, options in enumerate(drawn)
    ]
    metric = None if best is None else "loss"
    rules = Retention(keep_last=last, every_steps=every, younger_than_s=age, best=best, metric=metric, mode=mode)
    stays = left(known, rules)
    if known:
        assert known[-1].order[1] in stays
    for chosen in ([c for c in known if c.save_latest], [c for c in known if c.verified], [c for c in known if c.is_latest]):
        assert not chosen or chosen[-1].order[1] in stays
    assert set(range(len(known) - (last or 0), len(known))) & set(range(len(known))) <= set(stays)
    measured = sorted(c.metrics["loss"] for c in known if c.metrics)
    if best is not None and measured:
        assert (measured[0] if mode == "min" else measured[-1]) in [known[n].metrics.get("loss") for n in stays]


@pytest.mark.parametrize(
    "fields",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"every_steps": -1},
        {"every_steps": 2.5},
        {"younger_than_s": 0},
        {"younger_than_s": math.nan},
        {"best": 1},
        {"metric": "loss"},
        {"best": 1, "metric": "loss", "mode": "least"},
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        Retention(**fields) if "mode" not in fields else _mode(fields)


def _mode(fields: dict[str, Any]) -> Retention:
    try:
        return Retention(**fields)
    except UsageError as error:
        raise UsageError(f"best: {error}") from error
