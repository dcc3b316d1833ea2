"""Keeps removals in step with the saves of one writer: it decides when to remove, and when the next save may be written.

`room.py` counts what is beside the checkpoints that stay, by the root's log.

Invariants
  TIDY-1  At most one removal runs and at most one is due, however many saves have ended: the next removal serves all of them.
      No save waits for a removal in order to end. Unless somebody waits for them, removals take at most SHARE of the time.
      If the log tells that nothing can go, the storage is not asked.
  TIDY-3  The coordinator announces an attempt when there is room for it (TIDY-2 in `room.py`). Another rank begins one when the
      log shows that the coordinator has announced it, or the one before. So it leads by at most one attempt.
  TIDY-4  A save waits for room at most half of the time until its deadline, and asks the storage nothing meanwhile. So a rank
      that never votes, or a storage that removes nothing or does not answer, costs space but not the save. If the log does not
      change for STUCK_S, the coordinator makes room: if a checkpoint stays only because no newer one was verified, the newest
      is read back, so that the older one can go; and attempts of older starts at which nobody works any more are decided
      (OUTLIVED-1 in `outlived.py`). What stays only because a save in flight may refer to it does not count any more then. If
      its start is over, only what is undecided counts, since the newer coordinator may have no save for long, and then it
      removes nothing.
  TIDY-5  A removal removes only at the root that is the job's own after it has read the log (OWNROOT-1 in `own_root.py`); the
      log sees to it from then on (LOG-12). Otherwise it would remove checkpoints of another job, or of a copy. A coordinator
      removes nothing once there is a newer start.

A kill leaves at most what TIDY-2 allows. The next start aborts it, and its coordinator counts it, and removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import TypeAlias

from checkpointd.commit.retention import KEEPS_NONE
from checkpointd.config import CommitConfig
from checkpointd.errors import CheckpointdError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.phrases import byte_size
from checkpointd.pipeline.gc import room
from checkpointd.pipeline.gc.collect import Kept
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.retire import prove_newest, retire
from checkpointd.pipeline.gc.room import RoomUse, has_room, room_use
from checkpointd.pipeline.identity import user
from checkpointd.pipeline.pauses import pauses
from checkpointd.pipeline.root import reserve
from checkpointd.pipeline.root.leases import ANSWER_S, LENGTH_S
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.pipeline.workers import stopped
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

FULL_S = 10.0
"""How long a save that found the disk full waits until another process has removed something."""
STUCK_S = 10.0
DECIDING_S = 5 * LENGTH_S
"""How long to watch the leases of older starts' attempts: long enough to see that they are not renewed."""
SHARE = 0.2
PAUSE_S_MAX = 10.0
"""After a removal that took t seconds, the next one begins t * (1 / SHARE - 1) seconds later, at most so many."""

Freed: TypeAlias = tuple[int, int]


async def trusts_the_root(start: int) -> None:
    """Do not check whether the root is that of `start`."""


Decides: TypeAlias = Callable[[Collection[str], float, Callable[[], Awaitable[None]]], Awaitable[object]]
"""Decides attempts at which nobody works, watches them for so many seconds, and calls a check before it writes anything."""


async def decides_nothing(prefixes: Collection[str], timeout_s: float, check: Callable[[], Awaitable[None]]) -> None:
    """Leave the attempts of older starts alone."""


class Tidier:
    """The tidier of one rank's writer, on its loop. Only the coordinator's tidier removes.

    `keeps_before`: checkpoints before this order stay, since the job does not know them (RETENTION-6). `check_root`
    raises if the root is not that of the start (TIDY-5). `decide_older` decides attempts of older starts at which
    nobody works any more (TIDY-4).
    """

    def __init__(
        self,
        store: Store,
        commit: CommitConfig,
        check_root: Callable[[int], Awaitable[None]] = trusts_the_root,
        decide_older: Decides = decides_nothing,
    ) -> None:
        self.keeps_before = KEEPS_NONE
        self._store, self._commit, self._check_root, self._decides = store, commit, check_root, decide_older
        self._log, self._rules = RootLog.of(store), commit.retention
        self._waiting: dict[str, AttemptInfo] = {}
        self._begun: dict[str, AttemptInfo] = {}
        self._nbytes: dict[str, float] = {}
        """The bytes of each attempt of `_begun`, of all ranks together, by this rank's share."""
        self._last_nbytes: float = math.inf
        self._freed_bytes = 0
        self._exports, self._heeds_exports = ExportLeases(store), True
        self._kept: Kept = {}
        self._found: tuple[object, RoomUse] | None = None
        """What was counted last, and for what."""
        self._stays: frozenset[str] = frozenset()
        """What the last removal has not removed, although nobody needs it."""
        self._changed = asyncio.Event()
        self._start = self._asked = self._served = 0
        self._pause_until = 0.0
        self._hurrying = 0
        """How many wait for a removal."""
        self._hurried = asyncio.Event()
        """Set while somebody waits for the next removal, which then begins at once."""
        self._removal: asyncio.Task[None] | None = None
        self._aside: dict[str, asyncio.Task[None]] = {}
        """What makes room for saves that wait while nothing changes, by name."""
        self._complaint: str | None = None

    # --- attempts ------------------------------------------------------------------------------------------------

    def expect(self, info: AttemptInfo) -> None:
        """Note that the attempt will be written, unless it ends before. Attempts are begun in the order of their saves."""
        self._waiting[info.prefix] = info

    def end(self, info: AttemptInfo) -> None:
        """Note that the attempt is over on this rank."""
        for noted in (self._waiting, self._begun, self._nbytes):
            noted.pop(info.prefix, None)
        self._changed.set()

    def _begin(self, info: AttemptInfo, nbytes: float) -> None:
        self._waiting.pop(info.prefix, None)
        self._begun[info.prefix] = info
        self._nbytes[info.prefix] = self._last_nbytes = nbytes
        self._changed.set()

    # --- room ----------------------------------------------------------------------------------------------------

    def begins_early(self, info: AttemptInfo) -> bool:
        """Whether the coordinator begins the attempt while its snapshot is taken, since there is room if it is as large as the
        save before.
        """
        begins = info.rank == COORDINATOR and self._may_begin(info, self._last_nbytes)
        if begins:
            self._begin(info, self._last_nbytes)
        return begins

    async def room_for(self, info: AttemptInfo, deadline: float, nbytes: int) -> None:
        """Return when the attempt may be written (TIDY-2, TIDY-3), at the latest halfway to its `deadline` (TIDY-4). `nbytes`:
        the size of this rank's shard.
        """
        loop, waits = asyncio.get_running_loop(), pauses(self._commit, self._store.capabilities)
        number, since, is_stuck = -1, 0.0, False
        own = nbytes * info.world_size
        try:
            async with asyncio.timeout_at((loop.time() + deadline) / 2):
                while info.prefix not in self._begun and not self._may_begin(info, own, is_stuck=is_stuck):
                    if self._log.state.number != number:
                        number, since, is_stuck = self._log.state.number, loop.time(), False
                    elif info.rank == COORDINATOR and loop.time() - since >= STUCK_S:
                        since, is_stuck = loop.time(), True
                        self._make_room(info)
                    with self._hurry():
                        await self._change(next(waits))
        except TimeoutError:
            log.warning("%s is written although other saves and their leftovers take more room than they should", info.prefix)
        self._begin(info, own)

    def _may_begin(self, info: AttemptInfo, nbytes: float, *, is_stuck: bool = False) -> bool:
        if any(other.n < info.n for other in self._alike(info, self._waiting)):
            return False
        attempts = self._log.state.attempts
        if info.rank != COORDINATOR:
            before = max(self._alike(info, self._begun), key=lambda other: other.n, default=None)
            known = [attempts.get(one.prefix) for one in (before, info) if one is not None]
            # An attempt that another rank has announced has no number yet.
            return before is None or any(one is not None and (one.n >= 0 or one.status != "undecided") for one in known)
        found = self._room_use()
        begun = {name: n for name, n in self._nbytes.items() if name not in attempts or attempts[name].status == "undecided"}
        stays, is_over = self._stays.union(found.pinned if is_stuck else ()), self._is_over(info.attempt.start)
        if has_room(found, self._rules, info, nbytes, begun, stays=stays, only_undecided=is_stuck and is_over):
            return True
        if not self._is_removing and not is_over and not found.removable <= self._stays:
            self.ask(info)
        return False

    def _alike(self, info: AttemptInfo, among: dict[str, AttemptInfo]) -> list[AttemptInfo]:
        return [other for other in among.values() if not self._rules.keeps_all or other.tag == info.tag]

    def _is_over(self, start: int) -> bool:
        return self._log.state.start > start

    def _room_use(self) -> RoomUse:
        state = self._log.state
        basis = (state, self.keeps_before)
        if self._found is None or self._found[0] != basis:
            self._found = basis, room_use(state, self._rules, self.keeps_before, self._kept)
        return self._found[1]

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _make_room(self, info: AttemptInfo) -> None:
        """Make room for an attempt that waits while nothing changes (TIDY-4). It takes long, so it runs aside."""
        found, start = self._room_use(), info.attempt.start
        if self._is_over(start):
            return
        older = [one.prefix for one in found.undecided if one.id.start < start]
        if older:
            self._run_aside("deciding", lambda: self._decides(older, DECIDING_S, lambda: self._check_root(start)))
        if found.surplus:
            self._run_aside("reading back", lambda: prove_newest(self._store))

    def _run_aside(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work`, unless what was begun under this name goes on."""

        async def run() -> None:
            try:
                await work()
            except CheckpointdError as error:
                log.warning("%s to make room at %s failed: %s", what, self._store.url, error)

        task = self._aside.get(what)
        if task is None or task.done():
            self._aside[what] = asyncio.get_running_loop().create_task(run())

    async def more_room_for(self, info: AttemptInfo, deadline: float, freed: Freed) -> bool:
        """Whether space was freed since `self.freed` was `freed`, so that a write which found the disk full can be tried again.

        The coordinator removes what may go, also checkpoints that stay only for exports (EXPORTLEASE-3). Other ranks wait until
        the log shows that it has, at most twice FULL_S, and a coordinator whose start is over at most FULL_S; none longer than
        halfway to `deadline`: on a disk without any free space, nothing may ever go. A removal that has begun is waited for
        until it ends, or the caller gives up.
        """
        loop = asyncio.get_running_loop()
        until = min((loop.time() + deadline) / 2, loop.time() + (FULL_S if info.rank == COORDINATOR else 2 * FULL_S))
        if info.rank == COORDINATOR and not self._is_over(info.attempt.start):
            self._heeds_exports = False
            try:
                await self.tidy(info)
            finally:
                self._heeds_exports = True
        else:
            while self.freed == freed and loop.time() < until:
                await self._change(self._commit.poll_max_s)
        return self.freed != freed

    @property
    def freed(self) -> Freed:
        """The number of bytes removed here so far, and the newest entry of the log that says that objects were removed."""
        return self._freed_bytes, max((one.swept for one in self._log.state.attempts.values()), default=0)

    # --- removing ------------------------------------------------------------------------------------------------

    def ask(self, info: AttemptInfo) -> None:
        """Have removed soon what may go, since the coordinator's attempt `info` is decided (TIDY-1)."""
        self._start = max(self._start, info.attempt.start)
        self._asked += 1
        self._begin_removal()

    async def tidy(self, info: AttemptInfo) -> None:
        """`ask`, and return when a removal that began after this call has ended, even if it failed. Cancelling this call does
        not cancel the removal.
        """
        self.ask(info)
        await self.rest()

    async def rest(self) -> None:
        """Return when the removals that have been asked for are over."""
        mine = self._asked
        with self._hurry():
            while self._served < mine:
                self._begin_removal()
                assert self._removal is not None
                await asyncio.wait({self._removal})

    async def finish(self) -> None:
        """`rest`, for a writer that closes. If the newest checkpoint is small, it is read back, so that one that stays only
        until then can go.
        """
        await self.rest()
        if self._room_use().surplus and not self._is_over(self._start) and await prove_newest(self._store, room.SMALL_BYTES):
            self._asked += 1
            await self.rest()

    async def close(self) -> None:
        """Stop removing. The next save at the root removes the rest. Waits at most ANSWER_S for the storage."""
        tasks = [task for task in (self._removal, *self._aside.values()) if task is not None]
        if not await stopped(tasks, ANSWER_S):
            log.warning("%s has not answered for %g s, and is not waited for", self._store.url, ANSWER_S)

    @contextlib.contextmanager
    def _hurry(self) -> Iterator[None]:
        """Let removals begin at once while the block runs."""
        self._hurrying += 1
        self._hurried.set()
        try:
            yield
        finally:
            self._hurrying -= 1
            if not self._hurrying:
                self._hurried.clear()

    @property
    def _is_removing(self) -> bool:
        return self._removal is not None and not self._removal.done()

    def _begin_removal(self) -> None:
        if not self._is_removing:
            self._removal = asyncio.get_running_loop().create_task(self._remove_on())

    async def _remove_on(self) -> None:
        """Remove until every request is served."""
        loop = asyncio.get_running_loop()
        while self._served < self._asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._pause_until):
                    await self._hurried.wait()
            asked, began, wanted = self._asked, loop.time(), frozenset[str]()
            try:
                wanted = self._room_use().removable
                await self._remove()
            except CheckpointdError as error:
                log.warning("leftovers at %s could not be removed: %s; the next save tries again", self._store.url, error)
            except Exception:
                log.exception("removing leftovers at %s failed in an unforeseen way; please report it", self._store.url)
            finally:
                self._served = asked
                is_settled = not wanted or self._is_over(self._start)
                self._stays = frozenset() if is_settled else self._room_use().removable & wanted
                self._changed.set()
            self._pause_until = loop.time() + min((loop.time() - began) * (1 / SHARE - 1), PAUSE_S_MAX)

    async def _remove(self) -> None:
        """Remove what may go, if the log tells of anything (TIDY-1) and the start is not over (TIDY-5)."""
        found = self._room_use()
        self._complain(found.unknown_metric)
        if found.going or found.is_shown:
            state = await self._log.look()
            await self._check_root(self._start)
            if not self._is_over(self._start):
                await self._retire(state.attempts.values())
        await self._log.compact()

    async def _retire(self, attempts: Collection[LoggedAttempt]) -> None:
        removed = await reserve.on_full_disk(
            self._store,
            lambda: retire(
                self._store,
                attempts,
                self._rules,
                start=self._start,
                keeps_before=self.keeps_before,
                exports=self._exports if self._heeds_exports else None,
                kept=self._kept,
            ),
        )
        self._found = None  # since `_kept` has changed
        for removal in removed:
            self._freed_bytes += removal.freed_bytes
            freed = byte_size(removal.freed_bytes)
            log.info("removed %s/%s (%s) as user %s: %s", removal.tag, removal.attempt, freed, user(), removal.reason)

    def _complain(self, complaint: str | None) -> None:
        if complaint is not None and complaint != self._complaint:
            words = "retention at %s removes nothing: %s. Mend Retention(metric=...), or save(metrics=...)"
            log.error(words, self._store.url, complaint)
        self._complaint = complaint
