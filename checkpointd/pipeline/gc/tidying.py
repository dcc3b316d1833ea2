"""Keeps removing in step with the saves of one writer: when to remove, and when the next save may be written.

An attempt is *on the disk* while there are chunks, files or an index of it, of whichever rank. Attempts are *alike* where the
commit of one may let another one go: all at the root where there are rules, else those of one tag.

Invariants
  TIDY-1  Removals never queue up: whoever asks while one runs is served, with all who ask meanwhile, by exactly one more.
  TIDY-2  Beside what stays, at most SPARE attempts that are alike are on the disk. The coordinator counts those that it has
      begun until a removal that started after their end is over, those that a removal found undecided, and what stays only
      because nothing newer was verified. It begins another one while these, the new one and the one by which other ranks may
      lead are no more than SPARE.
  TIDY-3  Another rank begins an attempt when the coordinator has begun the one before it, as a yes vote of the coordinator
      shows: it leads by one.
  TIDY-4  Nothing of this keeps a save from being written for longer than half of the time that it has: a rank that never votes,
      or a storage that removes nothing, costs space and not the save. Where nothing moves for PROVE_S and something stays that
      alone was verified, the newest checkpoint is read back, so that the older one can go.

A kill leaves no more than TIDY-2 allows. Of that, recovery removes the attempt by which a rank led, since it lacks the
coordinator's vote, and the next coordinator removes the rest before it writes anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from checkpointd.commit.garbage import spent_records
from checkpointd.config import CommitConfig
from checkpointd.errors import CheckpointdError, NotFoundError
from checkpointd.layout.keys import attempt_prefix, vote_name
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
"""So many attempts may be on the disk beside what stays."""
FULL_S = 10.0
PROVE_S = 10.0
LOOK_S = 1.0
"""How often it is looked whether those that somebody else works at are decided, while they keep a save waiting."""
EVERYTHING = ""
"""The scope of a look at all tags; another one is a tag."""


@dataclass(frozen=True, slots=True)
class _Left:
    """What a look left: the attempts that were undecided, by prefix, with their epochs; how many stay beyond the rules."""

    undecided: Mapping[str, int] = field(default_factory=dict)
    surplus: int = 0


class Tidier:
    """One rank's; on the coordinator it removes. All on the writer's loop.

    `keeps_before`: of older epochs than this, no checkpoint goes: nobody has told the job what they hold (RETENTION-6).
    """

    def __init__(self, store: Store, commit: CommitConfig) -> None:
        self.keeps_before = 0
        self.freed = 0
        """Bytes that were removed so far."""
        self._store, self._commit = store, commit
        self._sees_all = not commit.retention.keeps_all or plain_files_of(store) is not None
        self._waiting: dict[str, AttemptInfo] = {}
        self._begun: dict[str, AttemptInfo] = {}
        self._ended: set[str] = set()
        """Those of `_begun` that are decided, and perhaps not removed yet."""
        self._left: dict[str, _Left] = {}
        """By scope: what the last look left."""
        self._spent: dict[str, AttemptView] = {}
        """Removed and aborted attempts that have nothing left but records, which do not change."""
        self._changed = asyncio.Event()
        self._asked = self._served = 0
        self._look_again_at = 0.0
        self._stands: tuple[tuple[int, tuple[str, ...]], float] = (-1, ()), 0.0
        """What had gone and was begun, and since when that has not changed."""
        self._epoch = 0
        self._tags: set[str] = set()
        self._look: asyncio.Task[None] | None = None
        self._complaint: str | None = None

    # --- what the attempts say -----------------------------------------------------------------------------------

    def expect(self, info: AttemptInfo) -> None:
        """The attempt will be written, unless it ends before. Attempts are begun in the order of their saves."""
        self._waiting[info.prefix] = info

    def end(self, info: AttemptInfo) -> None:
        """The attempt is over on this rank, which has nothing of it on the disk but what was committed."""
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
        """Whether space has come free since `freed` bytes were, so that a write which found none is worth another try.

        The coordinator removes what may go. The others wait until it has, as its vote shows, for FULL_S at most and no longer
        than halfway to `deadline`: where the disk is full to the last byte, no vote will ever come.
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
        """On the coordinator, where something stays because nothing newer was verified: read back what would take its place."""
        if not self._left[self._scope(info)].surplus:
            return
        try:
            newest = (await catalog.checkpoints(self._store))[:1]
            if any([(await read_back(self._store, checkpoint)).whole for checkpoint in newest]):
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
        """Whether nothing was begun, nor went, for PROVE_S."""
        now, stands = asyncio.get_running_loop().time(), (self.freed, tuple(self._begun))
        if stands != self._stands[0]:
            self._stands = stands, now
        return now - self._stands[1] >= PROVE_S

    def _fits(self, info: AttemptInfo) -> bool:
        """TIDY-2, by what is known."""
        left = self._left[self._scope(info)]
        others = [epoch for prefix, epoch in left.undecided.items() if prefix != info.prefix and prefix not in self._begun]
        # Those of this epoch are of ranks that lead, or of a coordinator that was lost and is followed by this one.
        led = others.count(info.attempt.epoch)
        lead = max(led, 1 if info.world_size > 1 else 0)
        return left.surplus + len(others) - led + lead + len(self._alike(info, self._begun)) + 1 <= SPARE

    async def _is_led(self, info: AttemptInfo) -> bool:
        """TIDY-3."""
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
        """Remove what is dead, for the attempt of the coordinator `info`; returns when a look that began after this call has
        ended, whatever became of it (TIDY-1). Giving up on this leaves the look to others.
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
        """Remove what is dead in `scope`; nothing where a newer epoch has begun (COLLECT-5)."""
        if await epochs.newest(self._store) > self._epoch:
            return
        views = await (
            catalog.attempts_of(self._store, scope, self._spent) if scope else catalog.scan(self._store, self._spent)
        )
        self._remember(views)
        done = await retire(self._store, views, self._commit.retention, keeps_before=self.keeps_before)
        undecided = {attempt_prefix(facts.tag, facts.attempt): facts.attempt.epoch for facts in done.undecided}
        self._left[scope] = _Left(undecided, len(done.choice.surplus))
        self._say(done)

    def _remember(self, views: Sequence[AttemptView]) -> None:
        """Those of `views` that nothing but records is left of, and that need not be looked at again."""
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
