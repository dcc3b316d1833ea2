"""Keeps removals in step with the saves of one writer: it decides when to remove, and when the next save may be written.

An attempt is *on the disk* while it has chunks, files or an index of any rank. Attempts are *alike* if the commit of one may
remove another: with retention rules, all attempts at the root; without rules, the attempts of one tag.

Invariants
  TIDY-1  At most one removal runs and at most one is due, however many saves have ended: the next removal serves all of them.
      No save waits for a removal in order to end, and nothing is kept for a save that has ended except that its tag is due, at
      most TAGS_MAX tags. Unless somebody waits for them, removals take at most SHARE of the time.
  TIDY-2  Beside the checkpoints that stay, at most SPARE alike attempts are on the disk, or at most SMALL_MAX ones that take at
      most SMALL_BYTES together. The coordinator counts the attempts that it has begun, until a removal that started after their
      end is over; the attempts that a look found undecided or dead; and the checkpoints that stay only because no newer one was
      verified, or because a save in flight refers to them. It begins another attempt if these, the new attempt and the attempt
      by which other ranks may lead are within this limit. It begins the first one after a look, which removes nothing. An
      undecided attempt that is not on the disk yet, but has a lease, counts only for attempts of newer starts: if both counted,
      two writers could wait for each other.
  TIDY-3  Another rank begins an attempt when a yes vote shows that the coordinator has begun the attempt before it. So it leads
      by at most one attempt.
  TIDY-4  A save waits for room at most half of the time until its deadline. A rank that never votes, or a storage that removes
      nothing or does not answer, costs space but not the save, and however many saves wait for such a storage, they keep few of
      its threads. If nothing changes for STUCK_S, the coordinator makes room: if a checkpoint stays
      only because no newer one was verified, the newest is read back, so that the older one can go; and attempts of older
      starts at which nobody works any more are decided (OUTLIVED-1 in `outlived.py`). If its own start is over, it counts only
      undecided attempts instead, at the latest after OVER_S: the newer coordinator may have no save for long, and then it
      removes nothing.
  TIDY-5  A removal looks at the root and removes there only if the root is the job's own, before the look and after it
      (OWNROOT-1 in `own_root.py`). Otherwise it would remove checkpoints of another job, or of a copy.

A kill leaves at most what TIDY-2 allows. Recovery removes the attempt by which a rank led, since it lacks the coordinator's
vote, and the next coordinator removes the rest before it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from checkpointd.commit.log import pinned_by
from checkpointd.commit.retention import KEEPS_NONE
from checkpointd.config import CommitConfig
from checkpointd.errors import CheckpointdError, ClosedError, NotFoundError
from checkpointd.layout.keys import vote_name
from checkpointd.phrases import byte_size
from checkpointd.pipeline.gc.collect import Kept, swept_next
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.retire import Retired, chosen_by, prove_newest, retire
from checkpointd.pipeline.identity import user
from checkpointd.pipeline.pauses import pauses
from checkpointd.pipeline.root import leases, reserve, root_view, starts
from checkpointd.pipeline.root.leases import ANSWER_S, LENGTH_S
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.root_view import AttemptView
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.pipeline.workers import stopped
from checkpointd.store.base import Store
from checkpointd.store.passing import InTurn
from checkpointd.store.showing import plain_files_of

log = logging.getLogger("checkpointd")

SPARE = 3
"""The number of alike attempts that may be on the disk beside the checkpoints that stay."""
SMALL_MAX = 64
SMALL_BYTES = 256 << 20
"""So many attempts may be on the disk instead of SPARE if they take so few bytes together. Small saves then do not wait until a
removal has looked at a long history."""
TAGS_MAX = 64
"""The tags that are noted for the next removal. If there are more, it looks at all tags."""
DUE_AGAIN_MAX = 4
FULL_S = 10.0
STUCK_S = 10.0
OVER_S = 30.0
DECIDING_S = 5 * LENGTH_S
"""How long to watch the leases of older starts' attempts: long enough to see that they are not renewed."""
LOOKS_MAX = 2
"""The number of looks at once for saves that wait. A storage has few threads, and a look that hangs keeps one."""
SHARE = 0.2
PAUSE_S_MAX = 10.0
"""After a removal that took t seconds, the next one begins t * (1 / SHARE - 1) seconds later, at most so many."""
LOOK_S = 1.0
"""How often to look again, while a save waits for attempts that others work at."""
EVERYTHING_EVERY = 64
"""Without retention rules, a removal looks at the tags of ended saves. After so many saves, one looks at all tags."""
EVERYTHING = ""
"""The scope of a look at all tags. Any other scope is a tag."""


@dataclass(frozen=True, slots=True)
class _Left:
    """What a look found beside the checkpoints that stay.

    `undecided`: the starts of undecided attempts that are on the disk, by prefix. `promised`: the same of those that only have
    a lease. `surplus`: how many checkpoints stay beyond the rules, or while a save in flight needs them. `dead`: how many
    attempts can go. `nbytes`: the bytes of all of these. `is_bare`: whether the tag held no attempt at all.
    """

    undecided: Mapping[str, int] = field(default_factory=dict)
    promised: Mapping[str, int] = field(default_factory=dict)
    surplus: int = 0
    dead: int = 0
    nbytes: int = 0
    is_bare: bool = False


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
        self.freed = 0
        """The number of bytes removed so far."""
        self._gone = 0
        """How many attempts a newer coordinator has decided or removed, by the looks of this one."""
        self._counted: dict[str, int] = {}
        """The attempts beside those that stay that its last look found, by scope."""
        self._store, self._commit, self._check_root, self._decides = store, commit, check_root, decide_older
        self._sees_all = not commit.retention.keeps_all or plain_files_of(store) is not None
        self._waiting: dict[str, AttemptInfo] = {}
        self._begun: dict[str, AttemptInfo] = {}
        self._nbytes: dict[str, int] = {}
        """The bytes of each attempt of `_begun`, of all ranks together, by this rank's share."""
        self._ended: set[str] = set()
        """The attempts of `_begun` that are decided but may not be removed yet."""
        self._left: dict[str, _Left] = {}
        """The result of the last look, by scope: of all tags, or of the tags at which saves are in flight."""
        self._exports, self._heeds_exports = ExportLeases(store), True
        self._changed = asyncio.Event()
        self._asked = self._served = self._served_everywhere = 0
        self._pause_until = 0.0
        self._resting = 0
        """How many wait for a removal."""
        self._awaited = asyncio.Event()
        """Set while somebody waits for the next removal, which then begins at once."""
        self._look_again_at = 0.0
        self._stands: tuple[tuple[int, int, tuple[str, ...]], float] = (-1, 0, ()), 0.0
        """What was removed and which attempts are begun, and the time since which this has not changed."""
        self._start = 0
        self._is_over = False
        """Whether there is a newer start, by the last look."""
        self._tags: set[str] = set()
        self._look: asyncio.Task[None] | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._proving: asyncio.Task[None] | None = None
        self._looks: dict[str, asyncio.Task[None]] = {}
        """The looks for saves that wait, by name."""
        self._is_closed = False
        self._led: set[str] = set()
        """The attempts that the coordinator is known to have begun, on another rank."""
        self._complaint: str | None = None
        self._kept: Kept = {}

    # --- attempts ------------------------------------------------------------------------------------------------

    def expect(self, info: AttemptInfo) -> None:
        """Note that the attempt will be written, unless it ends before. Attempts are begun in the order of their saves."""
        self._waiting[info.prefix] = info

    def end(self, info: AttemptInfo) -> None:
        """Note that the attempt is over on this rank. Unless it committed, nothing of it is on the disk."""
        self._waiting.pop(info.prefix, None)
        if info.rank != COORDINATOR:
            self._drop(info.prefix)
        elif info.prefix in self._begun:
            self._ended.add(info.prefix)
        self._changed.set()

    # --- room ----------------------------------------------------------------------------------------------------

    async def room_for(self, info: AttemptInfo, deadline: float, nbytes: int) -> None:
        """Return when the attempt may be written (TIDY-2, TIDY-3), at the latest halfway to its `deadline` (TIDY-4). `nbytes`:
        the size of this rank's shard.
        """
        own = nbytes * info.world_size
        loop, waits = asyncio.get_running_loop(), pauses(self._commit, self._store.capabilities)
        began = loop.time()
        try:
            async with asyncio.timeout_at((began + deadline) / 2):
                while not await self._has_room(info, own, began):
                    await self._change(next(waits))
        except TimeoutError:
            log.warning("%s is written although other saves and their leftovers take more room than they should", info.prefix)
        self._waiting.pop(info.prefix, None)
        self._begun[info.prefix], self._nbytes[info.prefix] = info, own
        self._changed.set()

    async def more_room_for(self, info: AttemptInfo, deadline: float, freed: int) -> bool:
        """Whether space was freed since `self.freed` was `freed`, so that a write which found the disk full can be tried again.

        The coordinator removes dead attempts, and checkpoints that stay only for exports (EXPORTLEASE-3); if its start is over,
        it waits at most FULL_S until the newer coordinator has. Other ranks wait until the coordinator's vote shows that it
        has, at most twice as long, and at most halfway to `deadline`: on a disk without any free space, nothing may ever go,
        and no vote come. A removal or a look that has begun is waited for until it ends, or the caller gives up.
        """
        loop = asyncio.get_running_loop()
        wait_s = FULL_S if info.rank == COORDINATOR else 2 * FULL_S
        until = min((loop.time() + deadline) / 2, loop.time() + wait_s)
        if info.rank == COORDINATOR:
            gone, self._heeds_exports = self._gone, False
            try:
                await self.tidy(info)
                while self._is_over and self._gone == gone and loop.time() < until:
                    await asyncio.sleep(LOOK_S)
                    await self.tidy(info)
            finally:
                self._heeds_exports = True
            return self.freed > freed or self._gone > gone
        while not (voted := await self._is_led(info)) and loop.time() < until:
            await asyncio.sleep(self._commit.poll_max_s)
        return voted

    async def _make_room(self, info: AttemptInfo) -> None:
        """Make room for an attempt that waits while nothing changes (TIDY-4)."""
        scope = self._scope(info)
        if self._is_over:
            self._left[scope] = replace(self._left_of(info), surplus=0, dead=0)
            return
        if older := self._older(info):
            self._decide_older(info, older)
        await self._prove_newest(info)

    def _older(self, info: AttemptInfo) -> list[str]:
        """The undecided attempts of older starts."""
        left = self._left_of(info)
        return [prefix for prefix, start in {**left.promised, **left.undecided}.items() if start < info.attempt.start]

    def _decide_older(self, info: AttemptInfo, prefixes: Sequence[str]) -> None:
        """Begin to decide these attempts if nobody works at them any more. This takes as long as a lease, so it runs aside."""

        async def decide() -> None:
            try:
                await self._decides(prefixes, DECIDING_S, lambda: self._check_root(info.attempt.start))
            except CheckpointdError as error:
                log.warning("attempts of older starts at %s cannot be decided: %s", self._store.url, error)
            self._look_again_at = 0.0
            self._changed.set()

        if self._deciding is None or self._deciding.done():
            self._deciding = asyncio.get_running_loop().create_task(decide())

    async def _prove_newest(self, info: AttemptInfo) -> None:
        """If a checkpoint stays only because no newer one was verified, read back the newest checkpoint and remove again."""
        if not self._left_of(info).surplus:
            return

        async def prove() -> None:
            try:
                if await prove_newest(self._store):
                    await self.tidy(info)
            except CheckpointdError as error:
                log.warning("%s: the newest checkpoint could not be read back to make room: %s", info.prefix, error)

        if self._proving is None or self._proving.done():
            self._proving = asyncio.get_running_loop().create_task(prove())
        await asyncio.wait({self._proving})  # a save that waits no longer leaves it to the next one

    async def _looked(self, what: str, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Take `look`, unless a look of that name goes on, and wait until it is over.

        A storage that does not answer cannot be told to stop. So this wait can be given up while the look goes on, and only
        LOOKS_MAX go on at once: those who come later wait until one has ended (TIDY-4).
        """
        while (task := self._looks.get(what)) is None:
            if self._is_closed:
                raise ClosedError(f"nothing is removed at {self._store.url} any more")
            if len(self._looks) < LOOKS_MAX:
                task = self._looks[what] = asyncio.get_running_loop().create_task(look())
                task.add_done_callback(lambda _: self._looks.pop(what))
                break
            await asyncio.wait(self._looks.values(), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _has_room(self, info: AttemptInfo, own: int, began: float) -> bool:
        if any(other.n < info.n for other in self._alike(info, self._waiting)):
            return False
        if info.rank != COORDINATOR:
            before = max(self._alike(info, self._begun), key=lambda other: other.n, default=None)
            return before is None or await self._is_led(before, info)
        while self._scope(info) not in self._left:
            await self._looked(f"first {self._scope(info)}", lambda: self._look_first(info))
        now = asyncio.get_running_loop().time()
        if (self._ended or now >= self._look_again_at) and not self._fits(info, own):
            await self.tidy(info)
        if not self._fits(info, own) and (self._is_stuck() or (self._is_over and now - began >= OVER_S)):
            await self._make_room(info)
        return self._fits(info, own)

    async def _look_first(self, info: AttemptInfo) -> None:
        """Look at the scope of `info` for the first time, without removing anything."""
        scope = self._scope(info)
        try:
            self._left[scope] = await self._seen(scope, besides=info.prefix)
        except CheckpointdError as error:
            log.warning("%s: what else is on the disk cannot be seen: %s", info.prefix, error)
            self._left[scope] = _Left()

    async def _seen(self, scope: str, besides: str = "") -> _Left:
        """What is in `scope`, besides one attempt. Removes nothing."""
        views = [view for view in await self._views(scope) if view.prefix != besides]
        choice = await chosen_by(
            self._store,
            views,
            self._commit.retention,
            keeps_before=self.keeps_before,
            exports=self._heeded,
        )
        dead = {*(prefix for prefix, _ in choice.going), *(one.attempt for one in swept_next(RootLog.of(self._store).state))}
        return await self._left_in(views, choice.surplus, dead - self._pinned())

    def _pinned(self) -> set[str]:
        """The removed attempts whose objects stay as long as a save in flight may refer to them (LOG-10)."""
        state = RootLog.of(self._store).state
        undecided = [one for one in state.attempts.values() if one.status == "undecided"]
        return {one.attempt for one in swept_next(state)} & {name for one in undecided for name in pinned_by(state, one.base)}

    def _is_stuck(self) -> bool:
        """Whether no attempt was begun and nothing was removed for STUCK_S."""
        now, stands = asyncio.get_running_loop().time(), (self.freed, self._gone, tuple(self._begun))
        if stands != self._stands[0]:
            self._stands = stands, now
        return now - self._stands[1] >= STUCK_S

    def _fits(self, info: AttemptInfo, own: int) -> bool:
        """Whether TIDY-2 allows the attempt of `own` bytes, by the last look."""
        left, begun = self._left_of(info), self._alike(info, self._begun)
        older = {prefix: start for prefix, start in left.promised.items() if start < info.attempt.start}
        undecided = (older | dict(left.undecided)).items()
        others = [start for prefix, start in undecided if prefix != info.prefix and prefix not in self._begun]
        # Attempts of this start belong to ranks that lead, or to a lost coordinator that this one has replaced.
        led = others.count(info.attempt.start)
        lead = max(led, 1 if info.world_size > 1 else 0)
        count = left.surplus + left.dead + len(others) - led + lead + len(begun) + 1
        nbytes = left.nbytes + sum(self._nbytes[other.prefix] for other in begun) + (lead + 1) * own
        return count <= SPARE or (count <= SMALL_MAX and nbytes <= SMALL_BYTES)

    def _left_of(self, info: AttemptInfo) -> _Left:
        return self._left.get(self._scope(info), _Left())

    async def _is_led(self, *attempts: AttemptInfo) -> bool:
        """Whether the coordinator is known to have begun one of `attempts`."""

        async def look() -> None:
            for info in attempts:
                if await self._is_begun(info):
                    self._led.add(info.prefix)
                    return

        if not any(info.prefix in self._led for info in attempts):
            await self._looked(f"begun {attempts[-1].prefix}", look)
        return any(info.prefix in self._led for info in attempts)

    async def _is_begun(self, info: AttemptInfo) -> bool:
        """Whether the coordinator is known to have begun the attempt."""
        try:
            return (await root_view.read_vote(self._store, info.key(vote_name(COORDINATOR)))).vote == "yes"
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

    def ask(self, info: AttemptInfo) -> None:
        """Have dead attempts removed soon, since the coordinator's attempt `info` is decided (TIDY-1)."""
        if not self._sees_all and len(self._tags) <= TAGS_MAX:  # with more, the next look is at all tags
            self._tags.add(info.tag)
        self._start = max(self._start, info.attempt.start)
        self._asked += 1
        self._begin_look()

    def committed_alone(self, info: AttemptInfo) -> bool:
        """Whether the attempt, which has committed, is all that there is at its tag, so that nothing can be removed there, and
        no other tag is due. Then it is over, and needs no `ask`.
        """
        is_alone = not self._sees_all and self._left_of(info).is_bare and not info.may_be_taken_over and not self._tags
        if is_alone:
            self._drop(info.prefix)
            self._left.pop(self._scope(info), None)  # the next save of this tag replaces this one
            self._changed.set()
        return is_alone

    async def tidy(self, info: AttemptInfo) -> None:
        """`ask`, and return when a look that began after this call has ended, even if it failed. Cancelling this call does not
        cancel the look.
        """
        self.ask(info)
        await self.rest()

    async def rest(self) -> None:
        """Return when the removals that have been asked for are over."""
        mine = self._asked
        self._resting += 1
        self._awaited.set()
        try:
            while self._served < mine:
                self._begin_look()
                assert self._look is not None
                await asyncio.wait({self._look})
        finally:
            self._resting -= 1
            if not self._resting:
                self._awaited.clear()

    async def finish(self) -> None:
        """`rest`, for a writer that closes. If the newest checkpoint is small, it is read back, so that one that stays only
        until then can go.
        """
        await self.rest()
        surplus = self._left.get(EVERYTHING, _Left()).surplus
        if surplus and not self._is_over and await prove_newest(self._store, SMALL_BYTES):
            self._asked += 1
            await self.rest()

    async def close(self) -> None:
        """Stop removing. The next save at the root removes the rest. Waits at most ANSWER_S for the storage."""
        self._is_closed = True
        tasks = [task for task in (self._look, self._deciding, self._proving, *self._looks.values()) if task is not None]
        if not await stopped(tasks, ANSWER_S):
            log.warning("%s has not answered for %g s, and is not waited for", self._store.url, ANSWER_S)

    def _begin_look(self) -> None:
        if self._look is None or self._look.done():
            self._look = asyncio.get_running_loop().create_task(self._look_on())

    async def _look_on(self) -> None:
        """Look until every request is served."""
        loop = asyncio.get_running_loop()
        while self._served < self._asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._pause_until):
                    await self._awaited.wait()
            began = loop.time()
            await self._look_around()
            self._pause_until = loop.time() + min((loop.time() - began) * (1 / SHARE - 1), PAUSE_S_MAX)

    async def _look_around(self) -> None:
        asked, tags, ended = self._asked, self._tags, frozenset(self._ended)
        self._tags = set()
        is_due = asked - self._served_everywhere >= EVERYTHING_EVERY
        scopes = [EVERYTHING] if self._sees_all or is_due or len(tags) > TAGS_MAX else sorted(tags)
        if scopes == [EVERYTHING]:
            self._served_everywhere = asked
        try:
            for scope in scopes:
                await self._remove(scope)
        except CheckpointdError as error:
            self._due_again(tags)
            log.warning("leftovers at %s could not be removed: %s; the next save tries again", self._store.url, error)
        except Exception:
            log.exception("removing leftovers at %s failed in an unforeseen way; please report it", self._store.url)
        finally:
            for prefix in ended:
                self._drop(prefix)
            used = {self._scope(info) for info in (*self._waiting.values(), *self._begun.values())}
            self._left = {scope: left for scope, left in self._left.items() if scope in {EVERYTHING, *used}}
            if not self._is_over:
                # A storage that removes nothing costs space and no save (TIDY-4), so what could not go counts no longer.
                self._left = {scope: replace(left, dead=0) for scope, left in self._left.items()}
            self._look_again_at = asyncio.get_running_loop().time() + LOOK_S
            self._served = asked
            self._changed.set()

    def _due_again(self, tags: Collection[str]) -> None:
        """Look at these tags, of which not all could be removed, at the next removal, too. Only a few: a job may lack the right
        to remove anything.
        """
        self._tags.update(islice(tags, max(0, DUE_AGAIN_MAX - len(self._tags))))

    def _drop(self, prefix: str) -> None:
        """Count the attempt no longer."""
        self._begun.pop(prefix, None)
        self._nbytes.pop(prefix, None)
        self._ended.discard(prefix)
        self._led.discard(prefix)

    async def _views(self, scope: str) -> list[AttemptView]:
        objects = self._store if self._store.capabilities.at_once > 1 else InTurn(self._store)
        if scope:
            return await root_view.attempts_of(self._store, scope, objects)
        return await root_view.scan(self._store, objects)

    async def _remove(self, scope: str) -> None:
        """Remove dead attempts in `scope`, and note what is left there.

        If there is a newer start, this only looks, since the coordinator of that start removes. If the root is
        another one, it raises (TIDY-5).
        """
        scopes = [scope] if self._sees_all or scope else list(self._left)
        self._is_over = await starts.newest(self._store) > self._start
        if self._is_over:
            for looked in scopes:
                self._left[looked] = left = await self._seen(looked)
                count = left.surplus + left.dead + len(left.undecided)
                self._gone += max(0, self._counted.get(looked, count) - count)
                self._counted[looked] = count
            return
        await self._check_root(self._start)
        views = await self._views(scope)
        await self._check_root(self._start)
        done = await reserve.on_full_disk(
            self._store,
            lambda: retire(
                self._store,
                views,
                self._commit.retention,
                start=self._start,
                keeps_before=self.keeps_before,
                exports=self._heeded,
                kept=self._kept,
            ),
        )
        await RootLog.of(self._store).compact()
        for looked in scopes:
            own = [view for view in views if not looked or view.tag == looked]
            self._left[looked] = await self._left_in(own, done.choice.surplus, ())
        if scope and not done.is_complete:
            self._due_again({scope})
        if not self._sees_all:
            self._due_again({prefix.rpartition("/")[0] for prefix in done.choice.exporting})
        self._say(done)

    @property
    def _heeded(self) -> ExportLeases | None:
        """The exports for which checkpoints stay."""
        return self._exports if self._heeds_exports else None

    def _say(self, done: Retired) -> None:
        for removal in done.removed:
            self.freed += removal.freed_bytes
            freed = byte_size(removal.freed_bytes)
            log.info("removed %s/%s (%s) as user %s: %s", removal.tag, removal.attempt, freed, user(), removal.reason)
        complaint = done.choice.unknown_metric
        if complaint is not None and complaint != self._complaint:
            log.error(
                "retention at %s removes nothing: %s. Mend Retention(metric=...), or save(metrics=...)",
                self._store.url,
                complaint,
            )
        self._complaint = complaint

    async def _left_in(self, views: Sequence[AttemptView], surplus: Sequence[str], dead: Collection[str]) -> _Left:
        """What the undecided attempts among `views`, and those of `surplus` and `dead` among them, take."""
        in_doubt = [view for view in views if view.state == "in-doubt"]
        undecided = {view.prefix: view.attempt.start for view in in_doubt if view.has_shards}
        bare = {view.prefix: view.attempt.start for view in in_doubt if not view.has_shards}
        leased = await leases.leased(self._store) if bare else ()
        sizes = {view.prefix: view.nbytes for view in views}
        extra, going = [one for one in {*surplus, *self._pinned()} if one in sizes], [one for one in dead if one in sizes]
        nbytes = sum(sizes[prefix] for prefix in (*undecided, *extra, *going))
        promised = {prefix: start for prefix, start in bare.items() if prefix in leased}
        return _Left(undecided, promised, len(extra), len(going), nbytes, not views)
