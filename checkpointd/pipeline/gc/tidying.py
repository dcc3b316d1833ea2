"""Keeps removals in step with the saves of one writer: it decides when to remove, and when the next save may be written.

An attempt is *on the disk* while it has chunks, files or an index of any rank. Attempts are *alike* if the commit of one may
remove another: with retention rules, all attempts at the root; without rules, the attempts of one tag.

Invariants
  TIDY-1  Removals never queue up: one further removal serves all requests that come while a removal runs.
  TIDY-2  Beside the checkpoints that stay, at most SPARE alike attempts are on the disk. The coordinator counts the attempts
      that it has begun, until a removal that started after their end is over; the attempts that a removal found undecided; and
      the checkpoints that stay only because no newer one was verified. It begins another attempt if these, the new attempt and
      the attempt by which other ranks may lead are at most SPARE.
  TIDY-3  Another rank begins an attempt when a yes vote shows that the coordinator has begun the attempt before it. So it leads
      by at most one attempt.
  TIDY-4  A save waits for room at most half of the time until its deadline. A rank that never votes, or a storage that removes
      nothing, costs space but not the save. If nothing changes for PROVE_S and a checkpoint stays only because no newer one was
      verified, the newest checkpoint is read back, so that the older one can go.

A kill leaves at most what TIDY-2 allows. Recovery removes the attempt by which a rank led, since it lacks the coordinator's
vote, and the next coordinator removes the rest before it writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from checkpointd.commit.garbage import spent_records
from checkpointd.config import CommitConfig
from checkpointd.errors import CheckpointdError, NotFoundError
from checkpointd.layout.keys import vote_name
from checkpointd.pipeline.gc.retire import Retired, retire
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import catalog, epochs
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.identity import user
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.store.base import Store
from checkpointd.store.showing import plain_files_of

log = logging.getLogger("checkpointd")

SPARE = 3
"""The number of alike attempts that may be on the disk beside the checkpoints that stay."""
FULL_S = 10.0
PROVE_S = 10.0
LOOK_S = 1.0
"""How often to look again, while a save waits for attempts that others work at."""
EVERYTHING = ""
"""The scope of a look at all tags. Any other scope is a tag."""


@dataclass(frozen=True, slots=True)
class _Left:
    """What a look left: the epochs of undecided attempts by prefix, and how many checkpoints stay beyond the rules."""

    undecided: Mapping[str, int] = field(default_factory=dict)
    surplus: int = 0


class Tidier:
    """The tidier of one rank's writer, on its loop. Only the coordinator's tidier removes.

    `keeps_before`: checkpoints of epochs before this one stay, since the job does not know them (RETENTION-6).
    """

    def __init__(self, store: Store, commit: CommitConfig) -> None:
        self.keeps_before = 0
        self.freed = 0
        """The number of bytes removed so far."""
        self._store, self._commit = store, commit
        self._sees_all = not commit.retention.keeps_all or plain_files_of(store) is not None
        self._waiting: dict[str, AttemptInfo] = {}
        self._begun: dict[str, AttemptInfo] = {}
        self._ended: set[str] = set()
        """The attempts of `_begun` that are decided but may not be removed yet."""
        self._left: dict[str, _Left] = {}
        """The result of the last look, by scope."""
        self._spent: dict[str, AttemptView] = {}
        """Removed and aborted attempts with nothing left but records, which do not change."""
        self._changed = asyncio.Event()
        self._asked = self._served = 0
        self._look_again_at = 0.0
        self._stands: tuple[tuple[int, tuple[str, ...]], float] = (-1, ()), 0.0
        """The freed bytes and the begun attempts, and the time since which they have not changed."""
        self._epoch = 0
        self._tags: set[str] = set()
        self._look: asyncio.Task[None] | None = None
        self._complaint: str | None = None

    # --- attempts ------------------------------------------------------------------------------------------------

    def expect(self, info: AttemptInfo) -> None:
        """Note that the attempt will be written, unless it ends before. Attempts are begun in the order of their saves."""
        self._waiting[info.prefix] = info

    def end(self, info: AttemptInfo) -> None:
        """Note that the attempt is over on this rank. Unless it committed, nothing of it is on the disk."""
        self._waiting.pop(info.prefix, None)
        if info.rank != COORDINATOR:
            self._begun.pop(info.prefix, None)
        elif info.prefix in self._begun:
            self._ended.add(info.prefix)
        self._changed.set()

    # --- room ----------------------------------------------------------------------------------------------------

    async def room_for(self, info: AttemptInfo, deadline: float) -> None:
        """Return when the attempt may be written (TIDY-2, TIDY-3), at the latest halfway to its `deadline` (TIDY-4)."""
        loop, pause_s = asyncio.get_running_loop(), self._commit.poll_min_s
        try:
            async with asyncio.timeout_at((loop.time() + deadline) / 2):
                while not await self._has_room(info):
                    await self._change(pause_s)
                    pause_s = min(pause_s * 1.5, self._commit.poll_max_s)
        except TimeoutError:
            log.warning("%s is written although other saves and their leftovers take more room than they should", info.prefix)
        self._waiting.pop(info.prefix, None)
        self._begun[info.prefix] = info
        self._changed.set()

    async def more_room_for(self, info: AttemptInfo, deadline: float, freed: int) -> bool:
        """Whether space was freed since `self.freed` was `freed`, so that a write which found the disk full can be tried again.

        The coordinator removes dead attempts. Other ranks wait until the coordinator's vote shows that it has, at most FULL_S
        and at most halfway to `deadline`: on a disk without any free space, no vote will ever come.
        """
        if info.rank == COORDINATOR:
            await self.tidy(info)
            return self.freed > freed
        loop = asyncio.get_running_loop()
        until = min((loop.time() + deadline) / 2, loop.time() + FULL_S)
        while not (voted := await self._is_begun(info)) and loop.time() < until:
            await asyncio.sleep(self._commit.poll_max_s)
        return voted

    async def _prove_newest(self, info: AttemptInfo) -> None:
        """If a checkpoint stays only because no newer one was verified, read back the newest checkpoint and remove again."""
        if not self._left[self._scope(info)].surplus:
            return
        try:
            newest = next(iter(await catalog.checkpoints(self._store)), None)
            if newest is not None and (await read_back(self._store, newest)).whole:
                await self.tidy(info)
        except CheckpointdError as error:
            log.warning("%s: the newest checkpoint could not be read back to make room: %s", info.prefix, error)

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _has_room(self, info: AttemptInfo) -> bool:
        if any(other.n < info.n for other in self._alike(info, self._waiting)):
            return False
        if info.rank != COORDINATOR:
            return await self._is_led(info)
        is_due = self._ended or asyncio.get_running_loop().time() >= self._look_again_at
        if self._scope(info) not in self._left or (is_due and not self._fits(info)):
            await self.tidy(info)
        if not self._fits(info) and self._is_stuck():
            await self._prove_newest(info)
        return self._fits(info)

    def _is_stuck(self) -> bool:
        """Whether no attempt was begun and nothing was removed for PROVE_S."""
        now, stands = asyncio.get_running_loop().time(), (self.freed, tuple(self._begun))
        if stands != self._stands[0]:
            self._stands = stands, now
        return now - self._stands[1] >= PROVE_S

    def _fits(self, info: AttemptInfo) -> bool:
        """Whether TIDY-2 allows the attempt, by the last look."""
        left = self._left[self._scope(info)]
        others = [epoch for prefix, epoch in left.undecided.items() if prefix != info.prefix and prefix not in self._begun]
        # Attempts of this epoch belong to ranks that lead, or to a lost coordinator that this one has replaced.
        led = others.count(info.attempt.epoch)
        lead = max(led, 1 if info.world_size > 1 else 0)
        return left.surplus + len(others) - led + lead + len(self._alike(info, self._begun)) + 1 <= SPARE

    async def _is_led(self, info: AttemptInfo) -> bool:
        """Whether TIDY-3 allows the attempt."""
        before = max(self._alike(info, self._begun), key=lambda other: other.n, default=None)
        return before is None or await self._is_begun(before) or await self._is_begun(info)

    async def _is_begun(self, info: AttemptInfo) -> bool:
        """Whether the coordinator is known to have begun the attempt."""
        try:
            return (await catalog.read_vote(self._store, info.key(vote_name(COORDINATOR)))).vote == "yes"
        except NotFoundError:
            return False
        except CheckpointdError as error:
            log.warning("%s: whether the coordinator has voted cannot be told: %s", info.prefix, error)
            return False

    def _alike(self, info: AttemptInfo, among: dict[str, AttemptInfo]) -> list[AttemptInfo]:
        scope = self._scope(info)
        return [other for other in among.values() if self._scope(other) == scope]

    def _scope(self, info: AttemptInfo) -> str:
        return EVERYTHING if self._sees_all else info.tag

    # --- removing ------------------------------------------------------------------------------------------------

    async def tidy(self, info: AttemptInfo) -> None:
        """Remove dead attempts, for the coordinator's attempt `info`. Returns when a look that began after this call has ended,
        even if it failed (TIDY-1). Cancelling this call does not cancel the look.
        """
        self._asked += 1
        mine = self._asked
        self._tags.add(info.tag)
        self._epoch = max(self._epoch, info.attempt.epoch)
        while self._served < mine:
            if self._look is None or self._look.done():
                self._look = asyncio.get_running_loop().create_task(self._look_around())
            await asyncio.wait({self._look})

    async def _look_around(self) -> None:
        asked, tags, ended = self._asked, self._tags, frozenset(self._ended)
        self._tags = set()
        scopes = [EVERYTHING] if self._sees_all else sorted(tags)
        try:
            for scope in scopes:
                await self._remove(scope)
        except CheckpointdError as error:
            log.warning("leftovers at %s could not be removed: %s; the next save tries again", self._store.url, error)
        except Exception:
            log.exception("removing leftovers at %s failed in an unforeseen way; please report it", self._store.url)
        finally:
            for prefix in ended:
                self._begun.pop(prefix, None)
            self._ended -= ended
            for scope in scopes:
                self._left.setdefault(scope, _Left())
            self._look_again_at = asyncio.get_running_loop().time() + LOOK_S
            self._served = asked
            self._changed.set()

    async def _remove(self, scope: str) -> None:
        """Remove dead attempts in `scope`, unless a newer epoch has begun (COLLECT-5)."""
        if await epochs.newest(self._store) > self._epoch:
            return
        views = await (
            catalog.attempts_of(self._store, scope, self._spent) if scope else catalog.scan(self._store, self._spent)
        )
        self._remember(views)
        done = await retire(self._store, views, self._commit.retention, keeps_before=self.keeps_before)
        undecided = {facts.prefix: facts.attempt.epoch for facts in done.undecided}
        self._left[scope] = _Left(undecided, len(done.choice.surplus))
        self._say(done)

    def _remember(self, views: Sequence[AttemptView]) -> None:
        """Remember those of `views` that have nothing left but records, so that no look reads them again."""
        forgotten = set(spent_records(view.facts for view in views))
        for view in views:
            self._spent.pop(view.prefix, None)
            if view.state in ("aborted", "deleted") and not view.facts.bulk and view.facts not in forgotten:
                self._spent[view.prefix] = view

    def _say(self, done: Retired) -> None:
        for removal in done.removed:
            self.freed += removal.freed_bytes
            log.info(
                "%s/%s: user %s removed %d bytes: %s", removal.tag, removal.attempt, user(), removal.freed_bytes, removal.reason
            )
        complaint = done.choice.unknown_metric
        if complaint is not None and complaint != self._complaint:
            log.error(
                "retention at %s removes nothing: %s. Mend Retention(metric=...), or save(metrics=...)",
                self._store.url,
                complaint,
            )
        self._complaint = complaint
