"""A mirror as this process holds it: with a start and a lease of its own, so that others notice it.

A job that begins at the mirror, or another process that mirrors, is refused while this one lives. If it begins all the same, it
takes the next start, and this fences the one before it, as it fences a job.

The start of a mirror is newer than all starts of its origin, whose attempts are then announced as those of older starts. When
the origin has a newer start, the mirror begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from checkpointd.commands import command
from checkpointd.config import JOB_CHARACTERS_MAX
from checkpointd.errors import FencedError, UnreadableError
from checkpointd.layout.keys import MIRRORS
from checkpointd.layout.log_records import BeginRecord, LogState
from checkpointd.mirror.provenance import Side
from checkpointd.pipeline.outcome.starting import begin
from checkpointd.pipeline.root.leases import Beginner, HeldLease
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.starts import is_taken
from checkpointd.pipeline.root_id import OwnId
from checkpointd.store.base import Store
from checkpointd.store.conditions import check_conditions_of

log = logging.getLogger("checkpointd")

NO_RANKS = 0
"""The world size of a start in which no job runs."""


@dataclass(slots=True, weakref_slot=True)
class Hold:
    """A start of this process at the mirror."""

    store: Store
    start: BeginRecord
    lease: HeldLease
    root: OwnId = field(init=False)

    def __post_init__(self) -> None:
        self.root = OwnId(self.store)
        RootLog.of(self.store).belongs_to(self._is_here)

    async def _is_here(self) -> bool:
        await self.root.check()
        return True

    async def check(self) -> LogState:
        """The state of the mirror. Raises FencedError if there is a newer start, RootGoneError if the path leads to another
        root, and UnreadableError if the log cannot be read to its end.
        """
        await self.root.check()
        root_log = RootLog.of(self.store)
        state = await root_log.look()
        if root_log.fault:
            raise UnreadableError(root_log.unreadable)
        if self.holds(state):
            return state
        if state.begin is None or not is_taken(state, self.start.start, self.start.nonce):
            raise self.root.gone("its log does not have the start of this process")
        who = state.begin.writer
        raise FencedError(
            f"{self.store.url} has another holder: start {state.start}, of process {who.pid} on {who.host} at {who.time}. "
            "This process copies nothing more there"
        )

    def holds(self, state: LogState) -> bool:
        """Whether the newest start in `state` is that of this process."""
        return state.begin is not None and state.begin.nonce == self.start.nonce

    async def release(self) -> None:
        """Let others begin there without a wait. Raises nothing."""
        RootLog.of(self.store).belongs_to(None)
        await self.lease.release()


async def hold(store: Store, origin: Side, admits: Callable[[LogState], None]) -> Hold:
    """Start at the mirror `store` of `origin`, unless `admits` raises for the state before.

    Raises RootInUseError if a job, or another process that mirrors, is alive there, and ConditionsIgnoredError.
    """
    beginner = Beginner(
        world_size=NO_RANKS,
        job=f"{MIRRORS}{origin.url}"[:JOB_CHARACTERS_MAX],
        alone=True,
        origin=origin.id,
        origin_begin=origin.begin,
        admits=admits,
        instead=(
            "If it mirrors, too, let one of the two go on. If it is a job, mirror to another root; "
            f"{command('status', store.url)} shows what runs there"
        ),
    )
    await check_conditions_of(store, new=False)
    taken = await begin(store, beginner)
    return Hold(store, taken.start, taken.lease)
