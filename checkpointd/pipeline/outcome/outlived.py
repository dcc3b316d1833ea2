"""Waits for attempts that have outlived their trainer in a daemon, and decides those at which nobody works any more.

Invariants
  OUTLIVED-1  An attempt is decided only if nobody works at it, as far as others can tell: nobody renews its lease, it does not
      wait in the caller's spool, where it has no lease (SAVEJOB-5 in `jobs.py`), and if the caller has time, none of its
      objects has changed for as long as a lease lasts. A large object may look the same while it is written, so a node that
      writes longer at one, after the coordinator's node died, may lose this save. A commit is never lost, since the first
      outcome counts.
  OUTLIVED-2  A process that has tried to decide an attempt acts on what the log has: `latest` names the newest checkpoint, and
      the files of a commit are shown.
  OUTLIVED-3  A caller that has time tries `latest` and the files again until they work. One that hurries, since a load waits,
      tries them once: the load shows the files itself, and the next commit or start moves `latest`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.layout.keys import attempt_lease_key, vote_name
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.outcome.publish import append
from checkpointd.pipeline.outcome.recover import judge, say
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.leases import Sight, Watch
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import show
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

VOTES_S = 15.0
"""How long to wait for other nodes' votes after the coordinator's vote. A node that died with its daemon never votes."""
_PAUSE_S, _PAUSE_S_MAX, _RETRY_S_MAX = 0.1, 1.0, 10.0


async def anyhow() -> None:
    """Check nothing."""


async def outlived(
    store: Store,
    surviving: Collection[str],
    timeout_s: float,
    sight: Sight | None = None,
    *,
    hurried: bool = True,
    spooled: Collection[str] = (),
    check: Callable[[], Awaitable[None]] = anyhow,
) -> tuple[str, ...]:
    """Wait until the attempts `surviving`, at which daemons work, are decided. Returns those that are not.

    Waits at most `timeout_s`. Decides an attempt if nobody works at it any more (OUTLIVED-1), after `check`, which raises if
    nothing may be written. If `hurried`, this waits at most VOTES_S after the coordinator's vote, and takes an attempt without
    a lease for one at which nobody works, unless it is one of the `spooled`, whose coordinator's shard waits in a spool.
    Errors of checkpointd are logged, and leave the attempt undecided.
    """
    looker = sight or Sight()
    waits = [_Waiting(store, prefix, looker, hurried, prefix in spooled, check) for prefix in surviving]
    async with asyncio.TaskGroup() as group:
        found = [group.create_task(one.decided_within(timeout_s)) for one in waits]
    return tuple(one.prefix for one, decided in zip(waits, found, strict=True) if not decided.result())


@dataclass(slots=True)
class _Waiting:
    """Waits for one attempt."""

    store: Store
    prefix: str
    sight: Sight
    hurried: bool
    is_spooled: bool
    check: Callable[[], Awaitable[None]]
    _watch: Watch = field(init=False)
    _has_tried: bool = False
    """Whether this process has tried to decide it."""
    _decided: LoggedAttempt | None = None
    """The attempt once it is decided, if this process has tried to decide it."""
    _sizes: Mapping[str, int] | None = None
    """The attempt's objects, as they were last seen, since the time `_since` of the loop."""
    _since: float = 0.0
    _looked: float = 0.0

    async def decided_within(self, timeout_s: float) -> bool:
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_S
        self._watch = Watch(self.store, attempt_lease_key(self.prefix), self.sight)
        until, has_voted = loop.time() + timeout_s, False
        while True:
            try:
                one = await self._look()
                is_decided = one is not None and one.status != "undecided"
                if is_decided and not self._has_tried:
                    return True
                if is_decided or self._is_abandoned():
                    await self._decide(one)
                    return True
                if self.hurried and not has_voted and vote_name(0) in (self._sizes or ()):
                    has_voted, until = True, min(until, loop.time() + VOTES_S)
                pause_s = min(1.2 * pause_s, _PAUSE_S_MAX)
            except StoreError as error:
                if self._decided is not None and self.hurried:
                    log.warning("%s is decided, but latest or its files could not follow: %s", self.prefix, error)
                    return True
                log.warning("%s cannot be looked at or decided: %s; trying again", self.prefix, error)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)
            except CheckpointdError as error:
                log.error("%s cannot be decided: %s", self.prefix, error)
                return self._decided is not None
            if loop.time() >= until:
                return self._decided is not None
            await asyncio.sleep(pause_s)

    async def _look(self) -> LoggedAttempt | None:
        await self._watch.look()
        sizes = await root_view.sizes_of(self.store, self.prefix)
        now = asyncio.get_running_loop().time()
        # As for the lease, what kept this process from looking may have kept others from writing.
        if sizes != self._sizes or now - self._looked >= self._watch.length_s / 2:
            self._since = now
        self._sizes, self._looked = sizes, now
        return await root_view.logged(self.store, self.prefix)

    def _is_abandoned(self) -> bool:
        quiet_s = asyncio.get_running_loop().time() - self._since
        return not self.is_spooled and self._watch.is_abandoned() and (self.hurried or quiet_s >= self._watch.length_s)

    async def _decide(self, one: LoggedAttempt | None) -> None:
        """Decide the attempt unless it is decided, and act on what counts (OUTLIVED-2). One that nobody has announced has
        nothing that could be lost.
        """
        await self.check()
        if self._decided is None and one is not None and one.status == "undecided":
            draft = await judge(self.store, one.tag, one.id)
            self._has_tried = True
            self._decided = await append(RootLog.of(self.store), draft)
            say(draft.record)
        elif self._decided is None and one is not None and self._has_tried:
            self._decided = one
        if self._decided is None or self._decided.status != "checkpoint":
            return
        await move_latest(RootLog.of(self.store), is_start=True)
        await show(self.store, self._decided.commit)
