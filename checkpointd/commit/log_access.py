"""How a process reads a root's log and appends to it, one operation of the store at a time.

Nothing happens here: each of these is a value with the next operation (`request`), and `after(reply)` gives the value that
follows, or how it ended. `pipeline/root/log.py` runs them against a store, and the explorer in `tests/model/` runs them through
every order in which the operations of several processes can fall.

Invariants
  LOG-1  A process puts entry n+1, if absent, only if it knows the state after entry n and `check` allows the records there.
      So the log has no invalid record. If the number is taken, it reads that entry and the rest, chooses and checks
      again. A process that has read nothing lists first. One whose entry has others above it checks that they follow.
  LOG-2  What was put counts once a later list of the log shows no state and no mark of a rebuild at its number or above; what
      was read one by one, once a later list shows nothing above. Otherwise a number may have been used before, and the process
      reads on, or again from the newest state. A process that begins with a list reads the state last of all: while the state
      is there, no entry after it was removed, so all that it has read is true.
  LOG-3  An entry that does not name the nonce of the one before is not used; nor is the one before, which may be the wrong one.
      A state is not used if the entry of its number and the next one, as far as they can be read, have other nonces.
  LOG-4  After a lost reply, or when a state covers its number, a process asks the proved state whether its aim is reached.
  LOG-5  What a process has read is durable before it puts, reports or removes anything because of it.
  LOG-6  Whoever has proved the state after each STATE_EVERY-th entry puts it. Then all states but STATES_KEPT go, and after
      them the entries that the oldest of those covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

import msgspec

from checkpointd.commit.log import following
from checkpointd.errors import CheckpointdError, FormatError
from checkpointd.layout.keys import LOG
from checkpointd.layout.log_records import (
    NUMBER_MAX,
    BeginRecord,
    LogEntry,
    LogListing,
    LogState,
    Record,
    entry_key,
    mark_key,
    state_key,
)

STATE_EVERY = 64
STATES_KEPT = 4
LOOKS = 3
"""How many times to look for what is missing or damaged: a state may have covered it between a list and a read."""

EMPTY, NOTHING = LogState(), LogListing()

Wanted: TypeAlias = Callable[[LogState], Sequence[Record]]
"""The records to append to this state, which are valid in it; none if the aim is reached, or cannot be reached any more."""


# --- requests and replies --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListLog:
    """The reply is a LogListing."""


@dataclass(frozen=True, slots=True)
class GetEntries:
    """The reply has an entry, ABSENT, or an Unusable for each number."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GetState:
    """The reply is a state, ABSENT, or an Unusable."""

    number: int


@dataclass(frozen=True, slots=True)
class PutEntry:
    """Put it if absent, durably. The reply is whether this put it; False as well if no reply came."""

    entry: LogEntry


@dataclass(frozen=True, slots=True)
class PutState:
    """Put it if absent, durably. The reply does not matter."""

    state: LogState


@dataclass(frozen=True, slots=True)
class PutMark:
    """Put the mark of a rebuild, durably, unless it is there. The reply does not matter."""

    number: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Make all entries durable that are visible now. `number`: one of them. The reply does not matter."""

    number: int


@dataclass(frozen=True, slots=True)
class RemoveStates:
    """The reply does not matter."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RemoveEntries:
    """The reply does not matter."""

    numbers: tuple[int, ...]


class Missing(StrEnum):
    ABSENT = "is missing"


ABSENT = Missing.ABSENT


@dataclass(frozen=True, slots=True)
class Unusable:
    """An object that is there, and whose bytes are not what a writer put."""

    error: CheckpointdError


Request: TypeAlias = ListLog | GetEntries | GetState | PutEntry | PutState | PutMark | Settle | RemoveStates | RemoveEntries
Got: TypeAlias = LogEntry | Missing | Unusable
Reply: TypeAlias = LogListing | tuple[Got, ...] | LogState | Missing | Unusable | bool


# --- reading and appending -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownLog:
    """The log as a process knows it. `is_settled`: whether all of it is durable. `due`: the newest state that it has come by
    and that should be put (LOG-6). `is_whole`: whether the state has all that was decided before the process began to follow;
    if not, it is put nowhere.
    """

    state: LogState = EMPTY
    is_settled: bool = True
    due: LogState | None = None
    is_whole: bool = True

    def with_entries(self, entries: Sequence[LogEntry], *, settled: bool = False) -> KnownLog:
        """The same after these entries, which follow."""
        state, due, some = self.state, self.due, list[LogEntry]()
        for entry in entries:
            some.append(entry)
            if entry.number % STATE_EVERY == 0:
                state = due = following(state, some)
                some = []
        if some:
            state = following(state, some)
        is_settled = settled or (self.is_settled and not entries)
        return replace(self, state=state, is_settled=is_settled, due=due if self.is_whole else None)

    def with_due(self, due: LogState | None) -> KnownLog:
        return self if self.due is due else replace(self, due=due)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a reading or an append ended. `put`: whether a reply has said that this process put the records of the append.
    `is_proved`: whether all of `known` is true (LOG-2); a follower that waits for more does not prove what it knows. `fault`:
    why the log could not be read to its end; empty if it could.
    """

    known: KnownLog
    put: bool = False
    is_proved: bool = True
    fault: str = ""


class _Step(StrEnum):
    LIST = "list"
    ENTRIES = "get the entries that were listed"
    STATE = "get the state that was listed"
    NEXT = "get the next entry"
    SETTLE = "make durable what was read"
    PUT = "put"
    TAKEN = "get the entry that has taken the number, which may be its own"
    COUNTS = "list after the put"
    FOLLOWED = "get the entry after its own"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class LogAccess:
    """One reading of the log, or one append to it. `look`, `follow` and `append` begin it."""

    known: KnownLog
    step: _Step = _Step.LIST
    wanted: Wanted | None = None
    """Of an append."""
    nonce: str = ""
    """Of the entry that an append puts, in every try."""
    until: Callable[[LogState], bool] | None = None
    """Of a follower."""
    settles: bool = True
    """Whether what was read is made durable before this ends (LOG-5)."""
    base: int = 0
    """The state that was listed and is to be read last; 0: what is known goes on."""
    listed: tuple[int, ...] = ()
    """The entries that were listed after it, or with its number."""
    got: tuple[Got, ...] = ()
    """The listed entries, until the state before them is there."""
    entry: LogEntry | None = None
    """The entry that is put."""
    bad: frozenset[int] = frozenset()
    """The numbers of states that are unusable."""
    looks: int = 0
    """How many times something was missing or unusable."""
    is_proved: bool = False
    """Whether this ends once what was read is durable."""
    put: bool = False
    """Whether the entry counts."""

    @property
    def number(self) -> int:
        return self.known.state.number

    @property
    def request(self) -> Request:
        """The next operation."""
        match self.step:
            case _Step.LIST | _Step.COUNTS:
                return ListLog()
            case _Step.ENTRIES:
                return GetEntries(self.listed)
            case _Step.STATE:
                return GetState(self.base)
            case _Step.NEXT | _Step.TAKEN:
                return GetEntries((self.number + 1,))
            case _Step.FOLLOWED:
                return GetEntries((self.number + 2,))
            case _Step.SETTLE:
                return Settle(self.number)
            case _Step.PUT if self.entry is not None:
                return PutEntry(self.entry)
        raise AssertionError(self.step)

    def after(self, reply: Reply) -> LogAccess | Ended:
        """What follows the reply to `request`."""
        match self.step, reply:
            case _Step.LIST, LogListing():
                return self._listed(reply)
            case _Step.COUNTS, LogListing():
                if reply.covered > self.number:
                    return self._listed(reply)
                if self.number and self.number not in (*reply.entries, *reply.states):
                    return self._unproved(_why(ABSENT, self.number))  # the log is an older one (LOG-12)
                return replace(self, step=_Step.FOLLOWED) if self.number + 2 in reply.entries else self._succeeded()
            case _Step.FOLLOWED, (LogEntry() as after,) if self.entry is not None and after.before == self.entry.nonce:
                return self._succeeded()
            case _Step.FOLLOWED, (got,):
                return replace(self, step=_Step.LIST) if got is ABSENT else self._again(_why(got, self.number + 2))
            case _Step.ENTRIES, tuple() if self.base:
                return replace(self, step=_Step.STATE, got=reply)
            case _Step.ENTRIES, tuple():
                return self._read(reply)
            case _Step.STATE, LogState() if _is_of_log(reply, zip(self.listed, self.got, strict=True)):
                covered = int(self.base in self.listed)
                based = replace(self, known=KnownLog(reply, is_settled=False), base=0, listed=self.listed[covered:])
                return based._read(self.got[covered:], since_list=True)
            case _Step.STATE, LogState() | Unusable():
                return replace(self, step=_Step.LIST, bad=self.bad | {self.base})
            case _Step.STATE, _:
                return self._again(f"{state_key(self.base)} {ABSENT}")
            case ((_Step.NEXT | _Step.TAKEN), (got,)):
                return self._next(got)
            case _Step.SETTLE, _:
                settled = replace(self, known=replace(self.known, is_settled=True))
                return Ended(settled.known, put=self.put) if self.is_proved else settled._on()
            case _Step.PUT, _:
                return replace(self, step=_Step.COUNTS if reply is True else _Step.TAKEN)
        raise AssertionError(f"{reply!r} is no reply to {self.request!r}")

    def _listed(self, listing: LogListing) -> LogAccess | Ended:
        if listing.is_being_rebuilt:
            return self._unproved(f"it is being made again; see {mark_key(listing.marks[-1])}")
        base = max((one for one in listing.states if one > self.number and one not in self.bad), default=0)
        listed = tuple(one for one in listing.entries if one >= (base or self.number + 1))
        if listed:
            return replace(self, step=_Step.ENTRIES, base=base, listed=listed)
        if base:
            return replace(self, step=_Step.STATE, base=base, listed=(), got=())
        if listing.covered > self.number:
            return self._again(_lost(listing.covered))
        if self.wanted is not None and self.wanted(self.known.state):
            return self._on()  # the number is free after all
        return self._proved()

    def _read(self, got: tuple[Got, ...], *, since_list: bool = False) -> LogAccess | Ended:
        """Take the entries as far as they follow. `since_list`: all was read between a list and the state (LOG-2)."""
        some, nonce = list[LogEntry](), self.known.state.nonce
        for number, one in enumerate(self.listed, self.number + 1):
            there = got[len(some)] if one == number else ABSENT
            if isinstance(there, LogEntry) and there.before != nonce:
                return self._with(some[:-1])._again(_why(there, number))  # the one before may be the wrong one
            if not isinstance(there, LogEntry):
                is_lost = there is ABSENT and number <= max(self.bad, default=0)
                gap = f"{entry_key(number)} {ABSENT}, although {entry_key(one)} is there"
                why = gap if one != number else _why(there, number)
                return self._with(some)._again(_lost(max(self.bad)) if is_lost else why)
            some.append(there)
            nonce = there.nonce
        found = self._with(some)
        if max(self.bad, default=0) > found.number:
            return found._again(_lost(max(self.bad)))
        return found._proved() if since_list and self.wanted is None and self.until is None else found._on()

    def _with(self, entries: Sequence[LogEntry]) -> LogAccess:
        return replace(self, known=self.known.with_entries(entries), got=(), listed=())

    def _next(self, got: Got) -> LogAccess | Ended:
        if isinstance(got, LogEntry) and got.before == self.known.state.nonce:
            found = replace(self, known=self.known.with_entries([got]))
            return found._on() if self.step is _Step.NEXT else replace(found, step=_Step.LIST)  # there may be many more
        if got is ABSENT and self.step is _Step.NEXT:
            return self._unproved()
        return self._again(_why(got, self.number + 1))

    def _on(self) -> LogAccess | Ended:
        """Go on with what is known now."""
        state = self.known.state
        if self.until is not None:
            return replace(self, step=_Step.LIST if self.until(state) else _Step.NEXT)
        records = self.wanted(state) if self.wanted is not None else ()
        if not records:
            return replace(self, step=_Step.LIST)
        if not self.known.is_settled:
            return replace(self, step=_Step.SETTLE)
        entry = LogEntry(number=state.number + 1, nonce=self.nonce, before=state.nonce, records=tuple(records))
        return replace(self, step=_Step.PUT, entry=entry)

    def _succeeded(self) -> LogAccess | Ended:
        assert self.entry is not None
        known = self.known.with_entries([self.entry], settled=self.known.is_settled)
        return replace(self, known=known, put=True)._proved()

    def _proved(self) -> LogAccess | Ended:
        if self.settles and not self.known.is_settled:
            return replace(self, step=_Step.SETTLE, is_proved=True)
        return Ended(self.known, put=self.put)

    def _unproved(self, fault: str = "") -> Ended:
        return Ended(self.known.with_due(None), is_proved=False, fault=fault)

    def _again(self, why: str) -> LogAccess | Ended:
        if self.looks + 1 >= LOOKS:
            bad = max(self.bad, default=0)
            if bad > self.number and state_key(bad) not in why:
                why = f"{state_key(bad)} cannot be used, and {why}"
            return self._unproved(why)
        return replace(self, step=_Step.LIST, looks=self.looks + 1)


def _is_of_log(state: LogState, entries: Iterable[tuple[int, Got]]) -> bool:
    """Whether the entry of the state's number, or the next one, says so; or neither can be read."""
    got = dict(entries)
    own, after = got.get(state.number), got.get(state.number + 1)
    signs = [own.nonce == state.nonce] if isinstance(own, LogEntry) else []
    signs += [after.before == state.nonce] if isinstance(after, LogEntry) else []
    return any(signs) or not signs or not state.number


def _why(got: Got, number: int) -> str:
    """What is wrong with an entry that cannot be used."""
    if isinstance(got, Unusable):
        return str(got.error)
    if isinstance(got, LogEntry):
        return f"{entry_key(number)} does not follow the entry before it: somebody has changed or exchanged one of the two"
    return f"{entry_key(number)} {ABSENT}, although the log goes on after it"


def _lost(state: int) -> str:
    return f"{state_key(state)} is damaged, and nothing else tells what it says"


def look(known: KnownLog, *, settles: bool = False) -> LogAccess:
    """Read the log to its end."""
    return LogAccess(known, settles=settles)


def follow(known: KnownLog, until: Callable[[LogState], bool]) -> LogAccess:
    """Read on until there is no further entry, or the state is as `until` asks; what it knows is proved only then."""
    return LogAccess(known, until=until, step=_Step.LIST if until(known.state) else _Step.NEXT)


def append(known: KnownLog, wanted: Wanted, nonce: str) -> LogAccess:
    """Append what `wanted` gives, in an entry with this nonce."""
    begun = LogAccess(known, wanted=wanted, nonce=nonce)
    found = begun._on() if known.state.number else begun  # who has read nothing does not know whether the log is empty
    assert isinstance(found, LogAccess)
    return found


# --- states -----------------------------------------------------------------------------------------------------------


class _Stage(StrEnum):
    PUT = "put"
    LIST = "list"
    SETTLE = "settle"
    STATES = "remove states"
    ENTRIES = "remove entries"


@dataclass(frozen=True, slots=True)
class Compaction:
    """Puts `state`, which is proved, and removes what older states cover (LOG-6)."""

    state: LogState
    stage: _Stage = _Stage.PUT
    listing: LogListing = NOTHING

    @property
    def request(self) -> Request:
        cut = self._cut
        match self.stage:
            case _Stage.PUT:
                return PutState(self.state)
            case _Stage.LIST:
                return ListLog()
            case _Stage.SETTLE:
                return Settle(self.state.number)
            case _Stage.STATES:
                return RemoveStates(tuple(one for one in self.listing.states if one < cut))
            case _Stage.ENTRIES:
                return RemoveEntries(tuple(one for one in self.listing.entries if one <= cut))

    @property
    def _cut(self) -> int:
        """The number of the oldest state that stays; 0 if nothing goes."""
        states = self.listing.states
        return states[-STATES_KEPT] if len(states) >= STATES_KEPT else 0

    def after(self, reply: Reply) -> Compaction | None:
        """What follows; None at the end. The states go first: while one is there, no entry after it was removed (LOG-2)."""
        match self.stage, reply:
            case _Stage.PUT, _:
                return replace(self, stage=_Stage.LIST)
            case _Stage.LIST, LogListing():
                found = replace(self, stage=_Stage.SETTLE, listing=reply)
                return found if found._cut else None
            case _Stage.SETTLE, _:
                return replace(self, stage=_Stage.STATES)
            case _Stage.STATES, _:
                return replace(self, stage=_Stage.ENTRIES)
        return None


# --- rebuilds ---------------------------------------------------------------------------------------------------------

REBUILD_GAP = 1_000_000
"""A rebuild goes on at the next multiple of this number, which no process that still appends to the old log can reach."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Closes a log that cannot be read to its end, and reads what is readable (LOG-11). `state` is then what that says, at the
    number of the mark, unless somebody else has put the state of that number.
    """

    state: LogState = EMPTY
    number: int = 0
    """That of the mark."""
    listing: LogListing = NOTHING
    bad: int = 0
    """How many of the newest states are unusable."""
    seen: int = NUMBER_MAX
    """The number of the newest state when the log could not be read."""
    step: _Step = _Step.LIST

    @property
    def request(self) -> Request:
        match self.step:
            case _Step.PUT:
                return PutMark(self.number)
            case _Step.STATE:
                return GetState(self._states[-1 - self.bad])
            case _Step.ENTRIES:
                return GetEntries(self._entries)
        return ListLog()

    @property
    def _states(self) -> tuple[int, ...]:
        return tuple(one for one in self.listing.states if one < self.number)

    @property
    def _entries(self) -> tuple[int, ...]:
        return tuple(one for one in self.listing.entries if self.state.number <= one < self.number)

    @property
    def is_done_by_others(self) -> bool:
        """Whether there is a state of the mark's number."""
        return any(one >= self.number for one in self.listing.states)

    @property
    def is_done(self) -> bool:
        return self.step is _Step.DONE

    def after(self, reply: Reply) -> Rebuild:
        """What follows. Raises FormatError if there is no number for the mark."""
        match self.step, reply:
            case _Step.LIST, LogListing() if any(one > self.seen for one in reply.states if one in reply.marks):
                return replace(self, number=reply.marks[-1], listing=reply, step=_Step.DONE)
            case _Step.LIST, LogListing():
                pending = reply.marks[-1] if reply.is_being_rebuilt else (reply.last // REBUILD_GAP + 1) * REBUILD_GAP
                if pending > NUMBER_MAX:
                    key = f"{LOG}/{reply.last:012d}"
                    raise FormatError(f"{key}.* has a number that no log reaches; move it away, and repeat this", key=key)
                return replace(self, number=pending, step=_Step.PUT)
            case _Step.PUT, _:
                return replace(self, step=_Step.COUNTS)
            case _Step.COUNTS, LogListing():
                found = replace(self, listing=reply)
                return replace(found, step=_Step.DONE) if found.is_done_by_others else found._state_or_entries()
            case _Step.STATE, LogState():
                return replace(self, state=reply)._read_entries()
            case _Step.STATE, _:
                return replace(self, bad=self.bad + 1)._state_or_entries()
            case _Step.ENTRIES, tuple() if not _is_of_log(self.state, zip(self._entries, reply, strict=True)):
                return replace(self, state=EMPTY, bad=self.bad + 1)._state_or_entries()
            case _Step.ENTRIES, tuple():
                return replace(self, state=_past_gaps(self.state, _chained(self.state, reply)), step=_Step.DONE)
        raise AssertionError(f"{reply!r} is no reply to {self.request!r}")

    def _state_or_entries(self) -> Rebuild:
        return replace(self, step=_Step.STATE) if self.bad < len(self._states) else self._read_entries()

    def _read_entries(self) -> Rebuild:
        return replace(self, step=_Step.ENTRIES if self._entries else _Step.DONE)


def _chained(state: LogState, got: Sequence[Got]) -> list[LogEntry]:
    """The readable entries after `state`, without each that does not follow the entry before, and what follows that (LOG-3).
    After a gap, the next one is taken.
    """
    found, foreign = list[LogEntry](), set[str]()
    number, nonce = state.number, state.nonce
    for entry in (one for one in got if isinstance(one, LogEntry) and one.number > state.number):
        if entry.before in foreign or (entry.number == number + 1 and entry.before != nonce):
            foreign.add(entry.nonce)
            continue
        found.append(entry)
        number, nonce = entry.number, entry.nonce
    return found


def _past_gaps(state: LogState, entries: Sequence[LogEntry]) -> LogState:
    """The state after `entries`, between which some may be missing. What was undecided before a gap may have committed in it,
    so no start after the gap fences that: whoever makes the log again judges it by its objects (LOG-11).
    """
    unsure: set[str] = set()
    for entry in entries:
        if entry.number > state.number + 1:
            unsure |= {name for name, one in state.attempts.items() if one.status == "undecided"}
        begun = tuple(
            msgspec.structs.replace(one, spared=(*one.spared, *unsure)) if isinstance(one, BeginRecord) else one
            for one in entry.records
        )
        state = following(state, [msgspec.structs.replace(entry, records=begun)])
    return state
