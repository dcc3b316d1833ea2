"""A root scan for the status: the newest checkpoints, `latest`, and undecided attempts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from checkpointd.daemon.hub import RootScan
from checkpointd.daemon.status.history import RootHistory, SpaceSample
from checkpointd.daemon.status.model import CheckpointStatus
from checkpointd.errors import DamagedError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.identity import seconds_of
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.root_view import AttemptView, Checkpoint, ReadBackState
from checkpointd.store.base import Store

CHECKPOINTS_MAX = 20


@dataclass(slots=True)
class RootScanner:
    """Scans one root again and again, and reads only what is new in its log."""

    _decided: set[str] = field(default_factory=set)
    _history: RootHistory = field(default_factory=RootHistory)
    fresh: list[AttemptView] = field(default_factory=list)
    """Attempts seen decided for the first time, until the caller clears the list."""

    async def look(self, store: Store, room: SpaceSample | None = None) -> tuple[RootScan, list[AttemptView]]:
        """A scan of the root, and its attempts in doubt. StoreError if the storage fails.

        `room`: the free space of its file system now, if known.
        """
        attempts = await root_view.scan(store)
        fresh = [view for view in attempts if view.state != "in-doubt" and view.prefix not in self._decided]
        self.fresh += fresh
        self._history.decided(view.logged for view in fresh)
        if room is not None:
            self._history.measured(room)
        self._decided = {view.prefix for view in attempts if view.state != "in-doubt"}
        shown = [(checkpoint, checkpoint.read_back) for checkpoint in root_view.checkpoints_of(attempts)[:CHECKPOINTS_MAX]]
        look = replace(await _look(store, shown), history=self._history.saves(), space=self._history.space())
        return look, [a for a in attempts if a.state == "in-doubt" and a.sizes]


async def _look(store: Store, newest: list[tuple[Checkpoint, ReadBackState]]) -> RootScan:
    problem = None
    try:
        latest = await root_view.latest(store)
    except DamagedError as error:
        latest, problem = None, ErrorReport.of(error)
    return RootScan(
        latest=latest,
        newest_step=newest[0][0].commit.step if newest else None,
        newest_committed_at=seconds_of(newest[0][0].commit.writer.time) if newest else None,
        checkpoints=tuple(_status(checkpoint, latest, read_back) for checkpoint, read_back in newest),
        problem=problem,
    )


def _status(checkpoint: Checkpoint, latest: str | None, read_back: ReadBackState) -> CheckpointStatus:
    commit = checkpoint.commit
    return CheckpointStatus(
        tag=checkpoint.tag,
        attempt=str(checkpoint.attempt),
        step=commit.step,
        world_size=commit.world_size,
        order=commit.order,
        committed_at=seconds_of(commit.writer.time),
        is_latest=checkpoint.tag == latest,
        read_back=read_back,
    )
