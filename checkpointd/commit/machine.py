"""One rank's side of an attempt: a table from (phase, event) to the next phase.

Invariants
  PHASE-1  The phase only moves forward; `committed`, `aborted`, `failed` and `skipped` are final.
  PHASE-2  A rank votes once: yes only from `persisting` or `uploading`, no only when it enters `failing` or `skipping`. If
      storing the yes vote fails, the vote may still exist. Then the rank counts as prepared, and asks for an abort. A rank that
      uploads from its spool stores the same vote again instead.
  PHASE-3  A rank enters `committed` only when it has seen the commit in the log.
  PHASE-4  A rank that voted no, or never voted, never sees a commit. If it does, somebody forged a vote or overwrote an object,
      and `step` raises ProtocolError.
  PHASE-5  A process that goes on for a lost one may find that the yes of its rank stands. The event `yes vote found` is fired
      only then, after that vote, or a commit that counts it, was read.
"""

from __future__ import annotations

from enum import StrEnum

from checkpointd.errors import FencedError, ProtocolError, SupersededError


class Phase(StrEnum):
    STAGING = "staging"
    STAGED = "staged"
    PERSISTING = "persisting"
    SPOOLED = "spooled"
    UPLOADING = "uploading"
    PREPARED = "prepared"
    FAILING = "failing"
    SKIPPING = "skipping"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FAILED = "failed"
    SKIPPED = "skipped"


class Event(StrEnum):
    SNAPSHOT_TAKEN = "snapshot taken"
    SNAPSHOT_FAILED = "snapshot failed"
    SKIP = "skip asked for"
    PERSIST_STARTED = "persist started"
    SPOOLED = "durable in the spool"
    UPLOAD_STARTED = "upload started"
    VOTED_YES = "yes vote put"
    VOTE_UNCERTAIN = "yes vote uncertain"
    SHARD_FAILED = "shard failed"
    YES_FOUND = "yes vote found"
    DEADLINE = "deadline passed"
    SAW_COMMIT = "commit seen"
    SAW_ABORT = "abort seen"
    LOG_LOST = "log out of reach"


FINAL = frozenset({Phase.COMMITTED, Phase.ABORTED, Phase.FAILED, Phase.SKIPPED})
FENCED = "fenced"
"""The word for a save that did not commit because there is a newer start. The metrics use the same word."""
SUPERSEDED = "superseded"
"""The word for a save that was dropped from a spool in favour of a newer one."""
_SHOWN = {Phase.FAILING: "failed", Phase.SKIPPING: "skipped"}
ORDER = (
    Phase.STAGING,
    Phase.STAGED,
    Phase.PERSISTING,
    Phase.SPOOLED,
    Phase.UPLOADING,
    Phase.PREPARED,
    Phase.COMMITTED,
)
IN_SPOOL = frozenset({Phase.SPOOLED, Phase.UPLOADING})
"""The phases in which the shard is durable on this node's disk, and not yet at the root."""

TABLE: dict[tuple[Phase, Event], Phase] = {
    (Phase.STAGING, Event.SNAPSHOT_TAKEN): Phase.STAGED,
    (Phase.STAGING, Event.SNAPSHOT_FAILED): Phase.FAILING,
    (Phase.STAGING, Event.SKIP): Phase.SKIPPING,
    (Phase.STAGED, Event.PERSIST_STARTED): Phase.PERSISTING,
    (Phase.STAGED, Event.SHARD_FAILED): Phase.FAILING,
    (Phase.PERSISTING, Event.VOTED_YES): Phase.PREPARED,
    (Phase.PERSISTING, Event.VOTE_UNCERTAIN): Phase.PREPARED,
    (Phase.PERSISTING, Event.SHARD_FAILED): Phase.FAILING,
    (Phase.PERSISTING, Event.SPOOLED): Phase.SPOOLED,
    (Phase.SPOOLED, Event.UPLOAD_STARTED): Phase.UPLOADING,
    (Phase.SPOOLED, Event.SHARD_FAILED): Phase.FAILING,
    (Phase.UPLOADING, Event.SHARD_FAILED): Phase.FAILING,
    (Phase.UPLOADING, Event.VOTED_YES): Phase.PREPARED,
    (Phase.PREPARED, Event.SAW_COMMIT): Phase.COMMITTED,
    (Phase.FAILING, Event.SAW_ABORT): Phase.FAILED,
    (Phase.FAILING, Event.LOG_LOST): Phase.FAILED,
    (Phase.SKIPPING, Event.SAW_ABORT): Phase.SKIPPED,
    (Phase.SKIPPING, Event.LOG_LOST): Phase.SKIPPED,
    (Phase.STAGING, Event.YES_FOUND): Phase.PREPARED,
    (Phase.SPOOLED, Event.YES_FOUND): Phase.PREPARED,
    (Phase.UPLOADING, Event.YES_FOUND): Phase.PREPARED,
    (Phase.FAILING, Event.YES_FOUND): Phase.PREPARED,
    (Phase.FAILING, Event.DEADLINE): Phase.FAILING,
    (Phase.SKIPPING, Event.DEADLINE): Phase.SKIPPING,
}
for _phase in ORDER[:6]:
    TABLE[(_phase, Event.SAW_ABORT)] = Phase.ABORTED
    TABLE[(_phase, Event.DEADLINE)] = _phase
    TABLE[(_phase, Event.LOG_LOST)] = Phase.FAILED


def step(phase: Phase, event: Event) -> Phase:
    """The next phase; ProtocolError if the transition is not in the table."""
    try:
        return TABLE[(phase, event)]
    except KeyError:
        raise ProtocolError(
            f"{event} while {phase}: this cannot happen while every writer follows the protocol; "
            "keep the root as it is, and report this with the logs of all ranks"
        ) from None


def shown(phase: Phase, error: str = "") -> str:
    """The word for `phase` that people read. `error` names the class of the save's error, if it has one."""
    if error == FencedError.__name__ and phase is not Phase.COMMITTED:
        return FENCED
    if error == SupersededError.__name__ and phase is not Phase.COMMITTED:
        return SUPERSEDED
    return _SHOWN.get(phase, str(phase))


def reached(phase: Phase, until: Phase) -> bool:
    """Whether an attempt in `phase` has passed `until`, one of ORDER."""
    return phase in ORDER and ORDER.index(phase) >= ORDER.index(until)
