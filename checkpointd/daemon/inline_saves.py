"""Counts inline saves: as their trainers report them, or else as their votes do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from checkpointd.daemon.hub import Hub, RankRecord
from checkpointd.daemon.jobs import JobKey
from checkpointd.daemon.process.logs import escaped
from checkpointd.daemon.protocol.wire import Inlined
from checkpointd.daemon.status.model import SaveStatus
from checkpointd.daemon.status.tally import RESULTS
from checkpointd.errors import ERRORS, CheckpointdError, DamagedError, NotFoundError, UnreadableError, UsageError
from checkpointd.layout.keys import AttemptId, check_tag
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import ErrorReport, Inline, Vote
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.identity import seconds_of
from checkpointd.pipeline.root.ballots import vote_of
from checkpointd.store.base import Store

WHY_MAX = 500
"""Characters of a reason or an error that are kept."""
PHASE_MAX = 40
"""Characters of an error's phase that are kept."""
VOTES_MAX = 64
"""Votes that are read for one commit, to find inline saves."""


def told(record: RankRecord, nonce: str, uid: int, message: Inlined) -> tuple[JobKey, SaveStatus]:
    """The inline save that a trainer of user `uid` reports. UsageError for an impossible report."""
    attempt, now = AttemptId.parse(message.attempt), time.time()
    began_at, ended_at = now - message.began_s, now - message.ended_s
    if attempt is None or message.phase not in RESULTS:
        raise UsageError(f"{message.attempt!r} is not an attempt, or a save cannot end as {message.phase!r}")
    staged_at, voted_at = _times(began_at, message.seconds, ended_at)
    save = SaveStatus(
        tag=check_tag(message.tag),
        attempt=str(attempt),
        step=message.step,
        rank=record.rank,
        phase=message.phase,
        raw_total=message.raw_total,
        raw_done=message.raw_total if message.phase == "committed" else 0,
        stored=message.stored,
        error=message.error and _short(message.error),
        began_at=began_at,
        staged_at=staged_at,
        persisting_at=staged_at,
        voted_at=voted_at,
        ended_at=ended_at,
        no_progress=message.no_progress,
        seconds=message.seconds,
        inline=Inline(reason=message.inline.reason, why=escaped(message.inline.why, WHY_MAX)),
    )
    return (record.root, nonce, uid, save.tag, save.attempt, save.rank), save


def _times(began_at: float, seconds: PhaseSeconds, ended_at: float) -> tuple[float | None, float | None]:
    """When the snapshot of an inline save was whole, and when its rank voted, by what its trainer measured."""
    if seconds.staging is None:
        return None, None
    staged_at = min(began_at + seconds.staging, ended_at)
    return staged_at, None if seconds.persisting is None else min(staged_at + seconds.persisting, ended_at)


def _short(error: ErrorReport) -> ErrorReport:
    """Thousands of these are kept, and no account is charged for them."""
    code = error.code if error.code in ERRORS else CheckpointdError.__name__
    return ErrorReport(code=code, message=escaped(error.message, WHY_MAX), phase=escaped(error.phase, PHASE_MAX))


async def find(hub: Hub, root: str, store: Store, fresh: Iterable[LoggedAttempt]) -> None:
    """Count the inline saves that nobody reported: read the votes of this node's ranks for the commits in `fresh`.

    Only commits since the daemon began count. A vote that cannot be read is left out.
    """
    for one in fresh:
        commit = one.committed
        decided_at = None if commit is None else seconds_of(commit.writer.time)
        if commit is None or decided_at is None or decided_at < hub.started_at:
            continue
        for record in hub.ranks_at(root)[:VOTES_MAX]:
            start, nonce = record.begun
            uid = os.geteuid() if record.user is None else record.user.uid
            key: JobKey = (root, nonce, uid, one.tag, str(one.id), record.rank)
            if start != one.id.start or record.rank >= commit.world_size or hub.is_counted(key):
                continue
            try:
                vote = await vote_of(store, commit, record.rank)
            except (DamagedError, NotFoundError, UnreadableError):
                continue
            if vote.inline is not None and not hub.is_counted(key):  # its trainer may have reported it meanwhile
                hub.inlined(key, _voted(vote, one, commit, decided_at), held_s=vote.held_s)


def _voted(vote: Vote, one: LoggedAttempt, commit: CommitRecord, decided_at: float) -> SaveStatus:
    """A committed inline save, by its vote and commit."""
    assert vote.inline is not None
    began_at = decided_at - (commit.cost.took_s if commit.cost is not None else 0.0)
    staged_at, voted_at = _times(began_at, vote.seconds, decided_at)
    return SaveStatus(
        tag=one.tag,
        attempt=str(one.id),
        step=vote.step,
        rank=vote.rank,
        phase="committed",
        raw_total=vote.raw_bytes,
        raw_done=vote.raw_bytes,
        stored=vote.stored_bytes,
        began_at=began_at,
        staged_at=staged_at,
        persisting_at=staged_at,
        voted_at=voted_at or seconds_of(vote.writer.time),
        ended_at=decided_at,
        no_progress=commit.no_progress,
        seconds=vote.seconds,
        inline=Inline(reason=vote.inline.reason, why=escaped(vote.inline.why, WHY_MAX)),
    )
