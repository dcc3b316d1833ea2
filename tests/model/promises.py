"""What must be true of a root: the promises, kept by a ghost that follows the entries which truly took the next number.

The ghost reads the records by their meaning alone and knows no rule of `commit/log.py`. Sets of attempts and of objects are
masks. The promises:

  a  An attempt is decided at most once, and everybody who reports a decision reports that one.
  b  No attempt commits that a newer start has fenced, that is: has not spared.
  c  A checkpoint has its objects, its ballot, and the objects to which it refers.
  d  The log as it is stored tells the truth at every moment: from its newest state, and from the one before that. So no
      reported commit is lost, not to compaction, one damaged state, a power cut or a rebuild.
  e  A process takes for proved only what was true. A load never calls a checkpoint damaged that somebody removed meanwhile.
  f  An append that reports success is in the log once; one that reports a refusal is not in it.
  g  From everywhere, the processes can finish if nobody stops. Then every attempt is decided, and no object is left over.
  h  A checkpoint is left behind if it is of a branch that was left, whichever of commit and leaving came first.
  i  A save that nobody has aborted or fenced is not refused.
  j  Retention leaves a checkpoint that was verified, and removes nothing once a newer start has begun.
  k  One process at most believes that it has begun a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkpointd.layout.log_records import (
    AbortRecord,
    AnnounceRecord,
    BeginRecord,
    CommitRecord,
    HoldRecord,
    LogEntry,
    LogState,
    Record,
    RemoveRecord,
    RollbackRecord,
    SweepRecord,
    VerifyRecord,
)

X, W, U, Y, Z = range(5)
NAMES = ("x/00000005-0", "w/00000005-1", "u/00000005-2", "y/00000005-3", "z/00000006-0")
"""The attempts of every scope, oldest first."""
INDEX = {name: one for one, name in enumerate(NAMES)}
STARTS = (5, 5, 5, 5, 6)

R0, R1, VOTE0, VOTE1, BALLOT = range(5)
"""The objects of an attempt: what each of two ranks stored, their votes, and the ballot."""


def bits(attempt: int, *what: int) -> int:
    return sum(1 << (5 * attempt + one) for one in what)


def stored_of(attempt: int) -> int:
    """The objects of a checkpoint."""
    return bits(attempt, R0, R1, BALLOT)


VOTES = bits(Y, VOTE0, VOTE1)
Y_HERE = bits(Y, R0, R1, VOTE0, VOTE1)


@dataclass(frozen=True)
class Plan:
    """What an attempt of a scope refers to: `refers`, objects of older attempts, all held by `base` or referred to by it."""

    base: int | None = None
    refers: int = 0
    left: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    """The branches that were left on the way to it."""

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(sorted(name for a, name in enumerate(NAMES) if self.refers & bits(a, *range(5))))


Plans = tuple[Plan, ...]
PLANS: Plans = (Plan(), Plan(X, bits(X, R0)), Plan(), Plan(), Plan())
PINNING: Plans = (*PLANS[:Y], Plan(W, bits(X, R0) | bits(W, R1)), Plan())
"""Y refers to what W holds and to what W refers to; W was the newest when its save began, and U has come since."""


class Violation(Exception):
    def __init__(self, promise: str, why: str) -> None:
        super().__init__(f"({promise}) {why}")
        self.promise = promise


class Ghost(NamedTuple):
    """What the entries so far have truly brought about."""

    start: int
    announced: int
    commits: int
    aborts: int = 0
    fenced: int = 0
    removed: int = 0
    swept: int = 0
    verified: int = 0
    spared: int = 0
    held: int = 0
    leaving: tuple[tuple[int, ...], ...] = ()
    """What has left branches behind: the attempt, 1 if it was a rollback, and the attempts that were announced then."""
    begins: tuple[tuple[int, str], ...] = ()
    nonces: frozenset[str] = frozenset()

    @property
    def live(self) -> int:
        return self.commits & ~self.removed

    @property
    def away(self) -> int:
        return self.aborts | self.fenced & self.announced

    @property
    def open(self) -> int:
        return self.announced & ~self.commits & ~self.away

    def after(self, entry: LogEntry) -> Ghost:
        """The next one. Raises Violation if a record breaks a promise."""
        if entry.nonce in self.nonces:
            raise Violation("f", f"the entry {entry.nonce} is in the log twice")
        ghost = self._replace(nonces=self.nonces | {entry.nonce})
        for record in entry.records:
            ghost = ghost.with_record(record)
        return ghost

    def with_record(self, record: Record) -> Ghost:
        match record:
            case BeginRecord():
                return self._begun(record)
            case RemoveRecord():
                return self._removed(record)
            case SweepRecord():
                return self._replace(swept=self.swept | mask(record.attempts))
            case AnnounceRecord() if record.attempt in INDEX:
                one = mask([record.attempt])
                if one & (self.announced | self.held):
                    raise Violation("c", f"{record.attempt} is announced a second time")
                return self._replace(announced=self.announced | one)
            case HoldRecord() if record.attempt in INDEX:
                one = mask([record.attempt])
                if one & self.announced & ~self.held:
                    raise Violation("a", f"{record.attempt} is held, and was announced")
                return self._replace(
                    announced=self.announced | one, commits=self.commits | one, removed=self.removed | one, held=self.held | one
                )
            case VerifyRecord():
                return self._replace(verified=self.verified | mask([record.attempt]))
            case RollbackRecord():
                one = INDEX[record.attempt]
                return self._replace(leaving=(*self.leaving, (one, 1, self.announced)))
            case CommitRecord() | AbortRecord():
                return self._decided(record)
        return self

    def _begun(self, record: BeginRecord) -> Ghost:
        if record.start <= self.start:
            raise Violation("k", f"start {record.start} begins after start {self.start}")
        older = sum(1 << a for a, start in enumerate(STARTS) if start < record.start)
        waiting = older & ~self.commits & ~self.aborts
        if record.origin:
            waiting &= self.announced
        spared = mask(record.spared)
        begins = (*self.begins, (record.start, record.nonce))
        return self._replace(start=record.start, fenced=self.fenced | waiting & ~spared, spared=spared, begins=begins)

    def _removed(self, record: RemoveRecord) -> Ghost:
        going = mask(record.attempts)
        if record.start and record.start < self.start:
            raise Violation("j", f"retention of start {record.start} removes a checkpoint in start {self.start}")
        if going & ~self.live:
            raise Violation("a", f"{record.attempts} are removed, and are no checkpoints")
        ghost = self._replace(removed=self.removed | going)
        if record.start and not ghost.live & ghost.verified:
            raise Violation("j", "no verified checkpoint stays")
        return ghost

    def _decided(self, record: CommitRecord | AbortRecord) -> Ghost:
        one, name = mask([record.attempt]), record.attempt
        if not self.announced & one:
            raise Violation("a", f"{name} is decided and was never announced")
        if (self.commits | self.aborts) & one:
            raise Violation("a", f"{name} is decided twice")
        if isinstance(record, AbortRecord):
            return self._replace(aborts=self.aborts | one)
        if self.fenced & one:
            raise Violation("b", f"{name} commits although start {self.start} has fenced it")
        leaving = (*self.leaving, (INDEX[name], 0, self.announced)) if record.left else self.leaving
        return self._replace(commits=self.commits | one, leaving=leaving)

    def left_behind(self, plans: Plans) -> int:
        """The checkpoints of branches that were left. After a rollback that is what was announced before it and is newer."""
        found = 0
        for one, is_rollback, announced in self.leaving:
            gaps = plans[one].left
            for a, name in enumerate(NAMES):
                of = order(name)
                if is_rollback and announced >> a & 1 and of > order(NAMES[one]):
                    found |= 1 << a
                if not is_rollback and any(since < of < until for since, until in gaps):
                    found |= 1 << a
        return found & self.live


def order(name: str) -> tuple[int, int]:
    start, _, k = name.rpartition("/")[2].partition("-")
    return int(start), int(k)


def mask(names: object) -> int:
    assert isinstance(names, list | tuple)
    return sum(1 << INDEX[name] for name in names if name in INDEX)


class Facts(NamedTuple):
    """What a state says, as masks."""

    start: int
    undecided: int
    live: int
    aborted: int
    removed: int
    swept: int
    left: int

    @classmethod
    def of(cls, state: LogState) -> Facts:
        found = dict.fromkeys(("undecided", "checkpoint", "aborted", "removed"), 0)
        swept = left = 0
        for a, name in enumerate(NAMES):
            if (one := state.attempts.get(name)) is not None:
                found[one.status] |= 1 << a
                swept |= bool(one.swept) << a
                left |= (one.left_behind and one.status == "checkpoint") << a
        return cls(state.start, found["undecided"], found["checkpoint"], found["aborted"], found["removed"], swept, left)

    @property
    def known(self) -> int:
        return self.undecided | self.live | self.aborted | self.removed

    def is_true(self, ghost: Ghost, plans: Plans, *, unknown: int) -> bool:
        """Whether this is what has happened. `unknown`: the attempts that the process need not know."""
        parts = (self.live, ghost.live), (self.aborted, ghost.away), (self.removed, ghost.removed), (self.undecided, ghost.open)
        missing = ghost.announced & ~ghost.swept & ~self.known
        return (
            self.start == ghost.start
            and all(told & ~true == 0 for told, true in parts)
            and not missing & ~unknown
            and not (self.left ^ ghost.left_behind(plans)) & self.live
        )
