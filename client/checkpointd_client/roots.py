"""Lists the checkpoints at a root, and goes back to an older one: for processes outside the job that saves there."""

from __future__ import annotations

import logging
import math
import os
from typing import get_args

from checkpointd import arguments
from checkpointd.admin import rollback as admin
from checkpointd.admin.rollback import RollbackReport
from checkpointd.arguments import shown
from checkpointd.bucket_urls import directory_of
from checkpointd.commit.retention import Mode
from checkpointd.errors import NotFoundError, UsageError
from checkpointd.other_formats import of_others
from checkpointd.pipeline.identity import seconds_of
from checkpointd.report.listing import AttemptRow, listing
from checkpointd_client.export.consolidate import Root, run_on_store
from checkpointd_client.lifetime import claim_root
from checkpointd_client.saves.status import CheckpointInfo

log = logging.getLogger("checkpointd")


def list_checkpoints(root: str | os.PathLike[str], *, best_by: str | None = None, mode: Mode = "min") -> list[CheckpointInfo]:
    """The checkpoints at `root`, newest first, also while a job saves there. It disturbs no job and writes nothing.

    `best_by`: the name of a metric that save() was given. Then only whole checkpoints with this metric, the best first: the
    smallest value, or with `mode="max"` the largest. `list_checkpoints(root, best_by="loss")[0].tag` is what to open.

    Raises NotFoundError if there is no root, UsageError for bad arguments, StoreError if it cannot be read.
    """
    arguments.path("root", root)
    arguments.choice("mode", mode, get_args(Mode))
    metric: object = best_by
    if metric is not None and not (isinstance(metric, str) and metric):
        raise UsageError(f"best_by is {shown(best_by)}; it must be the name of a metric that save(metrics=...) was given")
    place = directory_of(os.fspath(root))
    if place is not None and not os.path.isdir(place):
        raise NotFoundError(f"there is no directory {place}: {of_others(place) or 'give the root that the job was given'}")
    rows = run_on_store(root, listing, read_only=True).rows
    if not rows and place is not None and (other := of_others(place)) is not None:
        raise NotFoundError(f"there is no checkpoint at {place}: {other}")
    for row in rows:
        if row.step is None:
            log.error("%s/%s is left out of the list, and may be newer than what is in it: %s", row.tag, row.attempt, row.why)
    found = [_described(row) for row in rows if row.step is not None]
    if best_by is None:
        return found
    sign = -1.0 if mode == "max" else 1.0
    with_it = [one for one in found if one.whole and not math.isnan(one.metrics.get(best_by, math.nan))]
    return sorted(with_it, key=lambda one: sign * one.metrics[best_by])


def _described(row: AttemptRow) -> CheckpointInfo:
    assert row.step is not None  # list_checkpoints looked
    return CheckpointInfo(
        tag=row.tag,
        step=row.step,
        committed_at=None if row.time is None else seconds_of(row.time),
        nbytes=row.raw_bytes,
        metrics=dict(row.metrics),
        read_back=row.read_back,
        problem=row.why,
    )


def rollback(root: Root, tag: str, *, attempt: str | None = None, take_over: bool = False) -> RollbackReport:
    """Go back to the checkpoint `tag`: the next start of the job loads it, and so do readers.

    The checkpoints after it stay, and are left behind: no load takes them unless it names them, not even if `tag` is damaged.
    To undo this, go back to one of them. A job that runs goes back by itself: `load(state, tag=...)`, and then the next save.

    `attempt`: which one, as in `checkpointd list --all`, if two branches have saved the tag.

    Raises NotFoundError if there is no such checkpoint, DamagedError if it is recorded as damaged, RootInUseError if a job or a
    daemon is at work at the root (with `take_over` all later saves of that job fail), UsageError if a Checkpointer of this
    process is open there, StoreError.
    """
    arguments.path("root", root)
    arguments.flag("take_over", take_over)
    give_back = claim_root(root)
    try:
        return run_on_store(root, lambda store: admin.rollback(store, tag, attempt=attempt, take_over=take_over))
    finally:
        give_back()
