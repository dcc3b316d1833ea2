"""Records, and random histories of valid ones, for tests of a root's log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from checkpointd.commit.log import check, check_all, following
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import (
    AbortRecord,
    AnnounceRecord,
    BeginRecord,
    CommitRecord,
    DamageRecord,
    HoldRecord,
    LogEntry,
    LogState,
    PassOverRecord,
    Record,
    RemoveRecord,
    RollbackRecord,
    SweepRecord,
    VerifyRecord,
)
from checkpointd.layout.manifest import BallotRef, ErrorReport, JointPlanRef, WriterIdentity
from checkpointd.layout.save_timings import Cost

WRITER = WriterIdentity(host="node-1", pid=77, time="2026-11-28T12:00:00Z")
BALLOT = BallotRef(digest="ab" * 16, size=4096)


def _n(attempt: str) -> int:
    """The number of the save: here that of the attempt; 0 if `attempt` is the name of none."""
    found = AttemptId.parse(attempt.rpartition("/")[2])
    return 0 if found is None else found.k


def nonce(number: int) -> str:
    return f"{number:032x}"


def begin(start: int, *spared: str, origin: str = "", **options: Any) -> BeginRecord:
    return BeginRecord(start=start, nonce=nonce(start), world_size=2, spared=spared, origin=origin, writer=WRITER, **options)


def announce(attempt: str, *, base: str = "", step: int = 10) -> AnnounceRecord:
    return AnnounceRecord(attempt=attempt, n=_n(attempt), step=step, base=base)


def commit(attempt: str, **options: Any) -> CommitRecord:
    return CommitRecord(
        attempt=attempt,
        **{"n": _n(attempt), "step": 10, "world_size": 2, "ballot": BALLOT, "decided_by": 0, **options},
        writer=WRITER,
    )


def abort(attempt: str, message: str = "rank 1 failed") -> AbortRecord:
    return AbortRecord(
        attempt=attempt, error=ErrorReport(code="AbortedError", message=message), ranks=(1,), decided_by=0, writer=WRITER
    )


def remove(*attempts: str, start: int = 0) -> RemoveRecord:
    return RemoveRecord(attempts=attempts, reason="retention", start=start, user="" if start else "alice (1000)", writer=WRITER)


def swept(*attempts: str) -> SweepRecord:
    return SweepRecord(attempts=attempts)


def verified(attempt: str) -> VerifyRecord:
    return VerifyRecord(attempt=attempt, nbytes=1 << 30)


def damaged(attempt: str, why: str = "chunk 3 has another digest") -> DamageRecord:
    return DamageRecord(attempt=attempt, why=why)


def passed_over(attempt: str, why: str = "chunk 3 has another digest") -> PassOverRecord:
    return PassOverRecord(attempt=attempt, why=why)


def rollback(attempt: str) -> RollbackRecord:
    return RollbackRecord(attempt=attempt, user="alice (1000)", writer=WRITER)


def hold(attempt: str) -> HoldRecord:
    return HoldRecord(attempt=attempt)


def saved(attempt: str, **options: Any) -> tuple[Record, Record]:
    """An attempt that is announced and commits."""
    base = options.pop("base", "")
    return announce(attempt, base=base, step=options.get("step", 10)), commit(attempt, **options)


def entry(state: LogState, *records: Record, tag: str = "") -> LogEntry:
    """The entry after `state`. `tag`, hexadecimal digits, tells it from another one of the same number."""
    number = state.number + 1
    return LogEntry(number=number, nonce=f"{nonce(number)}{tag}", before=state.nonce, records=records)


def after(state: LogState, *entries: Record | Iterable[Record]) -> LogState:
    """The state after an entry for each of `entries`, all of which must be valid."""
    for records in entries:
        own = (records,) if isinstance(records, Record) else tuple(records)
        state = following(state, [_valid_entry(state, own)])
    return state


def _valid_entry(state: LogState, records: Sequence[Record]) -> LogEntry:
    refused = check_all(state, records)
    assert not refused, refused
    return entry(state, *records)


# --- random histories -------------------------------------------------------------------------------------------------

_KINDS = [
    "begin",
    "announce",
    "announce",
    "announce",
    "commit",
    "commit",
    "commit",
    "abort",
    "remove",
    "remove",
    "swept",
    "swept",
]
_KINDS += ["verified", "damaged", "passed-over", "rollback", "hold", "late", "mirror"]

Move = tuple[str, int, int]
moves = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 7), st.integers(0, 7)), min_size=30, max_size=120)
TRAININGS = ("", "runs/a/one", "runs/b/one")
"""What `shown_at` says in the commits of three trainings."""


def record_of(state: LogState, move: Move) -> Record | None:
    """The record that `move` means in `state`; None if there is none that is valid."""
    record = _record_of(state, *move)
    return None if record is None or check(state, record) else record


def _record_of(state: LogState, kind: str, one: int, other: int) -> Record | None:
    undecided, checkpoints, gone = (
        [name for name, known in state.attempts.items() if known.status in statuses]
        for statuses in (["undecided"], ["checkpoint"], ["aborted", "removed"])
    )

    def chosen(names: Sequence[str], number: int = one) -> str:
        return names[-1 - number % len(names)] if names else ""

    match kind:
        case "begin" | "mirror":
            waiting = f"spooled{other}/{max(1, state.start):08d}-{90 + other}"
            spared = [*undecided[: one % 3], *([waiting] if other % 2 and state.start else [])]
            return begin(state.start + 1 + other % 2, *spared, origin="file:///origin" if kind == "mirror" else "")
        case "announce":
            used = [last for ranges in [state.used.get(state.start, ())] for _, last in ranges]
            name = f"tag{one}/{state.start:08d}-{max(used, default=-1) + 1 + other // 6}"
            return announce(name, base=chosen(checkpoints, other) if other % 3 else "")
        case "late":  # what was spared and not announced, or comes to a mirror from its origin
            spared = [] if state.begin is None else list(state.begin.spared)
            return announce(chosen([*spared, f"tag{one}/{max(1, state.start - 1):08d}-{other}"], other))
        case "commit" if undecided:
            return _commit_of(state, chosen(undecided), checkpoints, other)
        case "abort" if undecided:
            return abort(chosen(undecided))
        case "remove" if checkpoints:
            return remove(*{chosen(checkpoints), chosen(checkpoints, other)}, start=state.start if other % 2 else 0)
        case "swept" if gone:
            return swept(*{chosen(gone), chosen(gone, other)})
        case "verified" if checkpoints:
            return verified(chosen(checkpoints))
        case "damaged" if checkpoints:
            return damaged(chosen(checkpoints), "" if other == 0 else "a chunk is missing")
        case "passed-over" if checkpoints:
            return passed_over(chosen(checkpoints))
        case "rollback" if checkpoints:
            return rollback(chosen(checkpoints))
        case "hold":
            return hold(f"held{one}/{max(1, state.start):08d}-{50 + other}")
    return None


def _commit_of(state: LogState, attempt: str, checkpoints: Sequence[str], other: int) -> CommitRecord:
    known = state.attempts[attempt]
    base = state.attempts.get(known.base)
    holders = sorted({known.base, *base.holders}) if base is not None and other % 2 else []
    left = ()
    if other > 4 and checkpoints:
        from_one = state.attempts[checkpoints[other % len(checkpoints)]].id
        if from_one < known.id:
            left = (((from_one.start, from_one.k), (known.id.start, known.id.k)),)
    return commit(
        attempt,
        holders=tuple(holders),
        left=left,
        shown_at=TRAININGS[other % 3] and f"{TRAININGS[other % 3]}/{attempt.replace('/', '-')}",
        metrics={"loss": other / 8},
        cost=Cost(took_s=1.5, raw_bytes=1 << 30) if other % 2 else None,
        plan=JointPlanRef(digest="cd" * 16, size=77) if other % 4 == 0 else None,
    )


def history(chosen: Iterable[Move]) -> list[Record]:
    """Records that are valid one after the other, each in an entry of its own; the first begins start 1."""
    state, found = LogState(), list[Record]()
    for move in [("begin", 0, 0), *chosen]:
        record = record_of(state, move)
        if record is not None:
            found.append(record)
            state = following(state, [entry(state, record)])
    return found


histories = moves.map(history)
