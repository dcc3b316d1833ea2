"""LOG-1 to LOG-6 and LOG-11 of commit/log_access.py: what one process asks of the store, and what it makes of the replies.

Each entry of the logs here begins the start of its number. The explorer in tests/model/ runs the same code beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.log import check, following, reached
from checkpointd.commit.log_access import (
    ABSENT,
    LOOKS,
    REBUILD_GAP,
    STATE_EVERY,
    STATES_KEPT,
    UNSURE,
    Compaction,
    Ended,
    GetEntries,
    GetState,
    KnownLog,
    ListLog,
    LogAccess,
    PutEntry,
    PutMark,
    PutState,
    Rebuild,
    RemoveEntries,
    RemoveStates,
    Reply,
    Request,
    Settle,
    Unusable,
    Wanted,
    append,
    follow,
    look,
)
from checkpointd.errors import FormatError
from checkpointd.layout.log_records import NUMBER_MAX, LogEntry, LogListing, LogState, Record, entry_key, mark_key, state_key
from tests.unit.commit.log_histories import begin, entry, nonce

OWN = "abcdef" * 5
"""The nonce of the entries that the process under test puts."""


def unusable(key: str) -> Unusable:
    return Unusable(FormatError(f"{key} is damaged: it does not end in its checksum", key=key))


@dataclass
class Log:
    """A log in memory, that notes each request. `before`: what others do before the request of that number."""

    entries: dict[int, LogEntry | Unusable] = field(default_factory=dict)
    states: dict[int, LogState | Unusable] = field(default_factory=dict)
    marks: set[int] = field(default_factory=set)
    asked: list[Request] = field(default_factory=list)
    before: dict[int, Callable[[], object]] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    """Replies that puts of entries give instead of theirs."""

    def do(self, request: Request) -> Reply:
        self.before.pop(len(self.asked), lambda: None)()
        self.asked.append(request)
        match request:
            case ListLog():
                return self.listing
            case GetEntries(numbers):
                return tuple(self.entries.get(number, ABSENT) for number in numbers)
            case GetState(number):
                return self.states.get(number, ABSENT)
            case PutEntry(one):
                is_free = one.number not in self.entries
                self.entries.setdefault(one.number, one)
                return self.replies.pop(0) if self.replies else is_free
            case PutState(state):
                self.states.setdefault(state.number, state)
            case PutMark(number):
                self.marks.add(number)
            case RemoveStates(numbers):
                for number in numbers:
                    del self.states[number]
            case RemoveEntries(numbers):
                for number in numbers:
                    del self.entries[number]
        return True

    @property
    def listing(self) -> LogListing:
        return LogListing(tuple(sorted(self.entries)), tuple(sorted(self.states)), tuple(sorted(self.marks)))

    def run(self, access: LogAccess) -> Ended:
        self.asked.clear()
        step: LogAccess | Ended = access
        while isinstance(step, LogAccess):
            step = step.after(self.do(step.request))
        return step

    @property
    def words(self) -> list[str]:
        """The requests in short."""
        names = {ListLog: "list", GetEntries: "entries", GetState: "state", PutEntry: "put", Settle: "settle"}
        return [names[type(request)] for request in self.asked if type(request) in names]


def truth(last: int) -> tuple[list[LogEntry], list[LogState]]:
    """The entries of a log, and the state after each; the first of these is empty."""
    entries, states = list[LogEntry](), [LogState()]
    for number in range(1, last + 1):
        entries.append(entry(states[-1], begin(number)))
        states.append(following(states[-1], entries[-1:]))
    return entries, states


ENTRIES, STATES = truth(6 * STATE_EVERY + 10)
FOUR = tuple(STATE_EVERY * k for k in (3, 4, 5, 6))
"""The numbers of the states that a compacted log of all ENTRIES has."""


def log_of(last: int, *, states: Sequence[int] = (), since: int = 0) -> Log:
    """The first `last` ENTRIES without those up to `since`, and STATES of these numbers."""
    return Log({one.number: one for one in ENTRIES[since:last]}, {number: STATES[number] for number in states})


def compacted() -> Log:
    return log_of(len(ENTRIES), states=FOUR, since=FOUR[0])


def aim(record: Record) -> Wanted:
    """What an append of `record` wants: nothing once it is there, or refused."""
    return lambda state: [] if reached(state, record) or check(state, record) else [record]


def next_start(state: LogState) -> list[Record]:
    return [begin(state.start + 1)]


def known(number: int, *, is_settled: bool = True) -> KnownLog:
    return KnownLog(STATES[number], is_settled=is_settled)


# --- look -------------------------------------------------------------------------------------------------------------


def test_a_look_at_an_empty_log_is_one_list() -> None:
    log = Log()
    assert log.run(look(KnownLog())) == Ended(KnownLog())
    assert log.words == ["list"]


def test_a_new_look_is_a_list_the_entries_and_the_state_last() -> None:
    log = compacted()
    ended = log.run(look(KnownLog()))
    assert ended.known.state == STATES[-1]
    assert (ended.is_proved, ended.fault, ended.put) == (True, "", False)
    assert log.words == ["list", "entries", "state"]
    assert log.asked[1:] == [GetEntries(tuple(range(FOUR[-1], len(ENTRIES) + 1))), GetState(FOUR[-1])]


def test_a_new_look_at_a_log_that_ends_with_a_state_reads_that_and_its_entry() -> None:
    log = log_of(STATE_EVERY, states=[STATE_EVERY])
    assert log.run(look(KnownLog())).known.state == STATES[STATE_EVERY]
    assert log.words == ["list", "entries", "state"]


def test_a_look_from_what_is_known_reads_what_is_new_and_lists_again() -> None:
    log = log_of(7)
    assert log.run(look(known(7))) == Ended(known(7))
    assert log.words == ["list"]
    ended = log.run(look(known(4)))
    assert (ended.known.state, ended.is_proved) == (STATES[7], True)
    assert log.words == ["list", "entries", "list"]
    assert not ended.known.is_settled


def test_a_look_without_a_state_begins_with_the_first_entry() -> None:
    log = log_of(7)
    assert log.run(look(KnownLog())).known.state == STATES[7]
    assert log.words == ["list", "entries", "list"]


def test_what_comes_while_a_look_reads_is_read_too() -> None:
    log = log_of(7)
    log.before[2] = lambda: log.entries.update({8: ENTRIES[7], 9: ENTRIES[8]})
    assert log.run(look(known(4))).known.state == STATES[9]
    assert log.words == ["list", "entries", "list", "entries", "list"]


def test_log_5_a_look_that_settles_makes_what_it_read_durable_once() -> None:
    log = compacted()
    ended = log.run(look(KnownLog(), settles=True))
    assert log.words == ["list", "entries", "state", "settle"]
    assert log.asked[-1] == Settle(len(ENTRIES))
    assert ended.known.is_settled
    log.run(look(ended.known, settles=True))
    assert log.words == ["list"]


def test_a_state_that_is_removed_before_it_is_read_is_looked_for_again() -> None:
    log = compacted()
    log.states = {FOUR[0]: STATES[FOUR[0]]}
    log.before[1] = lambda: setattr(log, "states", {FOUR[-1]: STATES[FOUR[-1]]})
    ended = log.run(look(KnownLog()))
    assert (ended.known.state, ended.is_proved) == (STATES[-1], True)
    assert log.words == ["list", "entries", "state", "list", "entries", "state"]


def test_entries_that_are_removed_before_they_are_read_are_looked_for_again() -> None:
    log = log_of(len(ENTRIES))

    def is_compacted() -> None:
        log.entries, log.states = compacted().entries, compacted().states

    log.before[1] = is_compacted
    ended = log.run(look(known(4)))
    assert (ended.known.state, ended.is_proved) == (STATES[-1], True)


def test_a_state_that_is_always_missing_is_a_fault() -> None:
    log = compacted()
    gone = state_key(FOUR[-1])

    class Hidden(Log):
        def do(self, request: Request) -> Reply:
            reply = super().do(request)
            return ABSENT if isinstance(request, GetState) else reply

    ended = Hidden(log.entries, log.states).run(look(KnownLog()))
    assert (ended.fault, ended.is_proved, ended.known) == (f"{gone} is missing", False, KnownLog())


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [5, 7])
def test_an_unreadable_entry_is_named_and_what_is_before_it_is_known(bad: int) -> None:
    log = log_of(7)
    log.entries[bad] = unusable(entry_key(bad))
    ended = log.run(look(known(3)))
    assert ended.fault == f"{entry_key(bad)} is damaged: it does not end in its checksum"
    assert (ended.known.state, ended.is_proved) == (STATES[bad - 1], False)
    assert log.words.count("list") == LOOKS


def test_log_1_nothing_is_put_after_an_unreadable_entry() -> None:
    log = log_of(7)
    log.entries[6] = unusable(entry_key(6))
    ended = log.run(append(known(3), next_start, OWN))
    assert "is damaged" in ended.fault
    assert (ended.put, sorted(log.entries)) == (False, list(range(1, 8)))


def test_an_unreadable_entry_that_a_state_covers_is_not_missed() -> None:
    log = compacted()
    log.entries[FOUR[-1] - 1] = unusable(entry_key(FOUR[-1] - 1))
    assert log.run(look(known(FOUR[-1] - 5))).known.state == STATES[-1]


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_for_unreadable_states_the_one_before_them_and_the_entries_tell_the_same(bad: int) -> None:
    log = compacted()
    for number in FOUR[-bad:]:
        log.states[number] = unusable(state_key(number))
    ended = log.run(look(KnownLog()))
    assert (ended.known.state, ended.is_proved, ended.fault) == (STATES[-1], True, "")
    ended = log.run(append(KnownLog(), next_start, OWN))
    assert (ended.known.state.start, ended.put) == (len(ENTRIES) + 1, True)


def test_unreadable_states_and_nothing_that_tells_the_same_are_a_fault() -> None:
    log = compacted()
    log.states = {number: unusable(state_key(number)) for number in FOUR}
    ended = log.run(look(KnownLog()))
    assert ended.fault == f"{state_key(FOUR[-1])} is damaged, and nothing else tells what it says"
    assert (ended.known, ended.is_proved) == (KnownLog(), False)
    log = log_of(STATE_EVERY, states=[STATE_EVERY], since=STATE_EVERY)
    log.states[STATE_EVERY] = unusable(state_key(STATE_EVERY))
    assert log.run(look(KnownLog())).fault == f"{state_key(STATE_EVERY)} is damaged, and nothing else tells what it says"


def test_a_missing_entry_is_a_fault() -> None:
    log = log_of(7)
    del log.entries[5]
    ended = log.run(look(KnownLog()))
    assert ended.fault == f"{entry_key(5)} is missing, although {entry_key(6)} is there"
    assert (ended.known.state, ended.is_proved) == (STATES[4], False)


def test_log_3_an_exchanged_entry_is_not_used() -> None:
    log = log_of(7)
    log.entries[5] = replace_before(ENTRIES[4], nonce(99))
    ended = log.run(look(KnownLog()))
    words = "does not follow the entry before it: somebody has changed or exchanged one of the two"
    assert ended.fault == f"{entry_key(5)} {words}"
    assert (ended.known.state, ended.is_proved) == (STATES[3], False)  # entry 4 may be the one that was exchanged
    for access in (follow(known(4), lambda _: False), append(known(4), next_start, OWN)):
        ended = log.run(access)
        assert ended.fault == f"{entry_key(5)} {words}"
        assert ended.known.state == STATES[4]


def replace_before(one: LogEntry, before: str) -> LogEntry:
    return LogEntry(number=one.number, nonce=one.nonce, before=before, records=one.records)


kinds = st.sampled_from(["unreadable", "removed", "exchanged"])


@given(
    st.lists(st.tuples(kinds, st.booleans(), st.integers(0, 300)), max_size=4), st.sampled_from([0, FOUR[0] + 5, FOUR[-1] + 3])
)
def test_whatever_is_damaged_a_look_knows_the_truth_or_names_a_fault(damage: list[tuple[str, bool, int]], at: int) -> None:
    log = compacted()
    for kind, is_state, number in damage:
        objects: dict[int, LogEntry | Unusable] | dict[int, LogState | Unusable] = log.states if is_state else log.entries
        if not objects:
            continue
        one = sorted(objects)[-1 - number % len(objects)]
        found = objects[one]
        if kind == "unreadable" or (kind == "exchanged" and not isinstance(found, LogEntry)):
            objects[one] = unusable(state_key(one) if is_state else entry_key(one))
        elif kind == "removed" and one < log.listing.last:
            del objects[one]
        elif isinstance(found, LogEntry):
            log.entries[one] = replace_before(found, nonce(99))
    ended = log.run(look(KnownLog(STATES[at])))
    assert ended.known.state == STATES[ended.known.state.number]
    if ended.is_proved:
        assert (ended.fault, ended.known.state.number) == ("", len(ENTRIES))
    else:
        assert ended.fault
        assert "log/0000" in ended.fault


# --- append -----------------------------------------------------------------------------------------------------------


def test_an_append_that_nobody_disturbs_is_a_put_and_a_list() -> None:
    log = log_of(7)
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "list"]
    assert (ended.put, ended.is_proved, ended.fault) == (True, True, "")
    assert (ended.known.state.number, ended.known.state.start, ended.known.state.nonce) == (8, 8, OWN)
    assert ended.known.is_settled
    assert log.entries[8] == LogEntry(number=8, nonce=OWN, before=STATES[7].nonce, records=(begin(8),))


def test_the_first_entry_names_none_before_it() -> None:
    log = Log()
    assert log.run(append(KnownLog(), next_start, OWN)).put
    assert log.entries == {1: LogEntry(number=1, nonce=OWN, before="", records=(begin(1),))}


def test_an_append_of_nothing_is_a_list() -> None:
    log = log_of(7)
    ended = log.run(append(known(7), lambda _: (), OWN))
    assert (ended, log.words) == (Ended(known(7)), ["list"])


def test_log_5_what_was_read_is_durable_before_a_put() -> None:
    log = log_of(7)
    log.run(append(known(7, is_settled=False), next_start, OWN))
    assert log.words == ["settle", "put", "list"]


def test_log_1_who_finds_the_number_taken_reads_that_entry_and_asks_again() -> None:
    log = log_of(8)
    asked = list[int]()

    def wanted(state: LogState) -> list[Record]:
        asked.append(state.number)
        return next_start(state)

    ended = log.run(append(known(7), wanted, OWN))
    assert log.words == ["put", "entries", "list", "settle", "put", "list"]
    assert asked == [7, 8, 8, 8]  # the last time after what was read is durable
    assert (ended.put, ended.known.state.number, ended.known.state.start) == (True, 9, 9)


def test_log_1_what_the_new_entry_forbids_is_not_put() -> None:
    log = log_of(8)
    ended = log.run(append(known(7), aim(begin(8, origin="mine")), OWN))
    assert log.words == ["put", "entries", "list", "settle"]
    assert (ended.put, ended.is_proved, ended.known) == (False, True, known(8))
    assert sorted(log.entries) == list(range(1, 9))


def test_log_4_an_own_entry_that_is_found_after_a_lost_reply_counts_once_it_is_durable() -> None:
    log = log_of(7)
    log.replies = [UNSURE]
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "entries", "list", "settle"]
    assert log.asked[-1] == Settle(8)
    assert (ended.put, ended.is_proved, ended.known.state.nonce, ended.known.is_settled) == (True, True, OWN, True)


def test_an_own_entry_is_found_also_if_the_store_says_that_the_number_was_taken() -> None:
    log = log_of(7)
    log.replies = [False]  # the client of the store has tried twice
    ended = log.run(append(known(7), next_start, OWN))
    assert (ended.put, ended.known.state.number, ended.known.is_settled) == (True, 8, True)


def test_log_4_after_a_lost_reply_without_an_effect_the_entry_is_put_again() -> None:
    log = log_of(7)
    log.replies = [UNSURE]
    log.before[1] = lambda: log.entries.pop(8)
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "entries", "put", "list"]
    assert (ended.put, ended.known.state.nonce) == (True, OWN)


def test_log_4_after_a_lost_reply_somebody_else_may_have_the_number() -> None:
    log = log_of(8)
    log.replies = [UNSURE]
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "entries", "list", "settle", "put", "list"]
    assert (ended.put, ended.known.state.number) == (True, 9)


def test_a_number_that_is_free_after_all_is_put_again() -> None:
    log = log_of(7)
    log.replies = [False]
    log.before[1] = lambda: log.entries.pop(8)
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "entries", "list", "put", "list"]
    assert (ended.put, ended.known.state.number) == (True, 8)


def test_log_2_a_put_whose_number_is_covered_does_not_count_and_the_state_is_asked() -> None:
    log = compacted()  # the entries after number 10 are gone, so that 11 is free again
    ended = log.run(append(known(10), next_start, OWN))
    assert log.words == ["put", "list", "entries", "state", "settle", "put", "list"]
    assert (ended.put, ended.known.state.number, ended.known.state.start) == (True, len(ENTRIES) + 1, len(ENTRIES) + 1)


def test_log_4_an_aim_that_the_covering_state_has_reached_is_not_put_again() -> None:
    log = log_of(STATE_EVERY - 1)

    def is_covered() -> None:
        log.states[STATE_EVERY] = following(
            STATES[STATE_EVERY - 1], [own for own in [log.entries[STATE_EVERY]] if isinstance(own, LogEntry)]
        )

    log.before[1] = is_covered  # somebody has read the entry and put the state before its writer lists
    ended = log.run(append(known(STATE_EVERY - 1), aim(begin(STATE_EVERY)), OWN))
    assert log.words == ["put", "list", "entries", "state", "list", "settle"]
    assert (ended.put, ended.is_proved, ended.known.state.start) == (False, True, STATE_EVERY)
    assert reached(ended.known.state, begin(STATE_EVERY))


def test_log_12_an_entry_after_a_gap_does_not_count() -> None:
    log = log_of(5)  # the log has been set back behind a process that knew two more
    ended = log.run(append(known(7), next_start, OWN))
    assert ended.fault == f"{entry_key(7)} is missing, although the log goes on after it"
    assert (ended.put, ended.is_proved, ended.known) == (False, False, known(7))


def test_an_append_after_a_state_whose_own_entry_is_gone() -> None:
    log = log_of(STATE_EVERY, states=[STATE_EVERY], since=STATE_EVERY)
    assert log.run(append(known(STATE_EVERY), next_start, OWN)).put


# --- follow -----------------------------------------------------------------------------------------------------------


def test_a_follower_ends_when_there_is_no_further_entry_and_has_proved_nothing() -> None:
    log = log_of(7)
    ended = log.run(follow(known(5), lambda state: state.start == 9))
    assert log.words == ["entries"] * 3
    assert (ended.known.state, ended.is_proved, ended.fault) == (STATES[7], False, "")


def test_a_follower_proves_and_settles_what_it_waited_for() -> None:
    log = log_of(7)
    ended = log.run(follow(known(5), lambda state: state.start == 7))
    assert log.words == ["entries", "entries", "list", "settle"]
    assert (ended.known, ended.is_proved) == (known(7), True)


def test_a_follower_whose_state_is_there_lists_once() -> None:
    log = log_of(7)
    assert log.run(follow(known(7), lambda _: True)) == Ended(known(7))
    assert log.words == ["list"]


def test_log_2_a_follower_whose_entry_was_replaced_reads_the_state_that_covers_it() -> None:
    log = compacted()
    log.entries[11] = entry(STATES[10], begin(77))  # put late, after the true entry 11 was removed
    ended = log.run(follow(known(10), lambda state: state.start >= 77))
    assert (ended.known.state, ended.is_proved) == (STATES[-1], True)


# --- rebuilds, as others see them -------------------------------------------------------------------------------------


def rebuilt_log() -> Log:
    """A log that was made again, and has two entries after that. What was there before lies there still."""
    log = log_of(7)
    log.marks = {REBUILD_GAP}
    first = replace(STATES[5], number=REBUILD_GAP, nonce=nonce(5000))
    log.states[REBUILD_GAP] = first
    for _ in range(2):
        last = log.run(look(KnownLog())).known.state
        log.entries[last.number + 1] = entry(last, begin(last.start + 1))
    return log


@pytest.mark.parametrize("access", [look(known(5)), append(known(5), lambda _: (), OWN), follow(known(5), lambda _: True)])
def test_log_11_nothing_counts_while_a_log_is_made_again(access: LogAccess) -> None:
    log = log_of(7)
    log.marks = {REBUILD_GAP}
    ended = log.run(access)
    assert ended.fault == f"it is being made again; see {mark_key(REBUILD_GAP)}"
    assert (ended.known, ended.is_proved) == (known(5), False)
    assert log.words == ["list"]


def test_log_11_a_put_below_the_mark_does_not_count() -> None:
    log = log_of(7)
    log.before[1] = lambda: log.marks.add(REBUILD_GAP)
    ended = log.run(append(known(7), next_start, OWN))
    assert (ended.put, ended.is_proved, ended.known) == (False, False, known(7))
    assert ended.fault.startswith("it is being made again")


def test_log_11_once_the_log_is_made_again_all_go_on_from_its_state() -> None:
    log = rebuilt_log()
    assert log.run(look(KnownLog())).known.state.number == REBUILD_GAP + 2
    assert log.run(look(known(7))).known.state.number == REBUILD_GAP + 2
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "list", "entries", "state", "settle", "put", "list"]
    assert (ended.put, ended.known.state.number) == (True, REBUILD_GAP + 3)


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize("older", [(), (5,)])
def test_log_11_the_log_before_a_rebuild_is_not_taken_for_the_truth(is_followed: bool, older: tuple[int, ...]) -> None:
    log = rebuilt_log()
    log.states[REBUILD_GAP] = unusable(state_key(REBUILD_GAP))
    log.states.update({number: STATES[number] for number in older})
    if not is_followed:
        log.entries = log_of(7).entries
    for access in (look(KnownLog()), append(KnownLog(), next_start, OWN)):
        ended = log.run(access)
        assert not ended.is_proved
        assert not ended.put
        assert ended.fault == f"{state_key(REBUILD_GAP)} is damaged, and nothing else tells what it says"


# --- states and compaction --------------------------------------------------------------------------------------------


def test_log_6_the_state_after_each_so_many_entries_is_due() -> None:
    assert KnownLog().with_entries(ENTRIES[: STATE_EVERY - 1]).due is None
    one = KnownLog().with_entries(ENTRIES[: STATE_EVERY + 3])
    assert (one.due, one.state) == (STATES[STATE_EVERY], STATES[STATE_EVERY + 3])
    assert one.with_entries(ENTRIES[STATE_EVERY + 3 : STATE_EVERY + 5]).due == STATES[STATE_EVERY]
    assert one.with_entries(ENTRIES[STATE_EVERY + 3 : 3 * STATE_EVERY]).due == STATES[3 * STATE_EVERY]
    assert one.with_entries(()).is_settled == one.is_settled
    assert not one.is_settled
    assert one.with_entries(ENTRIES[STATE_EVERY + 3 : STATE_EVERY + 5], settled=True).is_settled
    log = log_of(STATE_EVERY - 1)
    assert log.run(append(known(STATE_EVERY - 1), next_start, OWN)).known.due is not None


def test_log_6_a_state_that_is_not_proved_is_not_due() -> None:
    log = log_of(STATE_EVERY + 1)
    ended = log.run(follow(known(STATE_EVERY - 1), lambda _: False))
    assert (ended.known.state, ended.known.due) == (STATES[STATE_EVERY + 1], None)
    ended = log.run(follow(known(STATE_EVERY - 1), lambda state: state.number > STATE_EVERY))
    assert (ended.known.state, ended.known.due) == (STATES[STATE_EVERY + 1], STATES[STATE_EVERY])
    log.entries[STATE_EVERY + 2] = unusable(entry_key(STATE_EVERY + 2))
    assert log.run(look(known(STATE_EVERY - 1))).known.due is None


def test_log_6_who_does_not_know_what_was_decided_before_puts_no_state() -> None:
    log = log_of(STATE_EVERY + 1)
    before = STATES[STATE_EVERY - 2]
    joined = KnownLog(LogState(number=before.number, nonce=before.nonce, begins=before.begins), is_whole=False)
    ended = log.run(append(joined, next_start, OWN))
    assert (ended.put, ended.known.state.number, ended.known.due) == (True, STATE_EVERY + 2, None)
    compacted_log = compacted()
    ended = compacted_log.run(look(joined))
    assert (ended.known.state, ended.known.is_whole) == (STATES[-1], True)


def compact(log: Log, state: LogState) -> None:
    log.asked.clear()
    machine: Compaction | None = Compaction(state)
    while machine is not None:
        machine = machine.after(log.do(machine.request))


def test_log_6_a_state_is_put_and_nothing_goes_while_there_are_few() -> None:
    log = log_of(3 * STATE_EVERY, states=[STATE_EVERY, 2 * STATE_EVERY])
    compact(log, STATES[3 * STATE_EVERY])
    assert log.asked == [PutState(STATES[3 * STATE_EVERY]), ListLog()]
    assert (len(log.states), len(log.entries)) == (3, 3 * STATE_EVERY)


def test_log_6_the_newest_states_stay_and_the_entries_that_all_of_them_cover_go_last() -> None:
    log = log_of(len(ENTRIES), states=[STATE_EVERY * k for k in range(1, 6)])
    compact(log, STATES[FOUR[-1]])
    assert [type(request) for request in log.asked] == [PutState, ListLog, Settle, RemoveStates, RemoveEntries]
    assert tuple(sorted(log.states)) == FOUR
    assert len(FOUR) == STATES_KEPT
    assert min(log.entries) == FOUR[0] + 1
    assert log.run(look(KnownLog())).known.state == STATES[-1]


def test_log_6_the_entries_go_that_the_oldest_of_four_states_covers() -> None:
    log = log_of(len(ENTRIES), states=FOUR[:-1])
    compact(log, STATES[FOUR[-1]])
    assert (tuple(sorted(log.states)), min(log.entries)) == (FOUR, FOUR[0] + 1)


def test_a_late_compaction_removes_its_own_state() -> None:
    log = compacted()
    compact(log, STATES[STATE_EVERY])
    assert tuple(sorted(log.states)) == FOUR
    assert log.run(look(KnownLog())).known.state == STATES[-1]


# --- making a log again -----------------------------------------------------------------------------------------------


def rebuild(log: Log) -> Rebuild:
    log.asked.clear()
    found = Rebuild()
    while not found.is_done:
        found = found.after(log.do(found.request))
    return found


def starts(state: LogState) -> list[int]:
    """The starts that began, as far as `state` has them."""
    return [one.start for one in state.begins]


def test_log_11_a_rebuild_marks_and_reads_what_is_readable() -> None:
    log = log_of(7)
    log.entries[4] = unusable(entry_key(4))
    found = rebuild(log)
    assert [type(request) for request in log.asked] == [ListLog, PutMark, ListLog, GetEntries]
    assert (found.number, found.is_done_by_others) == (REBUILD_GAP, False)
    assert starts(found.state) == [1, 2, 3, 5, 6, 7]


def test_log_11_a_rebuild_goes_on_from_the_newest_readable_state() -> None:
    log = compacted()
    for number in FOUR[2:]:
        log.states[number] = unusable(state_key(number))
    del log.entries[FOUR[-1]]
    found = rebuild(log)
    assert found.state.start == len(ENTRIES)
    assert FOUR[-1] not in starts(found.state)
    log.states = {number: unusable(state_key(number)) for number in FOUR}
    assert min(starts(rebuild(log).state)) == FOUR[0] + 1


def test_a_rebuild_of_a_log_of_which_nothing_is_there() -> None:
    found = rebuild(Log())
    assert (found.state, found.number) == (LogState(), REBUILD_GAP)


def test_log_11_a_second_rebuild_goes_on_at_the_mark_of_the_first() -> None:
    log = log_of(7)
    log.marks = {3 * REBUILD_GAP}
    assert rebuild(log).number == 3 * REBUILD_GAP
    assert log.marks == {3 * REBUILD_GAP}


def test_log_11_a_rebuild_that_somebody_else_has_finished_reads_nothing() -> None:
    log = log_of(7)
    log.before[2] = lambda: log.states.update({REBUILD_GAP: replace(STATES[7], number=REBUILD_GAP)})
    found = rebuild(log)
    assert found.is_done_by_others
    assert [type(request) for request in log.asked] == [ListLog, PutMark, ListLog]


def test_log_11_a_log_that_was_made_again_is_made_again_further_up() -> None:
    log = rebuilt_log()
    log.entries[REBUILD_GAP + 1] = unusable(entry_key(REBUILD_GAP + 1))
    found = rebuild(log)
    assert found.number == 2 * REBUILD_GAP
    assert starts(found.state) == [1, 2, 3, 4, 5, 7]


def test_an_object_with_a_number_that_no_log_reaches_is_named() -> None:
    log = log_of(7)
    log.entries[NUMBER_MAX] = ENTRIES[6]
    assert log.run(look(KnownLog())).fault == f"{entry_key(8)} is missing, although {entry_key(NUMBER_MAX)} is there"
    with pytest.raises(FormatError, match=r"log/999999999999\.\* has a number that no log reaches; move it away"):
        rebuild(log)
    assert not log.marks


def test_log_3_a_rebuild_does_not_use_entries_of_another_log() -> None:
    log = log_of(9)
    log.entries[4] = entry(replace(STATES[3], nonce=nonce(99)), begin(1004), tag="f")
    assert starts(rebuild(log).state) == [1, 2, 3, 5, 6, 7, 8, 9]
    state = replace(STATES[5], nonce=nonce(99))  # the log of a copy that went another way after entry 5
    for start in (1006, 1007, 1008):
        one = entry(state, begin(start), tag="f")
        log.entries[one.number] = one
        state = following(state, [one])
    assert starts(rebuild(log).state) == [1, 2, 3, 5, 9]


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_reply_to_something_else_is_refused() -> None:
    for machine in (look(KnownLog()), Rebuild()):
        with pytest.raises(AssertionError, match="is no reply to"):
            machine.after(True)
    with pytest.raises(AssertionError):
        _ = replace(look(KnownLog()), step=type(look(KnownLog()).step).DONE).request
