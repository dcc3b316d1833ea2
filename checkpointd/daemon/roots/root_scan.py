"""A root scan for the status: the newest checkpoints, `latest`, and undecided attempts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from checkpointd.daemon.hub import RootScan
from checkpointd.daemon.status.history import RootHistory, SpaceSample
from checkpointd.daemon.status.model import CheckpointStatus
from checkpointd.errors import DamagedError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.identity import seconds_of
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store

CHECKPOINTS_MAX = 20


@dataclass(slots=True)
class RootScanner:
    """Scans one root again and again, and reads only what is new in its log."""

    _decided: set[str] = field(default_factory=set)
    _history: RootHistory = field(default_factory=RootHistory)
    fresh: list[LoggedAttempt] = field(default_factory=list)
    """Attempts seen decided for the first time, until the caller clears the list."""

    async def look(self, store: Store, room: SpaceSample | None = None) -> tuple[RootScan, list[LoggedAttempt]]:
        """A scan of the root, and its undecided attempts. StoreError if the storage fails.

        `room`: the free space of its file system now, if known.
        """
        attempts = (await root_view.state_of(store)).attempts.values()
        decided = [one for one in attempts if one.status != "undecided"]
        fresh = [one for one in decided if one.prefix not in self._decided]
        self.fresh += fresh
        self._history.decided(fresh)
        if room is not None:
            self._history.measured(room)
        self._decided = {one.prefix for one in decided}
        look = await _look(store, root_view.checkpoints_of(decided)[:CHECKPOINTS_MAX])
        look = replace(look, history=self._history.saves(), space=self._history.space())
        return look, [one for one in attempts if one.status == "undecided"]


async def _look(store: Store, newest: list[LoggedAttempt]) -> RootScan:
    problem = None
    try:
        latest = await root_view.latest(store)
    except DamagedError as error:
        latest, problem = None, ErrorReport.of(error)
    return RootScan(
        latest=latest,
        newest_step=newest[0].commit.step if newest else None,
        newest_committed_at=seconds_of(newest[0].commit.writer.time) if newest else None,
        checkpoints=tuple(_status(checkpoint, latest) for checkpoint in newest),
        problem=problem,
    )


def _status(checkpoint: LoggedAttempt, latest: str | None) -> CheckpointStatus:
    commit = checkpoint.commit
    return CheckpointStatus(
        tag=checkpoint.tag,
        attempt=str(checkpoint.id),
        step=commit.step,
        world_size=commit.world_size,
        order=commit.order,
        committed_at=seconds_of(commit.writer.time),
        is_latest=checkpoint.tag == latest,
        read_back=checkpoint.read_back,
    )
