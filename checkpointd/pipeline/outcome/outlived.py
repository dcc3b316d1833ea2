"""Waits for attempts that have outlived their trainer in a daemon, and decides those at which nobody works any more.

Invariants
  OUTLIVED-1  An attempt is decided only if nobody works at it, as far as others can tell: nobody renews its lease, it does not
      wait in the caller's spool, where it has no lease (SAVEJOB-5 in `jobs.py`), and if the caller has time, none of its
      objects has changed for as long as a lease lasts. A large object may look the same while it is written, so a node that
      writes longer at one, after the coordinator's node died, may lose this save. A commit is never lost, since the first
      outcome counts.
  OUTLIVED-2  A process that has tried to put an outcome acts on the one that counts, whatever the storage replied: it is
      durable, the catalog has it, `latest` names the newest checkpoint, and the files of a commit are shown.
  OUTLIVED-3  A caller that has time tries `latest` and the files again until they work. One that hurries, since a load waits,
      tries them once: the load shows the files itself, and the next commit or start moves `latest`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.layout.keys import LEASE, OUTCOME, AttemptId, attempt_lease_key, vote_name
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline.outcome.recover import announced_and_put, judge, say
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import note_outcome
from checkpointd.pipeline.root.latest import move_latest_to_newest
from checkpointd.pipeline.root.leases import Sight, Watch
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
    """Whether this process has tried to put an outcome."""
    _outcome: Outcome | None = None
    """The outcome that counts, once it is known, if this process has tried to put one."""
    _sizes: Mapping[str, int] | None = None
    """The attempt's objects but its lease, as they were last seen, since the time `_since` of the loop."""
    _since: float = 0.0
    _looked: float = 0.0

    async def decided_within(self, timeout_s: float) -> bool:
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_S
        self._watch = Watch(self.store, attempt_lease_key(self.prefix), self.sight)
        until, has_voted = loop.time() + timeout_s, False
        while True:
            try:
                view = await self._look()
                fault = catalog.fault_of(view)
                if fault is not None and (self._has_tried or isinstance(fault, StoreError)):
                    raise fault
                if view.state != "in-doubt" and not self._has_tried:
                    return True
                if view.state != "in-doubt" or self._is_abandoned():
                    await self._decide(view)
                    return True
                if self.hurried and not has_voted and vote_name(0) in view.sizes:
                    has_voted, until = True, min(until, loop.time() + VOTES_S)
                pause_s = min(1.2 * pause_s, _PAUSE_S_MAX)
            except StoreError as error:
                if self._outcome is not None and self.hurried:
                    log.warning("%s is decided, but latest or its files could not follow: %s", self.prefix, error)
                    return True
                log.warning("%s cannot be looked at or decided: %s; trying again", self.prefix, error)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)
            except CheckpointdError as error:
                log.error("%s cannot be decided: %s", self.prefix, error)
                return self._outcome is not None
            if loop.time() >= until:
                return self._outcome is not None
            await asyncio.sleep(pause_s)

    async def _look(self) -> AttemptView:
        await self._watch.look()
        tag, _, name = self.prefix.rpartition("/")
        attempt = AttemptId.parse(name)
        assert attempt is not None
        view = await catalog.view(self.store, tag, attempt)
        sizes = {name: size for name, size in view.sizes.items() if name != LEASE}
        now = asyncio.get_running_loop().time()
        # As for the lease, what kept this process from looking may have kept others from writing.
        if sizes != self._sizes or now - self._looked >= self._watch.length_s / 2:
            self._since = now
        self._sizes, self._looked = sizes, now
        return view

    def _is_abandoned(self) -> bool:
        quiet_s = asyncio.get_running_loop().time() - self._since
        return not self.is_spooled and self._watch.is_abandoned() and (self.hurried or quiet_s >= self._watch.length_s)

    async def _decide(self, view: AttemptView) -> None:
        """Put an outcome unless there is one, and act on the one that counts (OUTLIVED-2)."""
        await self.check()
        if self._outcome is None and view.state == "in-doubt":
            draft = await judge(self.store, view)
            self._has_tried = True
            self._outcome = await announced_and_put(self.store, draft)
            say(self._outcome)
        elif self._outcome is None and view.outcome is not None and view.state != "deleted" and not view.is_void:
            await self.store.settle(f"{self.prefix}/{OUTCOME}")
            await note_outcome(self.store, view.outcome)
            self._outcome = view.outcome
            say(self._outcome)
        if self._outcome is None:
            return  # removed, or aborted and forgotten (COMMIT-5), meanwhile
        if self._outcome.outcome == "commit" and self._outcome.save_latest:
            await move_latest_to_newest(self.store)
        await show(self.store, self._outcome)
