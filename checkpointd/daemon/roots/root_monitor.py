"""Looks after the roots that a daemon serves: scans them for the status, and decides attempts in doubt.

Invariants
  MONITOR-1  A root that fails or does not answer neither delays another root nor ends the monitor.
  MONITOR-2  A look goes on while the storage answers: it ends if no answer has come for `look_s`, and after `look_most_s`. So a
      long history is looked at to its end. An error is kept in `hub.root_scans[root].problem`, beside the last good scan. If a
      bucket has not answered for `ask_s`, it is asked once more, without patience, so that the reason is known within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from checkpointd.daemon import inline_saves
from checkpointd.daemon.hub import Hub, RootScan
from checkpointd.daemon.process.logs import Subject, about
from checkpointd.daemon.roots.in_doubt import InDoubtAttempts
from checkpointd.daemon.roots.root_scan import RootScanner
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, Store
from checkpointd.store.passing import PassingStore

log = logging.getLogger("checkpointd")
T = TypeVar("T")

ROOTS_MAX = 64
"""Roots that the daemon looks after: first those in use, then those that clients joined last, then those on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorPace:
    """How often the monitor looks at the roots, and how long it waits; seconds."""

    busy_s: float = 10.0
    """Between two looks while a save is in flight or an attempt in doubt."""
    idle_s: float = 60.0
    ask_s: float = 2.0
    look_s: float = 30.0
    look_most_s: float = 600.0
    patience_s: float = 5.0
    grace_s: float = 600.0
    """How long an attempt of a dead job must be unchanged before it is aborted, unless its ranks had more time."""


class _Answering(PassingStore):
    """`store`. Calls `on_answer` at the end of each question, and with True if the storage has answered it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.on_answer: Callable[[bool], None] = lambda _: None

    def shows(self, store: Store) -> bool:
        return self._store is store

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        return await self._answer(self._store.get(key, size_max=size_max))

    async def list(self, prefix: str) -> list[Entry]:
        return await self._answer(self._store.list(prefix))

    async def stat(self, key: str) -> int | None:
        return await self._answer(self._store.stat(key))

    async def _answer(self, question: Awaitable[T]) -> T:
        has_answered = False
        try:
            found = await question
            has_answered = True
        except (NotFoundError, DamagedError):
            has_answered = True
            raise
        finally:
            self.on_answer(has_answered)
        return found


@dataclass(slots=True)
class _MonitoredRoot:
    """One root that the monitor looks after."""

    doubts: InDoubtAttempts
    task: asyncio.Task[None] | None = None
    scanner: RootScanner = field(default_factory=RootScanner)
    store: _Answering | None = None
    soon: asyncio.Event = field(default_factory=asyncio.Event)


class RootMonitor:
    """Keeps `hub.root_scans` up to date, and decides attempts that nobody else will decide."""

    def __init__(self, hub: Hub, pace: MonitorPace | None = None) -> None:
        self._hub, self._pace = hub, pace or MonitorPace()
        self._roots: dict[str, _MonitoredRoot] = {}
        self._seen: list[list[str]] = [[], []]
        """The roots that were found at the configured places: on disk, and in buckets."""
        self._finding: asyncio.Task[None] | None = None
        self._found = asyncio.Event()

    def look_soon(self, root: str) -> None:
        """Look at `root` now, because a save ended there or a client joined it."""
        known = self._roots.get(root)
        if known is not None:
            known.soon.set()
        else:
            self._found.set()

    def remade(self, root: str) -> None:
        """Forget what was seen at `root`, which was removed and made again."""
        known = self._roots.get(root)
        if known is not None:
            known.scanner, known.doubts = RootScanner(), self._new_root().doubts
            known.soon.set()

    async def run(self) -> None:
        """Look after the roots until cancelled."""
        try:
            while True:
                self._hub.memory.release_lingering()
                self._hub.forget_old(time.time())
                self._hub.said.say_left_out()
                if self._finding is None or self._finding.done():
                    self._finding = asyncio.create_task(self._find())
                await self._watch(self._all_roots())
                await _either(self._found, self._pace.busy_s if self._hub.jobs.all() else self._pace.idle_s)
        finally:
            if self._finding is not None:
                self._finding.cancel()
                await asyncio.gather(self._finding, return_exceptions=True)
            await self._end(list(self._roots))

    async def look(self, root: str) -> None:
        """Scan `root`, decide attempts there, and keep any error in the scan. `run` calls this for every root."""
        known = self._roots.setdefault(root, self._new_root())
        before = self._hub.root_scans.get(root, RootScan())
        self._hub.looking_at.add(root)
        began = asyncio.get_running_loop().time()
        silent: list[CheckpointdError] = []
        asking = asyncio.create_task(self._ask(root, before, silent))

        def on_answer(has_answered: bool) -> None:
            asking.cancel()
            if silent and has_answered:
                silent.clear()
                self._show(root, replace(self._hub.root_scans[root], problem=before.problem))
            self._extend(limit, began)

        try:
            async with asyncio.timeout(self._pace.look_s) as limit:
                await self._attend(root, known, on_answer)
        except TimeoutError:
            self._problem(root, before, silent[0] if silent else StoreError(self._why_given_up(root, began)))
        except CheckpointdError as error:
            self._problem(root, before, silent[0] if silent and isinstance(error, StoreError) else error)
        except Exception as error:  # MONITOR-1: a defect must not end the monitor
            log.exception("looking after %s failed in an unforeseen way; please report it", root)
            self._problem(root, before, CheckpointdError(f"looking after it failed: {error!r}"))
        finally:
            asking.cancel()
            self._hub.looking_at.discard(root)

    async def _ask(self, root: str, before: RootScan, silent: list[CheckpointdError]) -> None:
        """After `ask_s`, find out why the bucket of `root` does not answer, and note it in `silent`. The look goes on."""
        await asyncio.sleep(self._pace.ask_s)
        try:
            await self._hub.roots.check_answers(root)
        except CheckpointdError as error:
            silent.append(error)
            self._problem(root, before, error)

    def _extend(self, limit: asyncio.Timeout, began: float) -> None:
        """The storage has answered, so the look may go on (MONITOR-2)."""
        if not limit.expired():
            now = asyncio.get_running_loop().time()
            limit.reschedule(min(now + self._pace.look_s, began + self._pace.look_most_s))

    def _why_given_up(self, root: str, began: float) -> str:
        if asyncio.get_running_loop().time() - began >= self._pace.look_most_s:
            return f"looking at {root} took longer than {self._pace.look_most_s:g} s; is its storage slow?"
        return f"{root} has not answered for {self._pace.look_s:g} s"

    async def _attend(self, root: str, known: _MonitoredRoot, on_answer: Callable[[bool], None]) -> None:
        found = await self._hub.roots.looked_after(root, self._hub.users_at(root))
        if known.store is None or not known.store.shows(found):
            known.store = _Answering(found)
        store = known.store
        store.on_answer = on_answer
        busy = self._busy(root)
        look, in_doubt = await known.scanner.look(store, await self._hub.roots.room(root))
        self._show(root, look)
        await inline_saves.find(self._hub, root, store, known.scanner.fresh)
        known.scanner.fresh.clear()
        if self._hub.leaving:
            return
        # A job may have ended since the look began. What it has left is seen by the next look.
        busy |= self._busy(root)
        if await known.doubts.settle(store, in_doubt, busy, asyncio.get_running_loop().time()):
            look, _ = await known.scanner.look(store)
            self._show(root, look)

    def _busy(self, root: str) -> set[str]:
        """The attempts at which a save job of this daemon works."""
        return {job.info.prefix for job in self._hub.jobs.at(root)}

    def _show(self, root: str, look: RootScan) -> None:
        before = self._hub.root_scans.get(root)
        if before is not None and before.problem is not None and look.problem is None:
            log.info("%s can be looked after again", root)
        self._hub.root_scans[root] = look

    def _problem(self, root: str, before: RootScan, error: CheckpointdError) -> None:
        """Keep the last good scan with the problem, and log the problem if it is new."""
        seen = self._hub.root_scans.get(root, before)
        if str(error) not in [known.problem.message for known in (before, seen) if known.problem is not None]:
            log.error("%s cannot be looked after: %s", root, error)
        self._hub.root_scans[root] = replace(seen, problem=ErrorReport.of(error))

    # --- which roots -----------------------------------------------------------------------------------------------

    async def _find(self) -> None:
        """Look for roots at the configured places, beside the looks at those that are known: a bucket may be silent."""
        for at, look in enumerate((self._hub.roots.seen_on_disk, self._hub.roots.seen_in_buckets)):
            try:
                found = await look()
            except StoreError as error:
                log.error("the roots on disk cannot be listed: %s", error)
                continue
            if found != self._seen[at]:
                self._seen[at] = found
                self._found.set()

    def _all_roots(self) -> list[str]:
        """The roots that clients joined, then those that were found."""
        ranked = list(dict.fromkeys([*self._hub.roots_by_use(), *self._seen[0], *self._seen[1]]))
        self._hub.not_looked_after = ranked[ROOTS_MAX:]
        return ranked[:ROOTS_MAX]

    def _new_root(self) -> _MonitoredRoot:
        return _MonitoredRoot(InDoubtAttempts(self._pace.grace_s, self._pace.patience_s))

    async def _watch(self, roots: list[str]) -> None:
        gone = [root for root in self._roots if root not in roots]
        await self._end(gone)
        for root in gone:
            self._hub.root_scans.pop(root, None)
        for root in roots:
            known = self._roots.setdefault(root, self._new_root())
            if known.task is None:
                known.task = asyncio.create_task(self._look_on(root, known))

    async def _look_on(self, root: str, known: _MonitoredRoot) -> None:
        about(Subject(root))
        while True:
            await self.look(root)
            is_busy = bool(self._hub.jobs.at(root)) or known.doubts.any
            await _either(known.soon, self._pace.busy_s if is_busy else self._pace.idle_s)

    async def _end(self, roots: list[str]) -> None:
        tasks = [task for root in roots if (task := self._roots.pop(root).task) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for `event` or for `seconds`, then clear the event."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    finally:
        event.clear()
