"""What a root holds, for the status: its newest checkpoints, `latest`, and the attempts that nobody has decided yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from checkpointd.daemon.hub import Look
from checkpointd.daemon.status import CheckpointStatus
from checkpointd.errors import DamagedError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import AttemptView, Checkpoint, ReadBackState
from checkpointd.store.base import Store

CHECKPOINTS_MAX = 20


@dataclass(slots=True)
class Looker:
    """Looks at one root again and again. An outcome is read once, since it never changes; what is shown is listed each time."""

    _decided: dict[str, AttemptView] = field(default_factory=dict)

    async def look(self, store: Store) -> tuple[Look, list[AttemptView]]:
        """How the root stands, and its attempts in doubt. Raises StoreError where the storage fails."""
        attempts = await catalog.scan(store, self._decided)
        self._decided.clear()
        for view in attempts:
            self._keep(view)
        newest = catalog.checkpoints_of(attempts)[:CHECKPOINTS_MAX]
        for checkpoint in newest:  # one of them may have been removed, or read back, since its outcome was read
            self._keep(await catalog.view(store, checkpoint.tag, checkpoint.attempt))
        found = catalog.checkpoints_of(list(self._decided.values()))[:CHECKPOINTS_MAX]
        shown = [(checkpoint, self._decided[checkpoint.prefix].read_back) for checkpoint in found]
        return await _look(store, shown), [a for a in attempts if a.state == "in-doubt" and a.sizes]

    def _keep(self, view: AttemptView) -> None:
        """Remember what cannot change any more."""
        self._decided.pop(view.prefix, None)
        if view.state in ("committed", "aborted", "deleted"):
            self._decided[view.prefix] = view


async def _look(store: Store, newest: list[tuple[Checkpoint, ReadBackState]]) -> Look:
    problem = None
    try:
        latest = await catalog.latest(store)
    except DamagedError as error:
        latest, problem = None, ErrorReport(code=error.code, message=str(error))
    return Look(
        latest=latest,
        newest_step=newest[0][0].outcome.step if newest else None,
        newest_committed_at=_seconds(newest[0][0].outcome.writer.time) if newest else None,
        checkpoints=tuple(_status(checkpoint, latest, read_back) for checkpoint, read_back in newest),
        problem=problem,
    )


def _status(checkpoint: Checkpoint, latest: str | None, read_back: ReadBackState) -> CheckpointStatus:
    outcome = checkpoint.outcome
    return CheckpointStatus(
        tag=checkpoint.tag,
        attempt=str(checkpoint.attempt),
        step=outcome.step,
        world_size=outcome.world_size,
        order=outcome.order,
        committed_at=outcome.writer.time,
        is_latest=checkpoint.tag == latest,
        read_back=read_back,
    )


def _seconds(time: str) -> float | None:
    """An ISO 8601 time as seconds since 1970; None where somebody wrote something else."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None
