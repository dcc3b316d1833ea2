"""LOG-7, LOG-8 and LOG-10 of commit/log.py: each row of its table, and what holds after any history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.log import (
    FORGET_AFTER,
    FORGET_EVERY,
    apply,
    check,
    check_all,
    fate,
    following,
    may_be_spared,
    needed_by_others,
    reached,
    rebuilt,
    with_number,
)
from checkpointd.layout.log_records import (
    BEGINS_MAX,
    AbortRecord,
    AnnounceRecord,
    CommitRecord,
    HoldRecord,
    LogEntry,
    LogState,
    Record,
    decode_state,
    encode_state,
)
from tests.unit.commit.log_histories import (
    abort,
    after,
    announce,
    begin,
    commit,
    damaged,
    entry,
    histories,
    hold,
    nonce,
    passed_over,
    remove,
    rollback,
    saved,
    swept,
    verified,
)

EMPTY = LogState()
A, B, C, D = "step10/00000001-0", "step20/00000001-1", "step30/00000001-2", "step40/00000001-3"
BEGUN = after(EMPTY, begin(1))
CHECKPOINT = after(BEGUN, saved(A))
"""A is a checkpoint."""
EACH_FATE = after(BEGUN, announce(A), saved(B), [announce(C), abort(C)], saved(D), remove(D))
"""A is undecided, B a checkpoint, C aborted, and D removed."""


def notes_until(state: LogState, number: int) -> LogState:
    """The state after entry `number`. The entries on the way change nothing that a test looks at."""
    entries = list[LogEntry]()
    for following_number in range(state.number + 1, number + 1):
        before = entries[-1].nonce if entries else state.nonce
        entries.append(LogEntry(number=following_number, nonce=nonce(following_number), before=before, records=()))
    return following(state, entries)


# --- begin ------------------------------------------------------------------------------------------------------------


def test_a_start_is_newer_than_the_one_before() -> None:
    assert check(EMPTY, begin(1)) == ""
    assert check(BEGUN, begin(7)) == ""
    assert check(BEGUN, begin(1)) == "start 1 is not newer than start 1"
    assert check(after(BEGUN, begin(7)), begin(2)) == "start 2 is not newer than start 7"
    assert check(EMPTY, begin(0)) == "start 0 is not newer than start 0"


@pytest.mark.parametrize(
    ("spared", "why"),
    [
        (A, ""),
        ("step50/00000001-4", ""),  # of the newest start, and not announced yet
        (B, f"{B} cannot be spared: it is a checkpoint"),
        (C, f"{C} cannot be spared: it was aborted"),
        (D, f"{D} cannot be spared: it was removed"),
        ("step50/00000002-0", "step50/00000002-0 cannot be spared: it is not in the log"),
    ],
)
def test_a_start_spares_what_is_undecided_or_may_still_be_announced(spared: str, why: str) -> None:
    assert check(EACH_FATE, begin(2, A, spared)) == why
    assert may_be_spared(EACH_FATE, spared) == (not why)


def test_log_7_what_a_start_does_not_spare_is_aborted_and_the_words_name_who_did_it() -> None:
    state = after(BEGUN, [announce(A), announce(B)], begin(2, A))
    assert state.attempts[A].status == "undecided"
    fenced = state.attempts[B]
    assert fenced.status == "aborted"
    assert fenced.abort is not None
    assert fenced.abort.attempt == B
    assert fenced.abort.error.code == "FencedError"
    assert fenced.abort.error.message == "start 2 has begun, by process 77 on node-1 at 2026-11-28T12:00:00Z"
    assert (state.start, state.begin, state.begins) == (2, begin(2, A), (begin(1), begin(2, A)))
    assert check(state, commit(A)) == ""
    assert check(state, commit(B)) == f"{B} was aborted"


def test_the_nonces_of_the_newest_starts_are_kept() -> None:
    state = after(EMPTY, *(begin(start) for start in range(1, BEGINS_MAX + 3)))
    assert len(state.begins) == BEGINS_MAX
    assert state.begins[0] == begin(3)
    assert reached(state, begin(3))
    assert not reached(state, begin(2))


# --- announce ---------------------------------------------------------------------------------------------------------


def test_nothing_is_announced_before_a_start() -> None:
    assert check(EMPTY, announce(A)) == f"no start has begun, so {A} is of none"
    assert check(EMPTY, announce("step10/00000000-0")) == "no start has begun, so step10/00000000-0 is of none"
    assert not may_be_spared(EMPTY, "step10/00000000-0")


def test_a_mirror_announces_what_its_origin_saved_in_older_starts() -> None:
    mirror = after(EMPTY, begin(9, origin="file:///origin"))
    state = after(mirror, saved("a/00000003-7"), saved("b/00000002-1"), saved("c/00000009-0"))
    assert check(state, announce("d/00000010-0")) == "d/00000010-0 is neither of start 9, the newest, nor spared by it"
    assert check(state, announce("a/00000003-7")) == "a/00000003-7 is a checkpoint"
    assert [name for name, one in state.attempts.items() if one.status == "checkpoint"] == [
        "a/00000003-7",
        "b/00000002-1",
        "c/00000009-0",
    ]


# --- the numbers that were used ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30)))
def test_used_numbers_are_kept_as_ranges(numbers: list[int]) -> None:
    ranges: tuple[tuple[int, int], ...] = ()
    for number in numbers:
        ranges = with_number(ranges, number)
    assert {n for first, last in ranges for n in range(first, last + 1)} == set(numbers)
    assert all(before[1] + 1 < then[0] for before, then in pairwise(ranges))


def test_the_used_numbers_of_a_start_go_when_none_of_its_attempts_may_come_any_more() -> None:
    state = after(BEGUN, [announce(A), announce(B)], announce(D))
    assert dict(state.used) == {1: ((0, 1), (3, 3))}
    state = after(state, begin(2, B))
    assert dict(state.used) == {1: ((0, 1), (3, 3))}
    state = after(state, announce("step50/00000002-0"), begin(3))
    assert dict(state.used) == {}


def test_log_8_a_spared_attempt_is_announced_once() -> None:
    waiting = "step90/00000001-9"
    state = after(BEGUN, saved(A), begin(2, waiting), [announce(waiting), abort(waiting)], swept(waiting))
    state = notes_until(state, 5 * FORGET_EVERY)
    assert waiting not in state.attempts
    assert check(state, announce(waiting)) == f"save 9 of its start was announced before {waiting}"
    assert check(state, abort(waiting)) == f"{waiting} is not in the log"


def test_log_8_a_mirror_keeps_the_used_numbers_of_all_starts() -> None:
    state = after(EMPTY, begin(1000, origin="file:///origin"))
    for start in range(1, BEGINS_MAX + 9):
        name = f"tag/{start:08d}-0"
        state = after(state, [announce(name), abort(name), swept(name)])
    state = notes_until(after(state, begin(1001, origin="file:///origin")), 10 * FORGET_EVERY)
    assert not state.attempts
    assert check(state, announce("tag/00000001-0")) == "save 0 of its start was announced before tag/00000001-0"


# --- commit and abort -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide", [commit, abort])
def test_what_is_undecided_is_decided_once(decide: Callable[[str], Record]) -> None:
    assert check(EACH_FATE, decide(A)) == ""
    assert check(EACH_FATE, decide(B)) == f"{B} is a checkpoint"
    assert check(EACH_FATE, decide(C)) == f"{C} was aborted"
    assert check(EACH_FATE, decide(D)) == f"{D} was removed"
    assert check(EACH_FATE, decide("x/00000001-8")) == "x/00000001-8 is not in the log"


def test_log_10_a_commit_refers_to_its_base_and_to_what_that_refers_to() -> None:
    state = after(BEGUN, saved(A), saved(B, base=A, holders=(A,)), saved(C), announce(D, base=B))
    assert check(state, commit(D, holders=(A, B))) == ""
    assert check(state, commit(D, holders=(A, C))) == ""  # a rank may know another checkpoint than the coordinator
    gone = after(state, remove(C))
    assert check(gone, commit(D, holders=(A, C))) == f"{D} refers to objects that may be gone: {C} was removed"
    free = after(state, remove(A), announce("x/00000001-8"))
    refused = check(free, commit("x/00000001-8", holders=(A,)))
    assert refused == f"x/00000001-8 refers to objects that may be gone: {A} was removed"


# --- remove -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "fate_of_it"),
    [(A, "is undecided"), (C, "was aborted"), (D, "was removed"), ("x/00000001-8", "is not in the log")],
)
@pytest.mark.parametrize("start", [0, 1])
def test_only_checkpoints_are_removed(attempt: str, fate_of_it: str, start: int) -> None:
    assert check(EACH_FATE, remove(B, attempt, start=start)) == f"{attempt} {fate_of_it}"


def test_a_start_removes_if_a_sound_checkpoint_stays_that_was_read_back() -> None:
    state = after(BEGUN, saved(A), saved(B), saved(C))
    none_left = f"without {A} no checkpoint is left that was read back whole"
    assert check(state, remove(A, start=1)) == none_left
    assert check(state, remove(A, B, C)) == ""  # a person does
    assert check(after(state, verified(A)), remove(A, start=1)) == none_left
    assert check(after(state, verified(B)), remove(A, start=1)) == ""
    assert check(after(state, verified(B), damaged(B)), remove(A, start=1)) == none_left
    assert check(after(state, verified(B), passed_over(B)), remove(A, start=1)) == none_left
    assert check(after(state, verified(B), verified(C), remove(B)), remove(A, start=1)) == ""
    assert check(after(state, verified(B), remove(B)), remove(A, start=1)) == none_left
    assert check(after(state, verified(B), begin(2)), remove(A, start=1)) == "start 2 has begun, so start 1 removes nothing"
    assert check(after(state, verified(B), begin(2)), remove(A, start=2)) == ""


def test_a_removed_checkpoint_says_who_removed_it() -> None:
    state = after(BEGUN, saved(A), saved(B), verified(B), remove(A, B))
    one = state.attempts[A]
    assert (one.status, one.removal, one.commit) == ("removed", remove(A), commit(A))
    assert dict(state.heads) == {}


# --- swept ------------------------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_swept_once() -> None:
    assert check(EACH_FATE, swept(C, D)) == ""
    assert check(EACH_FATE, swept(C, A)) == f"{A} is undecided"
    assert check(EACH_FATE, swept(B)) == f"{B} is a checkpoint"
    assert check(EACH_FATE, swept("x/00000001-8")) == "x/00000001-8 is not in the log"
    assert check(after(EACH_FATE, swept(C)), swept(C)) == f"{C} was aborted, and nothing is left of it"
    assert check_all(EACH_FATE, [swept(C), swept(C)]) == f"{C} was aborted, and nothing is left of it"
    first_entry = [begin(1), announce(A), abort(A), swept(A), swept(A)]
    assert check_all(EMPTY, first_entry) == f"{A} was aborted, and nothing is left of it"


def test_what_was_swept_is_forgotten_some_entries_later() -> None:
    state = after(BEGUN, saved(B), [announce(A), abort(A)])
    state = after(notes_until(state, FORGET_EVERY - 1), swept(A))  # entry 64
    assert state.attempts[A].swept == FORGET_EVERY
    assert A in notes_until(state, FORGET_EVERY + FORGET_AFTER - 1).attempts
    later = notes_until(state, FORGET_EVERY + FORGET_AFTER)
    assert A not in later.attempts
    assert B in later.attempts
    assert fate(later, A) == "is not in the log"
    later_swept = after(notes_until(after(BEGUN, [announce(A), abort(A)]), FORGET_EVERY), swept(A))  # entry 65
    assert A in notes_until(later_swept, 4 * FORGET_EVERY - 1).attempts
    assert A not in notes_until(later_swept, 4 * FORGET_EVERY).attempts


# --- verified, damaged, passed over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("note", [verified, damaged, passed_over, rollback])
def test_only_a_checkpoint_is_noted(note: Callable[[str], Record]) -> None:
    assert check(EACH_FATE, note(B)) == ""  # A is older, so nothing newer than B may still commit
    assert check(EACH_FATE, note(A)) == f"{A} is undecided"
    assert check(EACH_FATE, note(C)) == f"{C} was aborted"
    assert check(EACH_FATE, note(D)) == f"{D} was removed"
    assert check(EACH_FATE, note("x/00000001-8")) == "x/00000001-8 is not in the log"


def test_the_later_of_verified_and_damaged_counts() -> None:
    one = after(CHECKPOINT, verified(A)).attempts[A]
    assert (one.verified, one.damaged) == (True, "")
    state = after(CHECKPOINT, verified(A), damaged(A, "chunk 3"))
    assert (state.attempts[A].verified, state.attempts[A].damaged) == (False, "chunk 3")
    assert not reached(state, verified(A))
    state = after(state, verified(A))
    assert (state.attempts[A].verified, state.attempts[A].damaged) == (True, "")
    assert not reached(state, damaged(A))
    assert after(CHECKPOINT, damaged(A, "")).attempts[A].damaged == "damaged"


# --- rollback and heads -----------------------------------------------------------------------------------------------


def left_behind(state: LogState) -> set[str]:
    return {name for name, one in state.attempts.items() if one.left_behind}


def test_a_rollback_leaves_behind_what_came_after_it() -> None:
    state = after(BEGUN, saved(A), saved(B), saved(C), damaged(C))
    assert check(state, rollback(C)) == f"{C} is damaged"
    back = after(state, rollback(A))
    assert left_behind(back) == {B, C}
    assert dict(back.heads) == {"": A}
    forth = after(back, rollback(B))
    assert left_behind(forth) == {C}
    assert dict(forth.heads) == {"": B}


def test_there_is_no_rollback_while_something_newer_may_commit() -> None:
    waiting = "step90/00000001-9"
    state = after(BEGUN, announce(A), saved(B), announce(C))
    assert check(state, rollback(B)) == f"{C} may still commit, and would be newer than {B}"
    assert check_all(state, [begin(2, A), rollback(B)]) == ""  # A is older
    assert check_all(state, [begin(2, waiting), rollback(B)]) == f"{waiting} may still commit, and would be newer than {B}"
    assert check_all(state, [begin(2, waiting), announce(waiting), abort(waiting), rollback(B)]) == ""


def test_each_training_has_a_head() -> None:
    one, other = "runs/a/checkpoint-1", "runs/b/checkpoint-1"
    state = after(BEGUN, saved(A), saved(B, shown_at=one), saved(C, shown_at=other), saved(D, shown_at="runs/a/checkpoint-2"))
    assert dict(state.heads) == {"": A, "runs/a": D, "runs/b": C}
    state = after(state, rollback(B))
    assert left_behind(state) == {D}
    assert dict(state.heads) == {"": A, "runs/a": B, "runs/b": C}


# --- hold -------------------------------------------------------------------------------------------------------------


MIRROR = after(EMPTY, begin(9, origin="file:///origin"))
HELD = "a/00000003-7"


def test_an_unknown_attempt_is_held_as_if_removed() -> None:
    state = after(MIRROR, hold(HELD))
    assert state.attempts[HELD].status == "removed"
    assert reached(state, hold(HELD))
    assert check(state, hold(HELD)) == f"{HELD} was removed"
    assert check(state, announce(HELD)) == f"{HELD} was removed"
    assert check(BEGUN, hold(HELD)) == f"{HELD} is not in the log"  # which is no mirror


def test_what_was_swept_may_be_held_again() -> None:
    state = after(MIRROR, saved(HELD), remove(HELD))
    assert check(state, hold(HELD)) == f"{HELD} was removed"
    state = after(state, swept(HELD))
    assert check(state, announce(HELD)) == f"{HELD} was removed, and nothing is left of it"
    again = after(state, hold(HELD))
    assert (again.attempts[HELD].status, again.attempts[HELD].swept) == ("removed", 0)
    assert check(notes_until(state, 4 * FORGET_EVERY), hold(HELD)) == ""


def test_log_10_a_mirror_copies_older_objects_before_its_log_knows_their_attempt() -> None:
    state = after(MIRROR, announce("b/00000003-9"))
    commits = commit("b/00000003-9", holders=(HELD,))
    assert check_all(state, [commits, hold(HELD), swept(HELD)]) == f"others need objects of {HELD}"
    state = after(state, [hold(HELD)])
    assert check(state, commits).startswith("b/00000003-9 refers to objects that may be gone")  # somebody may sweep it now
    job = after(BEGUN, announce("b/00000001-9"))
    assert check(job, commit("b/00000001-9", holders=(HELD,))).startswith("b/00000001-9 refers to objects that may be gone")


# --- entries, aims and rebuilds ---------------------------------------------------------------------------------------


def test_the_records_of_an_entry_are_checked_in_order() -> None:
    assert check_all(BEGUN, [announce(A), commit(A), begin(2), announce("b/00000002-0", base=A)]) == ""
    assert check_all(BEGUN, [commit(A), announce(A)]) == f"{A} is not in the log"
    assert check_all(BEGUN, [announce(A), begin(2), commit(A)]) == f"{A} was aborted"
    assert check_all(EMPTY, []) == ""


def test_reached_tells_what_has_become_of_an_aim() -> None:
    assert not reached(EACH_FATE, commit(A))
    assert reached(EACH_FATE, commit(C))  # it was decided otherwise
    assert reached(EACH_FATE, abort(B))
    assert not reached(EACH_FATE, announce("x/00000001-8"))
    assert not reached(EACH_FATE, remove(D, B))
    assert reached(EACH_FATE, remove(D, "x/00000001-8"))
    assert not reached(EACH_FATE, swept(C))
    assert not reached(EACH_FATE, rollback(A))
    assert reached(EACH_FATE, rollback(B))  # it is the newest already
    newer = after(EACH_FATE, saved("x/00000001-9"))
    assert not reached(newer, rollback(B))
    assert reached(after(newer, rollback(B)), rollback(B))
    assert not reached(BEGUN, begin(2))
    other = begin(1)
    assert reached(BEGUN, other)
    assert not reached(after(EMPTY, begin(1)), type(other)(start=1, nonce="f" * 32, world_size=2, writer=other.writer))


def test_a_rebuilt_state_of_which_nothing_could_be_read() -> None:
    state = rebuilt(EMPTY, 10**6, nonce(5), [hold(A), swept(A), begin(2)])
    assert state.attempts[A].swept == 10**6
    assert A not in notes_until(state, 10**6 + FORGET_AFTER).attempts


def test_records_on_attempts_of_which_nothing_could_be_read() -> None:
    records = [commit(A), abort(B), remove(C), swept(D), verified(D), damaged(D), passed_over(D), rollback(D)]
    state = following(BEGUN, [entry(BEGUN, *records)])
    assert [(name, one.status) for name, one in state.attempts.items()] == [(A, "checkpoint"), (B, "aborted"), (C, "removed")]


# --- any history ------------------------------------------------------------------------------------------------------


def entries_of(records: Sequence[Record], per_entry: int) -> list[LogEntry]:
    """`records` in entries of `per_entry`."""
    found, before = list[LogEntry](), ""
    for number, start in enumerate(range(0, len(records), per_entry), 1):
        found.append(
            LogEntry(number=number, nonce=nonce(number), before=before, records=tuple(records[start : start + per_entry]))
        )
        before = found[-1].nonce
    return found


@given(histories)
def test_after_any_history(records: list[Record]) -> None:
    state, decided, announced = EMPTY, dict[str, str](), set[str]()
    for record in records:
        before, state = state, after(state, record)
        assert reached(state, record)
        assert not reached(before, record) or not isinstance(record, CommitRecord | AbortRecord | AnnounceRecord | HoldRecord)
        for name, one in state.attempts.items():
            assert decided.setdefault(name, one.status) in (one.status, "undecided", "checkpoint")
            if decided[name] == "checkpoint":
                assert one.status in ("checkpoint", "removed")
            decided[name] = one.status
        if isinstance(record, AnnounceRecord | HoldRecord):
            assert record.attempt not in announced or isinstance(record, HoldRecord)
            announced.add(record.attempt)
        checkpoints = {name for name, one in state.attempts.items() if one.status == "checkpoint"}
        assert set(state.heads.values()) <= checkpoints
        assert not any(state.attempts[head].left_behind for head in state.heads.values())
        assert not any(state.attempts[name].swept for name in needed_by_others(state) if name in state.attempts)
        assert all(one.swept <= state.number for one in state.attempts.values())


@given(histories, st.integers(1, 5))
def test_entries_together_are_as_records_one_by_one(records: list[Record], per_entry: int) -> None:
    entries = entries_of(records, per_entry)
    together = following(EMPTY, entries)
    state = EMPTY
    for one in entries:
        assert check_all(state, one.records) == ""
        single = state
        for record in one.records:
            single = apply(single, record)
        state = following(state, [one])
        if one.number % FORGET_EVERY:
            assert (single.begin, single.used, single.heads, single.attempts) == (
                state.begin,
                state.used,
                state.heads,
                state.attempts,
            )
            assert single.begins == state.begins
    assert together == state


@given(histories, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 3))
def test_who_reads_in_other_batches_or_goes_on_from_a_state_knows_the_same(
    records: list[Record], batches: list[int], notes: int
) -> None:
    entries = entries_of(records, 1)
    for _ in range(notes * FORGET_EVERY):
        last = entries[-1]
        entries.append(LogEntry(number=last.number + 1, nonce=nonce(last.number + 1), before=last.nonce, records=()))
    at_once, state, at = following(EMPTY, entries), EMPTY, 0
    while at < len(entries):
        size = batches[at % len(batches)]
        state = following(state, entries[at : at + size])
        at += size
        state = decode_state(encode_state(state), state.number)
    assert state == at_once
    assert list(state.attempts) == list(at_once.attempts)
