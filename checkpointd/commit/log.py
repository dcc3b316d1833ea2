"""What the records of a root's log mean: `check` says whether a record may follow a state, `apply` gives the state after it.

The records of an entry are checked in order; all count, or none.

| record | valid if | then |
|---|---|---|
| begin | its start is newer; each that it spares is undecided, or may still be announced | other undecided ones are aborted |
| announce | of the state's start, or spared (at a mirror: older); new; its base is a checkpoint or none | undecided |
| commit | undecided; each holder is the base, a holder of it, a checkpoint, or at a mirror may be held | a checkpoint |
| abort | undecided | aborted |
| remove | checkpoints; if a start removes, it is the state's, and a verified one stays that is sound | removed |
| swept | aborted or removed, and nobody needs them | forgotten some entries later |
| verified, damaged, passed-over | a checkpoint | noted; of the first two, the later counts |
| rollback | a checkpoint without damage; nothing newer may still commit | what came after it is left behind, its branch not |
| hold | at a mirror: unknown, or removed and swept | as if removed |

Invariants
  LOG-7  A start puts what it decides of older attempts and its `begin` in one entry, and loads only then. From then on nothing
      commits that it did not spare, and no later start can spare it again.
  LOG-8  No attempt is announced twice by its coordinator, nor commits if it was decided, whatever became of it, since the state
      keeps the numbers that were used. Another rank announces an attempt without a number, since it may count other saves.
  LOG-10  A save refers only to what its base holds or refers to. What a checkpoint, or the base of an undecided attempt,
      refers to is never swept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from checkpointd.commit.branches import base_in, change_of, training
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import (
    BEGINS_MAX,
    AbortRecord,
    AnnounceRecord,
    AttemptStatus,
    BeginRecord,
    CommitRecord,
    DamageRecord,
    HoldRecord,
    LogEntry,
    LoggedAttempt,
    LogState,
    PassOverRecord,
    Ranges,
    Record,
    RemoveRecord,
    RollbackRecord,
    SweepRecord,
    VerifyRecord,
)
from checkpointd.layout.manifest import ErrorReport
from checkpointd.phrases import listed

Numbered: TypeAlias = AnnounceRecord | CommitRecord

FORGET_EVERY = 64
FORGET_AFTER = 128
"""The state after each FORGET_EVERY-th entry forgets what was swept this many entries before or earlier."""


# --- check ----------------------------------------------------------------------------------------------------------


def check(state: LogState, record: Record) -> str:
    """Why `record` may not follow `state`, in words; empty if it may."""
    match record:
        case BeginRecord():
            return _check_begin(state, record)
        case AnnounceRecord():
            return _check_announce(state, record)
        case CommitRecord():
            return _check_commit(state, record)
        case AbortRecord():
            return _check_status(state, record.attempt, "undecided")
        case RemoveRecord():
            return _check_remove(state, record)
        case SweepRecord():
            return _check_swept(state, record)
        case RollbackRecord():
            return _check_rollback(state, record)
        case HoldRecord():
            name = record.attempt
            return "" if may_be_held(state, name) else f"{name} {fate(state, name)}"
        case VerifyRecord() | DamageRecord() | PassOverRecord():
            return _check_status(state, record.attempt, "checkpoint")


def _check_begin(state: LogState, begin: BeginRecord) -> str:
    if begin.start <= state.start:
        return f"start {begin.start} is not newer than start {state.start}"
    refused = next((name for name in begin.spared if not may_be_spared(state, name)), None)
    return "" if refused is None else f"{refused} cannot be spared: it {fate(state, refused)}"


def may_be_spared(state: LogState, attempt: str) -> bool:
    """Whether the next start may spare `attempt` (`<tag>/<attempt>`)."""
    known = state.attempts.get(attempt)
    if known is not None:
        return known.status == "undecided"
    return _is_own(state, attempt)


def _check_announce(state: LogState, record: AnnounceRecord) -> str:
    if refused := _check_new(state, record):
        return refused
    if not is_admitted(state, record.attempt):
        newest = f"of start {state.start}, the newest, nor spared by it"
        return f"{record.attempt} is neither {newest}" if state.begin else f"no start has begun, so {record.attempt} is of none"
    return _check_status(state, record.base, "checkpoint") if record.base else ""


def _check_new(state: LogState, record: AnnounceRecord) -> str:
    if record.attempt in state.attempts:
        return f"{record.attempt} {fate(state, record.attempt)}"
    return _used(record) if was_used(state, record.attempt, record.n) else ""


def _used(record: Numbered) -> str:
    return f"save {record.n} of its start was announced before {record.attempt}"


def is_admitted(state: LogState, attempt: str) -> bool:
    """Whether the newest start lets `attempt` (`<tag>/<attempt>`) be announced."""
    return _is_own(state, attempt) or (_is_mirror(state) and AttemptId.of(attempt).start < state.start)


def _is_mirror(state: LogState) -> bool:
    return state.begin is not None and bool(state.begin.origin)


def _check_commit(state: LogState, record: CommitRecord) -> str:
    if refused := _check_status(state, record.attempt, "undecided"):
        return refused
    one = state.attempts[record.attempt]
    if one.n < 0 and was_used(state, record.attempt, record.n):
        return _used(record)
    pinned = pinned_by(state, one.base)
    for holder in record.holders:
        if holder in pinned or may_be_held(state, holder):
            continue
        if refused := _check_status(state, holder, "checkpoint"):
            return f"{record.attempt} refers to objects that may be gone: {refused}"
    return ""


def may_be_held(state: LogState, attempt: str) -> bool:
    """Whether the root is a mirror where nobody removes objects of `attempt`, since its log has nothing of it. So a checkpoint
    may refer to what was copied there. The `hold` after its commit, in the same entry, lets the objects go once nobody needs
    them.
    """
    known = state.attempts.get(attempt)
    return _is_mirror(state) and (known is None or (known.status == "removed" and known.swept > 0))


def _check_remove(state: LogState, record: RemoveRecord) -> str:
    for name in record.attempts:
        if refused := _check_status(state, name, "checkpoint"):
            return refused
    if not record.start:
        return ""
    if record.start != state.start:
        return f"start {state.start} has begun, so start {record.start} removes nothing"
    going = set(record.attempts)
    if any(is_sound(one) and one.verified for one in state.attempts.values() if one.prefix not in going):
        return ""
    return f"without {listed(record.attempts)} no checkpoint is left that was read back whole"


def is_sound(attempt: LoggedAttempt) -> bool:
    """Whether it is a checkpoint of which nobody has found damage."""
    return attempt.status == "checkpoint" and not attempt.damaged and not attempt.passed_over


def _check_swept(state: LogState, record: SweepRecord) -> str:
    needed = needed_by_others(state)
    for name in record.attempts:
        if refused := _check_status(state, name, "aborted", "removed"):
            return refused
        if name in needed:
            return f"others need objects of {name}"
    return ""


def needed_by_others(state: LogState) -> frozenset[str]:
    """The attempts of which others need objects: a checkpoint, or an undecided attempt through its base (LOG-10)."""
    found: set[str] = set()
    for one in state.attempts.values():
        if one.status == "checkpoint":
            found.update(one.holders)
        elif one.status == "undecided":
            found |= pinned_by(state, one.base)
    return frozenset(found)


def pinned_by(state: LogState, base: str) -> frozenset[str]:
    """The attempts to whose objects an undecided attempt with this base may refer, since they stay for it: the base, and what
    holds objects of that (LOG-10).
    """
    known = state.attempts.get(base)
    return frozenset() if known is None else frozenset((base, *known.holders))


def for_followers(state: LogState) -> LogState:
    """What the ranks of the newest start need of `state` to follow the log from there: what they may still announce and abort,
    and the checkpoint to which the next save refers. Without the history, so its size does not grow with that of the root.
    """
    spared = () if state.begin is None else state.begin.spared
    pending = {name: one for name, one in state.attempts.items() if one.status == "undecided" or name in spared}
    others = {base_in(state), *state.heads.values(), *(one.base for one in pending.values())}
    kept = {name: one for name, one in state.attempts.items() if name in pending or name in others}
    return replace(state, begins=state.begins[-1:], attempts=MappingProxyType(kept))


def _check_rollback(state: LogState, record: RollbackRecord) -> str:
    if refused := _check_status(state, record.attempt, "checkpoint"):
        return refused
    one = state.attempts[record.attempt]
    if one.damaged:
        return f"{record.attempt} is damaged"
    undecided = (other.prefix for other in state.attempts.values() if other.status == "undecided" and other.order > one.order)
    spared = () if state.begin is None else state.begin.spared
    unannounced = (name for name in spared if name not in state.attempts and AttemptId.of(name).start >= one.id.start)
    waiting = next(iter((*undecided, *unannounced)), None)
    return "" if waiting is None else f"{waiting} may still commit, and would be newer than {record.attempt}"


def _check_status(state: LogState, attempt: str, *wanted: str) -> str:
    known = state.attempts.get(attempt)
    if known is not None and known.status in wanted and not known.swept:
        return ""
    return f"{attempt} {fate(state, attempt)}"


def fate(state: LogState, attempt: str) -> str:
    """What has become of `attempt` (`<tag>/<attempt>`), in words that follow its name."""
    known = state.attempts.get(attempt)
    if known is not None:
        return _FATES[known.status] + (", and nothing is left of it" if known.swept else "")
    return "is not in the log"


_FATES = {
    "undecided": "is undecided",
    "checkpoint": "is a checkpoint",
    "aborted": "was aborted",
    "removed": "was removed",
}


def _is_own(state: LogState, attempt: str) -> bool:
    """Whether `attempt` is of the newest start, or spared by it."""
    return state.begin is not None and (AttemptId.of(attempt).start == state.start or attempt in state.begin.spared)


def was_used(state: LogState, attempt: str, n: int) -> bool:
    """Whether the number `n` of the save `attempt` was announced, as far back as the log tells."""
    start = AttemptId.of(attempt).start
    return any(first <= n <= last for first, last in state.used.get(start, ()))


def reached(state: LogState, record: Record) -> bool:
    """Whether `state` has what `record` is put for, or has decided otherwise: then nobody needs to put it (LOG-4)."""
    match record:
        case BeginRecord():
            return any((one.start, one.nonce) == (record.start, record.nonce) for one in state.begins)
        case AnnounceRecord():
            return record.attempt in state.attempts
        case CommitRecord() | AbortRecord():
            known = state.attempts.get(record.attempt)
            return known is not None and known.status != "undecided"
        case RemoveRecord():
            gone = (state.attempts.get(name) for name in record.attempts)
            return all(one is None or one.status == "removed" for one in gone)
        case SweepRecord():
            return all(name not in state.attempts or state.attempts[name].swept for name in record.attempts)
        case VerifyRecord():
            one = state.attempts.get(record.attempt)
            return one is not None and one.verified
        case DamageRecord():
            one = state.attempts.get(record.attempt)
            return one is not None and bool(one.damaged)
        case PassOverRecord():
            one = state.attempts.get(record.attempt)
            return one is not None and bool(one.passed_over)
        case RollbackRecord():
            is_there, after = not _check_status(state, record.attempt, "checkpoint"), apply(state, record)
            return is_there and (after.heads, after.attempts) == (state.heads, state.attempts)
        case HoldRecord():
            one = state.attempts.get(record.attempt)
            return one is not None and not one.swept


def check_all(state: LogState, records: Iterable[Record]) -> str:
    """Why `records` may not follow `state` together; empty if they may."""
    change = _Change.of(state)
    for record in records:
        if refused := check(change.done(), record):
            return refused
        change.add(record, state.number + 1)
    return ""


# --- apply ----------------------------------------------------------------------------------------------------------


def apply(state: LogState, record: Record) -> LogState:
    """The state after `record`, which must be valid in `state`."""
    change = _Change.of(state)
    change.add(record, state.number + 1)
    return change.done()


def following(state: LogState, entries: Sequence[LogEntry]) -> LogState:
    """The state after `entries`, each of which follows the one before."""
    change = _Change.of(state)
    for entry in entries:
        change.number, change.nonce = entry.number, entry.nonce
        for record in entry.records:
            change.add(record, entry.number)
        if entry.number % FORGET_EVERY == 0:
            change.forget()
    return change.done()


@dataclass(slots=True)
class _Change:
    """A copy of a state, to which records are added."""

    number: int
    nonce: str
    begins: tuple[BeginRecord, ...]
    used: dict[int, Ranges]
    heads: dict[str, str]
    attempts: dict[str, LoggedAttempt]

    @classmethod
    def of(cls, state: LogState) -> _Change:
        return cls(state.number, state.nonce, state.begins, state.used.copy(), state.heads.copy(), state.attempts.copy())

    def done(self) -> LogState:
        return LogState(
            self.number,
            self.nonce,
            self.begins,
            MappingProxyType(self.used),
            MappingProxyType(self.heads),
            MappingProxyType(self.attempts),
        )

    def add(self, record: Record, number: int) -> None:
        """Add a record of entry `number`."""
        match record:
            case BeginRecord():
                self._begin(record)
            case AnnounceRecord():
                self._use(record)
                name = record.attempt
                self.attempts[name] = LoggedAttempt(
                    prefix=name, n=record.n, step=record.step, base=record.base, status="undecided"
                )
            case CommitRecord():
                self._commit(record)
            case AbortRecord():
                self._decide(record.attempt, "aborted", abort=record)
            case RemoveRecord():
                self._remove(record)
            case SweepRecord():
                for name in record.attempts:
                    self._set(name, swept=number)
            case VerifyRecord():
                self._set(record.attempt, verified=True, damaged="")
            case DamageRecord():
                self._set(record.attempt, verified=False, damaged=record.why or "damaged")
            case PassOverRecord():
                self._set(record.attempt, passed_over=record.why or "damaged")
            case RollbackRecord():
                self._roll_back(record)
            case HoldRecord():
                self.attempts[record.attempt] = LoggedAttempt(prefix=record.attempt, status="removed")

    def forget(self) -> None:
        """Forget what was swept long ago."""
        gone = [name for name, one in self.attempts.items() if 0 < one.swept <= self.number - FORGET_AFTER]
        for name in gone:
            del self.attempts[name]

    def _set(self, attempt: str, **changes: object) -> None:
        """Change an attempt that is known. A rank that follows the log from its start does not know older ones."""
        if attempt in self.attempts:
            self.attempts[attempt] = msgspec.structs.replace(self.attempts[attempt], **changes)

    def _decide(self, attempt: str, status: AttemptStatus, **changes: object) -> None:
        """The same for what decides it: it may be unknown, too, after entries that cannot be read."""
        self.attempts.setdefault(attempt, LoggedAttempt(prefix=attempt, status=status))
        self._set(attempt, status=status, **changes)

    def _begin(self, begin: BeginRecord) -> None:
        error = fenced_by(begin)
        for name, one in self.attempts.items():
            if one.status == "undecided" and name not in begin.spared:
                fenced = AbortRecord(attempt=name, error=error, decided_by=-1, writer=begin.writer)
                self.attempts[name] = msgspec.structs.replace(one, status="aborted", abort=fenced)
        older = [msgspec.structs.replace(one, spared=()) if one.spared else one for one in self.begins]
        self.begins = (*older, begin)[-BEGINS_MAX:]
        if not begin.origin:  # at a mirror, attempts of all starts may be announced
            starts = {AttemptId.of(name).start for name in begin.spared}
            self.used = {start: used for start, used in self.used.items() if start in starts}

    def _use(self, record: Numbered) -> None:
        if record.n < 0:
            return
        start = AttemptId.of(record.attempt).start
        self.used[start] = with_number(self.used.get(start, ()), record.n)

    def _commit(self, commit: CommitRecord) -> None:
        before = self.attempts.get(commit.attempt)
        if before is not None and before.n < 0:
            self._use(commit)
        self._decide(commit.attempt, "checkpoint", n=commit.n, step=commit.step, committed=commit)
        own, one = training(commit), self.attempts[commit.attempt]
        if commit.left:
            self._leave(one, beyond=False)
        head = self.attempts.get(self.heads.get(own, ""))
        if head is None or head.order < one.order:
            self.heads[own] = one.prefix
        elif head.committed and head.commit.left:
            self._leave(head, beyond=False)  # the commit comes late, and may be of a branch that was left since

    def _remove(self, record: RemoveRecord) -> None:
        for name in record.attempts:
            self._decide(name, "removed", removal=msgspec.structs.replace(record, attempts=(name,)))
        for own in [own for own, head in self.heads.items() if head in record.attempts]:
            del self.heads[own]
            current = [one for one in self.attempts.values() if one.status == "checkpoint" and not one.left_behind]
            alike = [one for one in current if training(one.commit) == own]
            if alike:
                self.heads[own] = max(alike, key=attrgetter("order")).prefix

    def _roll_back(self, record: RollbackRecord) -> None:
        one = self.attempts.get(record.attempt)
        if one is not None and one.committed:
            self._leave(one, beyond=True)
            self.heads[training(one.commit)] = one.prefix

    def _leave(self, head: LoggedAttempt, *, beyond: bool) -> None:
        change = change_of(self.attempts.values(), head, beyond=beyond)
        for name in change.left:
            self._set(name, left_behind=True)
        for name in change.current:
            self._set(name, left_behind=False)


def fenced_by(begin: BeginRecord, why: str = "") -> ErrorReport:
    """The error of an attempt that a start has aborted. `why`: the words after that, with what the attempt lacked."""
    who = begin.writer
    words = f"start {begin.start} has begun, by process {who.pid} on {who.host} at {who.time}{why}"
    return ErrorReport(code="FencedError", message=words)


def with_number(ranges: Ranges, number: int) -> Ranges:
    """`ranges` with `number`."""
    found = [*ranges, (number, number)]
    found.sort()
    merged = [found[0]]
    for first, last in found[1:]:
        if first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


# --- rebuilds -------------------------------------------------------------------------------------------------------


def rebuilt(state: LogState, number: int, nonce: str, records: Iterable[Record]) -> LogState:
    """The state `number` of a log that is made again: `state`, as far as the old one could be read, and after it `records`,
    which say what its objects show, and begin a start.
    """
    change = _Change.of(state)
    for record in records:
        change.add(record, number)
    change.number, change.nonce = number, nonce
    return change.done()
