"""LOG-1 to LOG-6 and LOG-11 of commit/log_access.py: what one process asks of the store, and what it makes of the replies.

Each entry of the logs here begins the start of its number. The explorer in tests/model/ runs the same code beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from checkpointd.commit.log import following
from checkpointd.commit.log_access import (
    ABSENT,
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
    append,
    follow,
    look,
)
from checkpointd.errors import FormatError
from checkpointd.layout.log_records import LogEntry, LogListing, LogState, Record, entry_key, state_key
from tests.unit.commit.log_histories import begin, entry

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


def test_log_4_an_own_entry_that_is_found_after_a_lost_reply_counts_once_it_is_durable() -> None:
    log = log_of(7)
    log.replies = [UNSURE]
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "entries", "list", "settle"]
    assert log.asked[-1] == Settle(8)
    assert (ended.put, ended.is_proved, ended.known.state.nonce, ended.known.is_settled) == (True, True, OWN, True)


def test_log_4_after_a_lost_reply_without_an_effect_the_entry_is_put_again() -> None:
    log = log_of(7)
    log.replies = [UNSURE]
    log.before[1] = lambda: log.entries.pop(8)
    ended = log.run(append(known(7), next_start, OWN))
    assert log.words == ["put", "entries", "put", "list"]
    assert (ended.put, ended.known.state.nonce) == (True, OWN)


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


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_reply_to_something_else_is_refused() -> None:
    for machine in (look(KnownLog()), Rebuild()):
        with pytest.raises(AssertionError, match="is no reply to"):
            machine.after(True)
    with pytest.raises(AssertionError):
        _ = replace(look(KnownLog()), step=type(look(KnownLog()).step).DONE).request
