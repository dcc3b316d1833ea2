"""Repeats at a mirror how its origin was rolled back, so that readers of both take the same checkpoint.

What a save leaves behind needs no copy, since its commit says it.
"""

from __future__ import annotations

from collections.abc import Iterator

from checkpointd.commit.branches import training
from checkpointd.commit.log import apply, check
from checkpointd.layout.log_records import LogState, RollbackRecord
from checkpointd.pipeline.identity import writer


def rollbacks(theirs: LogState, ours: LogState) -> list[RollbackRecord]:
    """The records after which no checkpoint of the mirror is left behind that is not at the origin, or the other way round, as
    far as the mirror has the checkpoints from which training goes on.
    """
    found = list[RollbackRecord]()
    for own in {training(commit) for name in _unlike(theirs, ours) if (commit := ours.attempts[name].committed) is not None}:
        record = RollbackRecord(attempt=theirs.heads.get(own, ""), writer=writer())
        if check(ours, record):
            continue  # it is not there yet, or not any more
        after = apply(ours, record)
        if len([*_unlike(theirs, after)]) < len([*_unlike(theirs, ours)]):
            found.append(record)
            ours = after
    return found


def _unlike(theirs: LogState, ours: LogState) -> Iterator[str]:
    for name, one in ours.attempts.items():
        there = theirs.attempts.get(name)
        if one.status == "checkpoint" and there is not None and there.left_behind != one.left_behind:
            yield name
