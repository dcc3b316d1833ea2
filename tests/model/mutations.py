"""Changes of the real code, one rule each. The explorer must find every one of them.

A mutation replaces a function, a method or a constant while a scope is explored, or plants a mistake in its programs. One
without promises is unnecessary: other rules make up for it, and the scope holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from checkpointd.commit import log as rules
from checkpointd.commit import log_access as access
from checkpointd.commit.log_access import Compaction, KnownLog, LogAccess, Rebuild, Unusable
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import BeginRecord, CommitRecord, LogEntry, LogListing, LogState, Record
from tests.model import programs, world
from tests.model.explore import Verdict, explore
from tests.model.scopes import SCOPES

Patch = tuple[object, str, object]
READING = {access._Step.ENTRIES, access._Step.NEXT, access._Step.TAKEN, access._Step.SETTLE}


@dataclass(frozen=True)
class Mutation:
    """`promises`: those that may catch it; empty if the rule is unnecessary."""

    name: str
    scope: str
    promises: str
    patches: tuple[Patch, ...] = ()
    size: int = 0
    is_mistake: bool = False
    """Whether the programs make it."""
    constants: tuple[tuple[str, int], ...] = ()

    def explored(self, *, worlds_max: int = 20_000_000) -> Verdict:
        scope = SCOPES[self.scope](self.size, self.name if self.is_mistake else "")
        with patched(self.patches):
            return explore(replace(scope, constants=(*scope.constants, *self.constants)), worlds_max=worlds_max)


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def around(owner: type, name: str, change: Callable[..., Any]) -> Patch:
    """`change` gets the method that it replaces before its own arguments."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        return change(original, self, *args, **named)

    return owner, name, changed


# --- reading and appending --------------------------------------------------------------------------------------------


def _no_list_after_a_put(after: Callable[..., Any], self: LogAccess, reply: Any) -> Any:
    found = after(self, reply)
    counts = isinstance(found, LogAccess) and found.step is access._Step.COUNTS
    return after(found, LogListing((found.number,))) if counts else found


def _no_list_after_reading(after: Callable[..., Any], self: LogAccess, reply: Any) -> Any:
    found = after(self, reply)
    is_read = isinstance(found, LogAccess) and found.step is access._Step.LIST and found.looks == self.looks
    return found._proved() if is_read and self.step in READING else found


def _chained_read(read: Callable[..., Any], self: LogAccess, got: tuple[Any, ...], **named: Any) -> Any:
    found, nonce = list[Any](), self.known.state.nonce
    for one in got:
        found.append(msgspec.structs.replace(one, before=nonce) if isinstance(one, LogEntry) else one)
        nonce = one.nonce if isinstance(one, LogEntry) else nonce
    return read(self, tuple(found), **named)


def _chained_next(following: Callable[..., Any], self: LogAccess, got: Any) -> Any:
    is_entry = isinstance(got, LogEntry)
    return following(self, msgspec.structs.replace(got, before=self.known.state.nonce) if is_entry else got)


def _unchecked(following: Callable[..., Any], self: LogAccess, got: Any) -> Any:
    if not isinstance(got, LogEntry) or self.entry is None or got.nonce == self.nonce or got.before != self.known.state.nonce:
        return following(self, got)
    entry = msgspec.structs.replace(self.entry, number=got.number + 1, before=got.nonce)
    return replace(self, known=self.known.with_entries([got], settled=True), step=access._Step.PUT, entry=entry)


def _settled(with_entries: Callable[..., Any], self: KnownLog, entries: Any, *, settled: bool = False) -> Any:
    return with_entries(self, entries, settled=True)


def _state_first(after: Callable[..., Any], self: LogAccess, reply: Any) -> Any:
    """The state before the entries, and no list after them."""
    if self.step is access._Step.LIST and isinstance(reply, LogListing):
        found = after(self, reply)
        is_based = isinstance(found, LogAccess) and found.step is access._Step.ENTRIES and found.base
        return replace(found, step=access._Step.STATE) if is_based else found
    if self.step is access._Step.STATE and isinstance(reply, LogState) and self.listed:
        return replace(self, known=KnownLog(reply, is_settled=False), base=0, step=access._Step.ENTRIES, looks=self.looks)
    if self.step is access._Step.ENTRIES and not self.base and self.wanted is None and self.until is None:
        return self._read(reply, since_list=True)
    return after(self, reply)


def _bad_forgotten(after: Callable[..., Any], self: LogAccess, reply: Any) -> Any:
    found = after(self, reply)
    return replace(found, bad=frozenset()) if isinstance(found, LogAccess) and isinstance(reply, Unusable) else found


def _ends_when_listed(listed: Callable[..., Any], self: LogAccess, listing: LogListing) -> Any:
    wanted = self.wanted
    found = listed(replace(self, wanted=None), listing)
    return replace(found, wanted=wanted) if isinstance(found, LogAccess) else found


def _covered_by_nothing(again: Callable[..., Any], self: LogAccess, why: str) -> Any:
    return self._proved() if "nothing else tells" in why else again(self, why)


# --- compaction and rebuilds ------------------------------------------------------------------------------------------


def _entries_before_states(after: Callable[..., Any], self: Compaction, reply: Any) -> Any:
    order = [access._Stage.SETTLE, access._Stage.ENTRIES, access._Stage.STATES]
    if self.stage not in order:
        return after(self, reply)
    place = order.index(self.stage) + 1
    return replace(self, stage=order[place]) if place < len(order) else None


def _no_settle(after: Callable[..., Any], self: Compaction, reply: Any) -> Any:
    found = after(self, reply)
    return replace(found, stage=access._Stage.STATES) if found is not None and found.stage is access._Stage.SETTLE else found


def _state_last(after: Callable[..., Any], self: Compaction, reply: Any) -> Any:
    """The entries that a state would cover go before it is put."""
    if self.stage is access._Stage.PUT and not self.listing.states:
        return replace(self, stage=access._Stage.LIST)
    if self.stage is access._Stage.LIST:
        listing = LogListing((*reply.entries, self.state.number), (*reply.states, self.state.number), reply.marks)
        found = after(self, listing)
        return replace(self, stage=access._Stage.PUT, listing=listing) if found is None else found
    if self.stage is access._Stage.ENTRIES:
        return replace(self, stage=access._Stage.PUT)
    return None if self.stage is access._Stage.PUT else after(self, reply)


def _no_mark(after: Callable[..., Any], self: Rebuild, reply: Any) -> Any:
    found = after(self, reply)
    return replace(found, step=access._Step.COUNTS) if found.step is access._Step.PUT else found


# --- check and apply --------------------------------------------------------------------------------------------------


def _no_fence(begin: Callable[..., Any], self: Any, record: BeginRecord) -> None:
    attempts = self.attempts
    self.attempts = {}
    begin(self, record)
    self.attempts = attempts


def _may_spare_all(state: LogState, attempt: str) -> bool:
    known = state.attempts.get(attempt)
    return known is None or known.status in ("undecided", "aborted")


def _of_its_start(state: LogState, attempt: str) -> bool:
    return AttemptId.of(attempt).start == state.start


_reached = rules.reached


def _reached_unless_aborted(state: LogState, record: Record) -> bool:
    is_aborted = isinstance(record, CommitRecord) and state.attempts[record.attempt].status == "aborted"
    return not is_aborted and _reached(state, record)


def _reached_by_anybody(state: LogState, record: Record) -> bool:
    if isinstance(record, BeginRecord):
        return any(one.start == record.start for one in state.begins)
    return _reached(state, record)


def _needed_by_checkpoints(state: LogState) -> frozenset[str]:
    return frozenset(holder for one in state.attempts.values() if one.status == "checkpoint" for holder in one.holders)


_needed = rules.needed_by_others


def _needed_by_undecided(state: LogState) -> frozenset[str]:
    undecided = {name: one for name, one in state.attempts.items() if one.status == "undecided"}
    bases = {one.base for one in undecided.values()}
    known = {name: msgspec.structs.replace(one, status="removed") for name, one in state.attempts.items() if name in bases}
    return _needed(replace(state, attempts={**undecided, **known}))


def _check_remove(state: LogState, record: Any) -> str:
    return next(filter(None, (rules._check_status(state, name, "checkpoint") for name in record.attempts)), "")


def _without_start(check: Callable[..., str]) -> Callable[..., str]:
    """Retention removes for whatever start it began in."""
    return lambda state, record: check(state, msgspec.structs.replace(record, start=state.start if record.start else 0))


def _base_unchecked(check: Callable[..., str]) -> Callable[..., str]:
    return lambda state, record: check(state, msgspec.structs.replace(record, base=""))


def _head_stays(commit: Callable[..., Any], self: Any, record: Any) -> None:
    """A late commit of a branch that was left is of the current one."""
    commit(self, record)
    self._set(record.attempt, left_behind=False)


def _undecided_or_not(check: Callable[..., str]) -> Callable[..., str]:
    return lambda state, attempt, *wanted: check(state, attempt, *wanted, *(["aborted"] if wanted == ("undecided",) else []))


def constant(value: Any) -> Callable[..., Any]:
    return lambda *_: value


A = LogAccess
MUTATIONS = [
    Mutation("no list after a put", "late remover", "fce", (around(A, "after", _no_list_after_a_put),)),
    Mutation("no list after reading", "strays", "eai", (around(A, "after", _no_list_after_reading),)),
    Mutation(
        "an entry need not name the one before it",
        "strays",
        "eaf",
        (around(A, "_read", _chained_read), around(A, "_next", _chained_next)),
    ),
    Mutation("no check after a lost race", "late puts", "abd", (around(A, "_next", _unchecked),)),
    Mutation(
        "an append does not ask the state whether its aim is reached", "late puts", "f", ((rules, "reached", constant(False)),)
    ),
    Mutation(
        "an append ends at its list, although the number is free",
        "stale lists",
        "fi",
        (around(A, "_listed", _ends_when_listed),),
    ),
    Mutation("what was read is not made durable", "power cut", "d", (around(KnownLog, "with_entries", _settled),)),
    Mutation("the state is read before the entries", "fresh readers", "e", (around(A, "after", _state_first),)),
    Mutation("a damaged state is read again and again", "damaged state", "g", (around(A, "after", _bad_forgotten),)),
    Mutation("a list may miss the own put", "stale appends", "fce", ((world, "FRESH_OWN", False),), size=1),
    Mutation(
        "a mark does not cover entries",
        "rebuild",
        "dfe",
        ((LogListing, "covered", property(lambda self: max(self.states[-1:], default=0))),),
    ),
    Mutation("one state is kept", "compaction", "ade", constants=(("STATES_KEPT", 1),)),
    Mutation("(unnecessary) a state is put that is not proved", "compactors", "", is_mistake=True),
    Mutation("a state covers an entry that its writer has not read", "compaction", "de", is_mistake=True),
    Mutation(
        "entries go before the state that covers them is put", "compaction", "ade", (around(Compaction, "after", _state_last),)
    ),
    Mutation("entries go before older states", "fresh readers", "e", (around(Compaction, "after", _entries_before_states),)),
    Mutation(
        "compaction does not make durable what it has listed",
        "power cut in compaction",
        "d",
        (around(Compaction, "after", _no_settle),),
    ),
    Mutation(
        "a start after a gap fences what may have committed in it",
        "rebuild past a gap",
        "d",
        ((access, "_past_gaps", rules.following),),
    ),
    Mutation("a rebuild puts no mark", "rebuild", "d", (around(Rebuild, "after", _no_mark),)),
    Mutation("begin without fencing", "two starts", "bd", (around(rules._Change, "_begin", _no_fence),)),
    Mutation("a begin spares what the one before it did not", "spool", "bd", ((rules, "may_be_spared", _may_spare_all),)),
    Mutation("a begin may not spare what is not announced", "spool", "i", ((rules, "is_admitted", _of_its_start),)),
    Mutation("a start does not decide what it has spared", "spared", "g", is_mistake=True),
    Mutation(
        "a begin does not name its process",
        "two starts",
        "k",
        ((rules, "reached", _reached_by_anybody), (programs, "owns", constant(True))),
    ),
    Mutation("the state keeps the newest begin alone", "late start", "fk", ((rules, "BEGINS_MAX", 1),)),
    Mutation("any start may announce", "two starts", "bd", ((rules, "is_admitted", constant(True)),)),
    Mutation("a name may be announced again", "names", "c", ((rules, "was_used", constant(False)),)),
    Mutation(
        "what was aborted may commit",
        "late puts",
        "ab",
        (
            (rules, "_check_status", _undecided_or_not(rules._check_status)),
            (rules, "reached", _reached_unless_aborted),
        ),
    ),
    Mutation("undecided attempts pin nothing", "retention", "c", ((rules, "needed_by_others", _needed_by_checkpoints),)),
    Mutation("checkpoints pin nothing", "removers", "c", ((rules, "needed_by_others", _needed_by_undecided),)),
    Mutation(
        "a base may be removed before it is announced",
        "retention",
        "c",
        ((rules, "_check_announce", _base_unchecked(rules._check_announce)),),
    ),
    Mutation("swept although objects were kept", "retention", "g", is_mistake=True),
    Mutation("a removal may leave no verified checkpoint", "removers", "j", ((rules, "_check_remove", _check_remove),)),
    Mutation(
        "an older job's retention still removes",
        "retention",
        "j",
        ((rules, "_check_remove", _without_start(rules._check_remove)),),
    ),
    Mutation("objects go before their removal", "removers", "c", is_mistake=True),
    Mutation(
        "a late commit of a branch that was left is current",
        "branches",
        "deh",
        (around(rules._Change, "_commit", _head_stays),),
    ),
    Mutation("a rollback is put without a begin", "rollback", "defh", is_mistake=True),
    Mutation("(unnecessary) a start need not be newer", "late start", "", ((rules, "_check_begin", constant("")),)),
    Mutation(
        "(unnecessary) swept is not refused while somebody refers",
        "removers",
        "",
        (
            (
                rules,
                "_check_swept",
                lambda state, record: next(
                    filter(None, (rules._check_status(state, name, "aborted", "removed") for name in record.attempts)), ""
                ),
            ),
        ),
    ),
    Mutation(
        "(unnecessary) a state that nothing tells is passed by",
        "damaged state",
        "",
        (around(A, "_again", _covered_by_nothing),),
    ),
]


def is_right(mutation: Mutation, found: Verdict) -> bool:
    if mutation.promises:
        return found.violation is not None and found.violation.promise in mutation.promises
    return found.violation is None and found.is_complete


__all__ = ["MUTATIONS", "Mutation", "is_right"]
