"""RETENTION-1 to RETENTION-8 of commit/retention.py: which checkpoints are removed, by rule or as replaced ones, and which
never are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit import retention
from checkpointd.commit.retention import RemovalChoice, Retention
from checkpointd.errors import UsageError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import BallotRef
from tests.lease_builders import SINCE


def checkpoint(n: int, **options: Any) -> LoggedAttempt:
    """The `n`th checkpoint, of step 10 * n."""
    return commit(f"step{10 * n}", 1, n, **{"step": 10 * n, **options})


def commit(tag: str, start: int, n: int, *, age_s: float | None = None, **options: Any) -> LoggedAttempt:
    """The `n`th save of `start`, of a tag that may have been saved before."""
    noted = {"verified": False, "damaged": "", "passed_over": "", "left_behind": False}
    own = {name: options.pop(name, default) for name, default in noted.items()}
    record = CommitRecord(
        attempt=f"{tag}/{AttemptId(start, n)}",
        n=n,
        **{"step": n, **options},
        world_size=1,
        ballot=BallotRef(size=1, digest="0" * 32),
        decided_by=0,
        writer=msgspec.structs.replace(SINCE, time=str(age_s or 0.0)),
    )
    return msgspec.structs.replace(LoggedAttempt.of(record), **own)


def choose(checkpoints: Iterable[LoggedAttempt], rules: Retention, **options: Any) -> RemovalChoice:
    return retention.choose(checkpoints, rules, age_s=lambda commit: float(commit.writer.time), **options)


def gone(choice: RemovalChoice) -> list[tuple[int, int]]:
    """The orders of what goes."""
    return orders(prefix for prefix, _ in choice.going)


def orders(prefixes: Iterable[str]) -> list[tuple[int, int]]:
    attempts = [AttemptId.of(prefix) for prefix in prefixes]
    return [(attempt.start, attempt.k) for attempt in attempts]


def left(checkpoints: list[LoggedAttempt], rules: Retention, **options: Any) -> list[int]:
    going = gone(choose(checkpoints, rules, **options))
    return [c.order[1] for c in checkpoints if c.order not in going]


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


def test_the_newest_verified_one_stays_and_the_newest_that_asked_for_latest() -> None:
    known = [
        checkpoint(0, verified=True),
        checkpoint(1, verified=True),
        checkpoint(2),
        checkpoint(3),
        checkpoint(4),
        checkpoint(5, save_latest=False),
        checkpoint(6, save_latest=False),
    ]
    assert left(known, Retention(keep_last=1)) == [1, 4, 6]


def test_the_reason_names_the_rules() -> None:
    rules = Retention(keep_last=2, every_steps=1000, younger_than_s=60, best=1, metric="loss")
    known = [checkpoint(n, age_s=100.0, metrics={"loss": float(n)}) for n in range(1, 6)]
    [(_, reason), *_] = choose(known, rules).going
    assert reason == "retention keeps the last 2, every 1000 steps, those younger than 60 s, the best 1 by loss (min)"


facts = st.builds(
    lambda step, latest, verified, age, loss: {
        "step": step,
        "save_latest": latest,
        "verified": verified,
        "age_s": age,
        "metrics": {} if loss is None else {"loss": loss},
    },
    st.integers(0, 100),
    st.booleans(),
    st.booleans(),
    st.none() | st.floats(0, 1e6),
    st.none() | st.floats(-1e3, 1e3),
)
counts = st.none() | st.integers(1, 5)


@given(st.lists(facts, max_size=12), counts, counts, st.none() | st.floats(1, 1e6), counts, st.sampled_from(["min", "max"]))
def test_retention_2_holds_for_all_rules(
    drawn: list[dict[str, Any]], last: int | None, every: int | None, age: float | None, best: int | None, mode: Any
) -> None:
    known = [commit(f"t{n}", 1, n, **options) for n, options in enumerate(drawn)]
    metric = None if best is None else "loss"
    rules = Retention(keep_last=last, every_steps=every, younger_than_s=age, best=best, metric=metric, mode=mode)
    stays = left(known, rules)
    if known:
        assert known[-1].order[1] in stays
    for chosen in ([c for c in known if c.commit.save_latest], [c for c in known if c.verified]):
        assert not chosen or chosen[-1].order[1] in stays
    assert set(range(len(known) - (last or 0), len(known))) & set(range(len(known))) <= set(stays)
    measured = sorted(c.commit.metrics["loss"] for c in known if c.commit.metrics)
    if best is not None and measured:
        assert (measured[0] if mode == "min" else measured[-1]) in [known[n].commit.metrics.get("loss") for n in stays]


# --- replaced ones ------------------------------------------------------------------------------------------------


def test_retention_1_what_its_tag_was_saved_again_for_goes_with_and_without_rules() -> None:
    known = [commit("best", 1, 0), commit("other", 1, 1), commit("best", 1, 2)]
    for rules in (Retention(), Retention(keep_last=5)):
        choice = choose(known, rules)
        assert [(AttemptId.of(prefix).k, why) for prefix, why in choice.going] == [(0, "the tag was saved again since")]


def test_retention_1_a_damaged_commit_replaces_nothing() -> None:
    known = [commit("best", 1, 0), commit("best", 1, 1, damaged="bits")]
    assert choose(known, Retention()) == RemovalChoice()
    assert gone(choose(known, Retention(keep_last=1))) == [(1, 1)]


def test_retention_2_what_was_verified_stays_until_something_newer_is() -> None:
    known = [commit("best", 1, 0, verified=True), commit("best", 1, 1), commit("best", 1, 2)]
    choice = choose(known, Retention())
    assert (gone(choice), orders(choice.surplus)) == ([(1, 1)], [(1, 0)])
    choice = choose([*known, commit("best", 1, 3, verified=True)], Retention())
    assert (gone(choice), choice.surplus) == ([(1, 0), (1, 1), (1, 2)], ())


# --- damage -------------------------------------------------------------------------------------------------------


def test_retention_3_what_is_damaged_is_never_counted() -> None:
    known = [checkpoint(n, damaged="bits" if n in (2, 4) else "", verified=n in (0, 2)) for n in range(5)]
    assert left(known, Retention(keep_last=2)) == [0, 1, 3]


def test_retention_3_where_all_is_damaged_nothing_goes() -> None:
    assert choose([checkpoint(n, damaged="bits") for n in range(4)], Retention(keep_last=1)) == RemovalChoice()


def test_retention_4_what_a_load_passed_over_stays_until_it_is_recorded_as_damaged() -> None:
    known = [checkpoint(0, passed_over="bits"), checkpoint(1, passed_over="bits", damaged="bits"), checkpoint(2), checkpoint(3)]
    assert left(known, Retention(keep_last=1)) == [0, 3]
    again = [commit("best", 1, 0, passed_over="bits"), commit("best", 1, 1)]
    assert choose(again, Retention()) == RemovalChoice()


def test_retention_4_what_a_load_passed_over_stands_for_nothing_that_goes() -> None:
    over = checkpoint(3, passed_over="bits", verified=True)
    assert left([checkpoint(0), checkpoint(1), checkpoint(2, verified=True), over], Retention(keep_last=1)) == [2, 3]
    again = [commit("best", 1, 0), commit("best", 1, 1, passed_over="bits", verified=True)]
    assert choose(again, Retention()) == RemovalChoice()
    assert choose([checkpoint(0, passed_over="bits"), checkpoint(1, damaged="bits")], Retention(keep_last=1)) == RemovalChoice()


# --- metrics ------------------------------------------------------------------------------------------------------


def test_retention_5_a_rule_with_a_metric_keeps_what_was_saved_without_it() -> None:
    known = [checkpoint(n, metrics={"loss": float(n)} if n % 2 else {"other": 0.0}) for n in range(6)]
    assert left(known, Retention(best=1, metric="loss")) == [0, 1, 2, 4, 5]
    assert left(known, Retention(best=1, metric="loss", keep_last=1)) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("rules", [{}, {"keep_last": 1}, {"younger_than_s": 1.0, "mode": "max"}])
def test_retention_5_a_metric_that_none_has_removes_nothing_and_is_named(rules: dict[str, Any]) -> None:
    known = [checkpoint(n, age_s=9.0, metrics={"loss": 1.0, "accuracy": 0.5}) for n in range(4)]
    choice = choose(known, Retention(best=1, metric="los", **rules))
    assert choice.going == ()
    assert choice.unknown_metric is not None
    assert "'los'" in choice.unknown_metric
    assert "accuracy, loss" in choice.unknown_metric
    again = choose([commit("best", 1, 0), commit("best", 1, 1)], Retention(best=1, metric="los", **rules))
    assert gone(again) == [(1, 0)]  # what was replaced is no rule's to keep


def test_retention_5_without_any_metric_nothing_goes() -> None:
    choice = choose([checkpoint(n) for n in range(4)], Retention(best=1, metric="loss"))
    assert choice.going == ()
    assert "they have no metrics" in str(choice.unknown_metric)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_finite_number_is_never_the_best(mode: Any, value: float) -> None:
    known = [checkpoint(0, metrics={"loss": 2.0}), checkpoint(1, metrics={"loss": value}), checkpoint(2, metrics={"loss": 2.5})]
    known.append(checkpoint(3, metrics={"loss": 2.2}))
    best = 0 if mode == "min" else 2
    assert left(known, Retention(best=1, metric="loss", mode=mode)) == sorted({best, 1, 3})


# --- earlier jobs -------------------------------------------------------------------------------------------------


def test_retention_6_of_jobs_that_are_not_known_nothing_goes() -> None:
    known = [commit("best", 1, 0), commit("a", 1, 1), commit("best", 2, 0), commit("b", 2, 1), commit("best", 2, 2)]
    for rules, rest in ((Retention(), []), (Retention(keep_last=1), [(2, 1)])):
        assert gone(choose(known, rules, keeps_before=(2, 0))) == [(2, 0), *rest]
    assert gone(choose(known, Retention(keep_last=1))) == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": True}, "keep_last"),
        ({"every_steps": -1}, "every_steps"),
        ({"every_steps": 2.5}, "every_steps"),
        ({"younger_than_s": 0}, "younger_than_s"),
        ({"younger_than_s": math.nan}, "younger_than_s"),
        ({"best": 1}, "best"),
        ({"metric": "loss"}, "metric"),
        ({"best": 1, "metric": "loss", "mode": "least"}, "mode"),
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Retention(**fields)


# --- what an export needs ------------------------------------------------------------------------------------------------


def test_retention_7_what_an_export_needs_stays_and_the_rules_count_as_without_it() -> None:
    choice = choose(TEN, Retention(keep_last=2), exporting={TEN[4].prefix, TEN[9].prefix})
    assert gone(choice) == [(1, n) for n in (0, 1, 2, 3, 5, 6, 7)]
    assert orders(choice.exporting) == [(1, 4)]


def test_retention_7_so_does_an_older_commit_of_its_tag() -> None:
    both = [commit("best", 1, 1), commit("best", 1, 2)]
    choice = choose(both, Retention(), exporting={both[0].prefix})
    assert gone(choice) == []
    assert orders(choice.exporting) == [(1, 1)]


# --- branches that were left ----------------------------------------------------------------------------------------------


def branched(left_from: int, count: int = 3) -> list[LoggedAttempt]:
    """Ten checkpoints, of which those from `left_from` on were left behind, and `count` of a new branch."""
    old = [checkpoint(n, left_behind=n >= left_from) for n in range(10)]
    return [*old, *(commit(f"new{n}", 2, n, step=10 * (left_from + n)) for n in range(count))]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_retention_8_the_rules_keep_as_many_of_the_current_branch_and_remove_nothing_that_they_would_keep(
    keep: int, count: int
) -> None:
    known = branched(5, count)
    going = set(gone(choose(known, Retention(keep_last=keep))))
    of_branch = [c.order for c in known if not c.left_behind]
    assert going.isdisjoint(of_branch[-keep:])
    as_one = [checkpoint(n) for n in range(10)] + known[10:]
    assert going <= set(gone(choose(as_one, Retention(keep_last=keep))))
    assert going == {c.order for c in known} - {*of_branch[-keep:], *[c.order for c in known][-keep:]}


def test_retention_8_the_best_of_the_current_branch_is_kept_beside_the_best_of_all() -> None:
    losses = [5.0, 4.0, 0.1, 3.0, 2.0]
    known = [checkpoint(n, metrics={"loss": loss}, left_behind=n == 2) for n, loss in enumerate(losses)]
    assert left(known, Retention(best=1, metric="loss")) == [2, 4]


def test_retention_8_what_was_left_is_no_newest_and_no_proof() -> None:
    old = [checkpoint(0, verified=True), checkpoint(1), checkpoint(2, verified=True, left_behind=True)]
    choice = choose(old, Retention(keep_last=1))
    assert gone(choice) == []
    assert orders(choice.surplus) == [(1, 0)], "the newest one of the branch that is known to be whole"
    damaged = [checkpoint(0, damaged="bits"), checkpoint(1, left_behind=True), checkpoint(2, left_behind=True)]
    assert gone(choose(damaged, Retention(keep_last=1))) == []


def test_retention_8_one_tag_of_two_branches_stays_twice() -> None:
    both = [commit("best", 1, 0), commit("best", 1, 1, left_behind=True), commit("best", 2, 0)]
    assert gone(choose(both, Retention())) == [(1, 0)]
    back = [commit("best", 1, 0), commit("best", 1, 1), commit("best", 2, 0, left_behind=True)]
    assert gone(choose(back, Retention())) == [(1, 0)]


def test_retention_8_a_directory_shows_one_commit_of_whatever_branch() -> None:
    both = [commit("best", 1, 0, left_behind=True, shown_at="ds/t"), commit("best", 2, 0, shown_at="ds/t")]
    assert gone(choose(both, Retention())) == [(1, 0)]
    back = [commit("best", 1, 0, shown_at="ds/t"), commit("best", 2, 0, left_behind=True, shown_at="ds/t")]
    assert gone(choose(back, Retention())) == []


def test_a_checkpoint_of_which_something_is_missing_counts_for_no_rule_and_stays() -> None:
    """RETENTION-9."""
    known = [checkpoint(1), checkpoint(2), checkpoint(3), checkpoint(4, verified=True)]
    assert left(known, Retention(keep_last=1), incomplete={known[2].prefix, known[3].prefix}) == [2, 3, 4]
    assert left(known[:2], Retention(keep_last=1), incomplete={known[1].prefix}) == [1, 2]
