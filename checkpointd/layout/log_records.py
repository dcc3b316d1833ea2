"""The objects of a root's log: entries, which hold the records of what was decided, and states, each of which says what all
entries up to its number have come to. `docs/FORMAT.md` describes the same for other languages.

What the records mean is decided in `commit/log.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from checkpointd.layout.keys import LOG, START_MAX, WORLD_SIZE_MAX, AttemptId
from checkpointd.layout.manifest import (
    BALLOT_BYTES_MAX,
    VERSION,
    BallotRef,
    Branches,
    ErrorReport,
    JointPlanRef,
    WriterIdentity,
    decode_sealed,
    sealed,
)
from checkpointd.layout.save_timings import Cost

ENTRY_BYTES_MAX = 64 << 20
STATE_BYTES_MAX = 1 << 30
"""The largest state: a few hundred bytes for each attempt, so millions of attempts."""
BEGINS_MAX = 256
"""The newest starts that a state keeps."""
NUMBER_MAX = 10**12 - 1
"""The greatest number of an entry that has a name."""

_NUMBER = re.compile(r"\d{12}", re.ASCII)
# A tag is compared with the names of directories, or checked as a key, before anything is read there.
_ATTEMPT = re.compile(r"(?!\.)[^/\\\x00-\x1f]{1,200}/(?:[0-9]{8}|[1-9][0-9]{8,11})-(?:0|[1-9][0-9]{0,8})\Z")
AttemptName: TypeAlias = str
"""`<tag>/<attempt>`. An object that names anything else is refused."""
Nonce: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16,64}\Z")]
Start: TypeAlias = Annotated[int, Meta(ge=1, le=START_MAX)]

AttemptStatus = Literal["undecided", "checkpoint", "aborted", "removed"]
ReadBackState: TypeAlias = Literal["no", "whole", "damaged"]


# --- records --------------------------------------------------------------------------------------------------------


BeginRef: TypeAlias = tuple[int, str]
"""A start, by its number and its nonce."""


class BeginRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="begin"):
    """A start of the job. All attempts that are undecided and not spared are aborted by it."""

    start: Start
    nonce: Nonce
    """Tells this start from another one of the same number, at this root or at one that was removed since."""
    world_size: Annotated[int, Meta(ge=0, le=WORLD_SIZE_MAX)]
    """0: `checkpointd recover` took the start, and no ranks run in it."""
    process: str = ""
    """The unique name of the holder (see `store/writers.py`), which tells on its machine whether it still runs."""
    job: str = ""
    commit_timeout_s: float = 0.0
    """How many seconds the ranks of its attempts may take to vote; 0 if that was not recorded."""
    spared: tuple[AttemptName, ...] = ()
    """Attempts of older starts, each `<tag>/<attempt>`, whose writers are still at work, or which wait in a spool."""
    origin: str = ""
    """Of a mirror: the id of the root that it follows. Attempts of that root, whose starts are older, may be announced then."""
    origin_begin: BeginRef = (0, "")
    """Of a mirror: the newest start of that root then."""
    writer: WriterIdentity


class AnnounceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="announce"):
    """An attempt is about to write its first object."""

    attempt: AttemptName
    n: Annotated[int, Meta(ge=-1)] = -1
    """The number of the coordinator's earlier saves in the start: the attempt's place in the order. -1 if another rank
    announces it, which may count other saves; then the commit says it.
    """
    step: Annotated[int, Meta(ge=0)]
    base: AttemptName = ""
    """The checkpoint (`<tag>/<attempt>`) to whose objects, and to those that it refers to, the attempt may refer."""


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag_field="kind", tag="commit"):
    """An attempt has become a checkpoint. Its size does not grow with the number of ranks."""

    attempt: AttemptName
    n: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=0)]
    world_size: Annotated[int, Meta(ge=1, le=WORLD_SIZE_MAX)]
    save_latest: bool = True
    ballot: BallotRef
    plan: JointPlanRef | None = None
    """Of ranks that hold tensors together."""
    holders: tuple[AttemptName, ...] = ()
    """The older attempts (`<tag>/<attempt>`) that hold objects of the checkpoint, sorted. The votes name the objects."""
    metrics: dict[str, float] = {}
    """The metrics that the user passed to save() on rank 0, which retention uses."""
    left: Branches = ()
    """The branches that were left on the way to this checkpoint: between the two orders of each lie checkpoints from which it
    does not descend."""
    no_progress: bool = False
    """Whether the step moved on since the checkpoint before, but no tensor that requires grad changed on any rank."""
    cost: Cost | None = None
    files: int = 0
    """The number of files of all ranks; 0 if they store a state."""
    shown_at: str = ""
    """The directory that will show the files, relative to the directory in which the root lies."""
    unfinished: str = ""
    """The name under which the directory above `shown_at` was filled, if other programs filled it for this save."""
    rebuilt: bool = False
    """Whether a rebuild of the log found it whole, and did not know any more what had become of it."""
    decided_by: int
    """The rank that put the record; -1 for a start, a daemon or the command line."""
    writer: WriterIdentity

    @property
    def tag(self) -> str:
        return self.attempt.rpartition("/")[0]

    @property
    def id(self) -> AttemptId:
        return AttemptId.of(self.attempt)

    @property
    def order(self) -> tuple[int, int]:
        """The start, and the number of the save in it. A later commit has a greater one."""
        return self.id.start, self.n


class AbortRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="abort"):
    """An attempt will never be a checkpoint."""

    attempt: AttemptName
    error: ErrorReport
    ranks: tuple[int, ...] = ()
    """The ranks at fault, at most RANKS_AT_FAULT_MAX."""
    decided_by: int
    writer: WriterIdentity


class RemoveRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="remove"):
    """Checkpoints that are none any more. Their objects go later."""

    attempts: tuple[AttemptName, ...]
    reason: str
    start: int = 0
    """The start whose retention removes them; 0 if a person does."""
    user: str = ""
    """The name and number of the person: `alice (1000)`."""
    writer: WriterIdentity


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="swept"):
    """Nothing is left of these attempts."""

    attempts: tuple[AttemptName, ...]


class VerifyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="verified"):
    """All of a checkpoint was read back, past the cache, and found whole."""

    attempt: AttemptName
    nbytes: int


class DamageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="damaged"):
    """A checkpoint was read and found damaged."""

    attempt: AttemptName
    why: str


class PassOverRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="passed-over"):
    """A load found a checkpoint damaged and took an older one."""

    attempt: AttemptName
    why: str


class RollbackRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="rollback"):
    """Training goes on from this checkpoint; what came after it is of a branch that was left."""

    attempt: AttemptName
    user: str = ""
    writer: WriterIdentity


class HoldRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="hold"):
    """At a mirror: an attempt that is no checkpoint there, and holds objects to which checkpoints may refer."""

    attempt: AttemptName


Record: TypeAlias = (
    BeginRecord
    | AnnounceRecord
    | CommitRecord
    | AbortRecord
    | RemoveRecord
    | SweepRecord
    | VerifyRecord
    | DamageRecord
    | PassOverRecord
    | RollbackRecord
    | HoldRecord
)


# --- entries and states ---------------------------------------------------------------------------------------------


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.entry"):
    """Records that count together, or not at all."""

    version: int = VERSION
    number: Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
    nonce: Nonce
    """Unique to this entry."""
    before: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{16,64})?\Z")]
    """The nonce of the entry before; empty in the first one."""
    records: tuple[Record, ...]


class LoggedAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An attempt as the log has it."""

    prefix: AttemptName = msgspec.field(name="attempt")
    n: int = 0
    step: int = -1
    base: AttemptName = ""
    status: AttemptStatus
    committed: CommitRecord | None = msgspec.field(default=None, name="commit")
    """Of a checkpoint, also of one that was removed."""
    abort: AbortRecord | None = None
    removal: RemoveRecord | None = None
    """Without the other attempts that the record removes."""
    verified: bool = False
    damaged: str = ""
    """What was found; empty if it is not recorded as damaged."""
    passed_over: str = ""
    """Why a load passed over it and took an older checkpoint; empty if none did."""
    left_behind: bool = False
    """Whether it is of a branch that was left: training went on from an older checkpoint."""
    swept: int = 0
    """The number of the entry since which nothing is left of it."""

    @classmethod
    def of(cls, commit: CommitRecord) -> LoggedAttempt:
        """The checkpoint that `commit` has made."""
        return cls(prefix=commit.attempt, n=commit.n, step=commit.step, status="checkpoint", committed=commit)

    @property
    def id(self) -> AttemptId:
        return AttemptId.of(self.prefix)

    @property
    def tag(self) -> str:
        return self.prefix.rpartition("/")[0]

    @property
    def order(self) -> tuple[int, int]:
        """The place of its commit, if it commits."""
        return int(self.prefix.rpartition("/")[2].partition("-")[0]), self.n  # asked of every attempt of a long history

    @property
    def commit(self) -> CommitRecord:
        """The same as `committed`, of an attempt that has committed."""
        assert self.committed is not None, self.prefix
        return self.committed

    @property
    def decision(self) -> CommitRecord | AbortRecord | None:
        return self.committed or self.abort

    @property
    def holders(self) -> tuple[str, ...]:
        """The older attempts that it refers to, as far as that is decided."""
        return () if self.committed is None else self.committed.holders

    @property
    def may_be_latest(self) -> bool:
        """Whether `latest` may name it."""
        return self.status == "checkpoint" and self.commit.save_latest and not self.left_behind

    @property
    def read_back(self) -> ReadBackState:
        """Whether it was read back since it was written, and the result."""
        return "damaged" if self.damaged else "whole" if self.verified else "no"


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Whole numbers as ranges, each with its first and its last number, in order."""


@dataclass(frozen=True, slots=True)
class LogState:
    """What the entries up to `number` have come to. Before the first entry it is empty."""

    number: int = 0
    nonce: str = ""
    """That of entry `number`."""
    begins: tuple[BeginRecord, ...] = ()
    """The newest BEGINS_MAX starts, the newest last. What an older one has spared is left out."""
    used: MappingProxyType[int, Ranges] = field(default_factory=lambda: MappingProxyType({}))
    """The numbers of the saves that were announced, by their start: of the newest start, and of what it spares."""
    heads: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The newest checkpoint of the current branch of each training."""
    attempts: MappingProxyType[str, LoggedAttempt] = field(default_factory=lambda: MappingProxyType({}))
    """By `<tag>/<attempt>`, in the order in which they were announced."""

    @property
    def begin(self) -> BeginRecord | None:
        """The newest start; None before the first one."""
        return self.begins[-1] if self.begins else None

    @property
    def start(self) -> int:
        """The number of the newest start; 0 before the first one."""
        return self.begins[-1].start if self.begins else 0


class _StoredState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag="checkpointd.state"):
    version: int
    number: Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
    nonce: str
    begins: tuple[BeginRecord, ...] = ()
    used: dict[int, Ranges] = {}
    heads: dict[str, str] = {}
    attempts: tuple[LoggedAttempt, ...]


# --- names and bytes ------------------------------------------------------------------------------------------------


def entry_key(number: int) -> str:
    return f"{LOG}/{number:012d}.json"


def state_key(number: int) -> str:
    return f"{LOG}/{number:012d}.state"


def mark_key(number: int) -> str:
    """The mark of a rebuild that will put the state of this number."""
    return f"{LOG}/{number:012d}.rebuild"


@dataclass(frozen=True, slots=True)
class LogListing:
    """The numbers of what lies in a log, each in order."""

    entries: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    """Of rebuilds."""

    @classmethod
    def of(cls, names: Iterable[str]) -> LogListing:
        """The numbers among the objects `names`. Other names are left out."""
        found: dict[str, list[int]] = {"json": [], "state": [], "rebuild": []}
        for name in names:
            number, _, kind = name.partition(".")
            if kind in found and _NUMBER.fullmatch(number):
                found[kind].append(int(number))
        return cls(tuple(sorted(found["json"])), tuple(sorted(found["state"])), tuple(sorted(found["rebuild"])))

    @property
    def covered(self) -> int:
        """The greatest number up to which a state or the mark of a rebuild covers the entries."""
        return max((*self.states[-1:], *self.marks[-1:]), default=0)

    @property
    def is_being_rebuilt(self) -> bool:
        """Whether there is the mark of a rebuild that has not put its state."""
        return bool(self.marks) and self.marks[-1] > max(self.states, default=0)

    @property
    def last(self) -> int:
        """The greatest number in use."""
        return max((self.covered, *self.entries[-1:]))


def encode_entry(entry: LogEntry) -> bytes:
    return sealed(msgspec.json.format(msgspec.json.encode(entry), indent=2))


def decode_entry(data: bytes, number: int) -> LogEntry:
    """The entry with this number. Raises FormatError if the bytes are damaged, of another number, or no writer's."""
    return decode_sealed(data, LogEntry, entry_key(number), lambda found: _moved(found, number) or _entry_fault(found))


def encode_state(state: LogState) -> bytes:
    """`state`, with one line for each attempt."""
    head = _StoredState(
        version=VERSION,
        number=state.number,
        nonce=state.nonce,
        begins=state.begins,
        used=dict(state.used),
        heads=dict(state.heads),
        attempts=(),
    )
    start = msgspec.json.encode(head).removesuffix(b"]}")
    return sealed(start + b"\n" + b",\n".join(map(msgspec.json.encode, state.attempts.values())) + b"]\n}\n")


def decode_state(data: bytes, number: int) -> LogState:
    """The state with this number. Raises FormatError if the bytes are damaged, of another number, or no writer's."""
    found = decode_sealed(data, _StoredState, state_key(number), lambda found: _moved(found, number) or _state_fault(found))
    return LogState(
        found.number,
        found.nonce,
        found.begins,
        MappingProxyType(found.used),
        MappingProxyType(found.heads),
        MappingProxyType({one.prefix: one for one in found.attempts}),
    )


def _moved(found: LogEntry | _StoredState, number: int) -> str | None:
    return f"has the number {found.number}; somebody moved it" if found.number != number else None


def _entry_fault(entry: LogEntry) -> str | None:
    commits = (record for record in entry.records if isinstance(record, CommitRecord))
    fault = next(filter(None, map(_ballot_fault, commits)), None)
    return fault or _foreign(name for record in entry.records for name in _names(record))


def _ballot_fault(commit: CommitRecord) -> str | None:
    if 0 < commit.ballot.size <= BALLOT_BYTES_MAX:
        return None
    return f"has a commit of {commit.attempt!r:.100} with a ballot of {commit.ballot.size} bytes, which cannot be"


def _names(record: Record) -> tuple[str, ...]:
    """The attempts that `record` names."""
    match record:
        case BeginRecord():
            return record.spared
        case RemoveRecord() | SweepRecord():
            return record.attempts
        case AnnounceRecord() if record.base:
            return (record.attempt, record.base)
        case CommitRecord():
            return (record.attempt, *record.holders)
    return (record.attempt,)


def _state_fault(state: _StoredState) -> str | None:
    listed, named = {one.prefix for one in state.attempts}, set[str]()
    if len(listed) < len(state.attempts):
        return "lists an attempt twice"
    for one in state.attempts:
        commit = one.committed
        if commit is not None:
            if commit.attempt != one.prefix:
                return f"lists {one.prefix!r:.100} with the commit of {commit.attempt!r:.100}"
            if fault := _ballot_fault(commit):
                return fault
            named.update(commit.holders)
        elif one.status == "checkpoint":
            return f"lists {one.prefix!r:.100} as a checkpoint without its commit"
        if one.abort is not None:
            named.add(one.abort.attempt)
        if one.removal is not None:
            named.update(one.removal.attempts)
        if one.base:
            named.add(one.base)
    heads = set(state.heads.values())
    if fault := _foreign(chain(listed, (named | heads) - listed, *(begin.spared for begin in state.begins))):
        return fault
    wrong = heads - {one.prefix for one in state.attempts if one.status == "checkpoint"}
    return f"names {min(wrong)!r:.100} as a training's newest, which is no checkpoint" if wrong else None


def _foreign(names: Iterable[str]) -> str | None:
    """Says which of `names` is not that of an attempt."""
    found = next(filterfalse(_ATTEMPT.match, names), None)
    return None if found is None else f"names {found!r:.100}, which is no attempt"
