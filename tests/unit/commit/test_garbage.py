"""GARBAGE-1 to GARBAGE-3 of commit/garbage.py: which objects can be deleted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointd.commit import garbage
from checkpointd.commit.facts import AttemptFacts, Order, State
from checkpointd.commit.garbage import dead_weight, spent_records
from checkpointd.layout.keys import AttemptId

RECORDS_KEPT, ROOT_RECORDS_KEPT, ABORTED_KEPT = 2, 3, 2


@pytest.fixture(autouse=True, scope="module")
def few_records_stay() -> Iterator[None]:
    """So few that a handful of attempts has more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "RECORDS_KEPT", RECORDS_KEPT)
        patch.setattr(garbage, "ROOT_RECORDS_KEPT", ROOT_RECORDS_KEPT)
        patch.setattr(garbage, "ABORTED_KEPT", ABORTED_KEPT)
        yield


@st.composite
def attempts(draw: st.DrawFn) -> list[AttemptFacts]:
    """Attempts of two tags, each named once; no two commits have one order, as the coordinator counts its saves."""
    ids = draw(st.lists(st.builds(AttemptId, st.integers(1, 5), st.integers(0, 20)), unique=True, max_size=12))
    found = []
    for n, attempt in enumerate(ids):
        state: State = draw(st.sampled_from(["committed", "aborted", "in-doubt", "deleted", "damaged"]))
        order: Order | None = (attempt.start, n) if state == "committed" else None
        found.append(AttemptFacts(draw(st.sampled_from("ab")), attempt, state, order, draw(st.booleans())))
    return found


@settings(max_examples=500)  # several attempts of one tag must have one state
@given(attempts())
def test_garbage_1_what_is_undecided_or_cannot_be_read_is_never_touched(known: list[AttemptFacts]) -> None:
    touched = [facts for facts, _ in dead_weight(known)] + spent_records(known)
    assert not {"in-doubt", "damaged"} & {facts.state for facts in touched}


@given(attempts())
def test_what_is_committed_is_no_dead_weight(known: list[AttemptFacts]) -> None:
    assert "committed" not in {facts.state for facts, _ in dead_weight(known)}


@given(attempts())
def test_garbage_2_of_an_aborted_attempt_only_the_bulk_goes(known: list[AttemptFacts]) -> None:
    dead = [facts for facts, _ in dead_weight(known)]
    for facts in known:
        if facts.state == "aborted":
            assert (facts in dead) == facts.bulk
            assert not (facts.bulk and facts in spent_records(known))


def test_garbage_2_so_many_aborted_attempts_of_all_tags_keep_their_records() -> None:
    known = [
        AttemptFacts(tag, AttemptId(start, 0), "aborted", (start, 0), bulk=False) for start in range(1, 50) for tag in "ab"
    ]
    left = set(known) - set(spent_records(known[::-1]))
    assert left == set(known[-ABORTED_KEPT:])


@given(attempts())
def test_garbage_3_records_go_only_of_what_was_deleted_or_aborted_and_the_newest_stay(known: list[AttemptFacts]) -> None:
    spent = spent_records(known)
    for facts in spent:
        assert facts.state in ("deleted", "aborted")
        assert not facts.bulk
        if facts.state == "aborted":
            assert len(left(known, "aborted", spent)) == ABORTED_KEPT
        else:
            of_the_tag = [one for one in left(known, "deleted", spent) if one.tag == facts.tag]
            assert len(of_the_tag) == RECORDS_KEPT or len(left(known, "deleted", spent)) == ROOT_RECORDS_KEPT


def left(known: list[AttemptFacts], state: State, spent: list[AttemptFacts]) -> list[AttemptFacts]:
    """The attempts of a state whose records stay, and that have nothing else any more."""
    return [facts for facts in known if facts.state == state and not facts.bulk and facts not in spent]


@given(attempts())
def test_the_order_of_a_listing_does_not_matter(known: list[AttemptFacts]) -> None:
    def judged(facts: list[AttemptFacts]) -> set[tuple[AttemptFacts, str]]:
        return set(dead_weight(facts))

    assert judged(known) == judged(known[::-1]) == judged(sorted(known, key=lambda f: (f.tag, f.attempt)))


@given(attempts())
def test_what_was_collected_is_not_found_again(known: list[AttemptFacts]) -> None:
    dead = dict(dead_weight(known))
    after = [
        facts if facts not in dead else AttemptFacts(facts.tag, facts.attempt, facts.state, None, bulk=False) for facts in known
    ]
    assert dead_weight(after) == []


def test_each_reason_is_said_in_words() -> None:
    known = [
        AttemptFacts("a", AttemptId(1, 0), "committed", (1, 0), bulk=True),
        AttemptFacts("a", AttemptId(1, 1), "committed", (1, 1), bulk=True),
        AttemptFacts("a", AttemptId(1, 2), "aborted", None, bulk=True),
        AttemptFacts("a", AttemptId(1, 3), "deleted", None, bulk=True),
    ]
    assert [(facts.attempt.k, why) for facts, why in dead_weight(known)] == [
        (2, "the attempt was aborted"),
        (3, "left by a deletion that was interrupted"),
    ]


def test_the_newest_records_of_each_tag_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "ROOT_RECORDS_KEPT", 2 * RECORDS_KEPT)
    known = [
        AttemptFacts(tag, AttemptId(1, k), "deleted", None, bulk=False)
        for tag in "ab"
        for k in reversed(range(RECORDS_KEPT + (2 if tag == "a" else 0)))
    ]
    assert [(facts.tag, facts.attempt.k) for facts in spent_records(known)] == [("a", 0), ("a", 1)]


def test_what_is_still_being_removed_does_not_count_as_a_record() -> None:
    known = [AttemptFacts("a", AttemptId(1, k), "deleted", None, bulk=True) for k in range(RECORDS_KEPT + 5)]
    assert spent_records(known) == []
