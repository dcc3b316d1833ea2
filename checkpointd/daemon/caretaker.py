"""Looks after the roots that a daemon serves: what they hold, for the status, and attempts that were left in doubt.

Invariants
  R1  Nothing that a root does, or does not answer, keeps another root waiting, or ends the caretaker.
  R2  A look takes at most `look_s`; what went wrong stands in `hub.looks[root].problem`, beside what was last seen.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from checkpointd.daemon.doubts import Doubts
from checkpointd.daemon.hub import Hub, Look
from checkpointd.daemon.looks import Looker
from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.layout.manifest import ErrorReport

log = logging.getLogger("checkpointd")

ROOTS_MAX = 64
"""So many roots are looked after: those in use first, then those that clients joined last, then what lies on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How often the roots are looked at, and how patiently; seconds."""

    busy_s: float = 10.0
    """Between two looks while anything is in flight or in doubt."""
    idle_s: float = 60.0
    look_s: float = 30.0
    patience_s: float = 5.0
    grace_s: float = 600.0
    """How long nothing may have happened in an attempt of a dead job before it is aborted, unless its ranks had longer."""


@dataclass(slots=True)
class _Root:
    """One root that is looked after."""

    doubts: Doubts
    task: asyncio.Task[None] | None = None
    looker: Looker = field(default_factory=Looker)
    soon: asyncio.Event = field(default_factory=asyncio.Event)


class Caretaker:
    """Keeps `hub.looks` fresh, and decides what nobody else will."""

    def __init__(self, hub: Hub, care: Care | None = None) -> None:
        self._hub, self._care = hub, care or Care()
        self._roots: dict[str, _Root] = {}
        self._found = asyncio.Event()

    def look_soon(self, root: str) -> None:
        """Look at `root` again now: something was committed there, or a client has joined it."""
        known = self._roots.get(root)
        if known is not None:
            known.soon.set()
        else:
            self._found.set()

    def remade(self, root: str) -> None:
        """What was seen at `root` was another root's, which was removed."""
        known = self._roots.get(root)
        if known is not None:
            known.looker, known.doubts = Looker(), self._new_root().doubts
            known.soon.set()

    async def run(self) -> None:
        """Look after the roots until cancelled."""
        try:
            while True:
                self._hub.memory.release_lingering()
                await self._watch(await self._all_roots())
                await _either(self._found, self._care.busy_s if self._hub.jobs.all() else self._care.idle_s)
        finally:
            await self._end(list(self._roots))

    async def look(self, root: str) -> None:
        """One look at `root`, with what follows from it; errors end up in the look. Made by `run` for every root."""
        known = self._roots.setdefault(root, self._new_root())
        before = self._hub.looks.get(root, Look())
        self._hub.looking_at.add(root)
        try:
            async with asyncio.timeout(self._care.look_s):
                await self._attend(root, known)
        except TimeoutError:
            self._problem(root, before, StoreError(f"{root} has not answered for {self._care.look_s:g} s"))
        except CheckpointdError as error:
            self._problem(root, before, error)
        except Exception as error:  # R1: a defect of ours must not end it
            log.exception("looking after %s failed in an unforeseen way; please report it", root)
            self._problem(root, before, CheckpointdError(f"looking after it failed: {error!r}"))
        finally:
            self._hub.looking_at.discard(root)

    async def _attend(self, root: str, known: _Root) -> None:
        store = await self._hub.roots.opened(root)
        look, in_doubt = await known.looker.look(store)
        self._show(root, look)
        if self._hub.leaving:
            return
        busy = {job.info.prefix for job in self._hub.jobs.at(root)}
        if await known.doubts.settle(store, in_doubt, busy, asyncio.get_running_loop().time()):
            look, _ = await known.looker.look(store)
            self._show(root, look)

    def _show(self, root: str, look: Look) -> None:
        before = self._hub.looks.get(root)
        if before is not None and before.problem is not None and look.problem is None:
            log.info("%s can be looked after again", root)
        self._hub.looks[root] = look

    def _problem(self, root: str, before: Look, error: CheckpointdError) -> None:
        """Keep what was last seen, and say what is wrong; once, where it stays the same."""
        seen = self._hub.looks.get(root, before)
        if before.problem is None or before.problem.message != str(error):
            log.error("%s cannot be looked after: %s", root, error)
        self._hub.looks[root] = replace(seen, problem=ErrorReport(code=error.code, message=str(error)))

    # --- which roots -----------------------------------------------------------------------------------------------

    async def _all_roots(self) -> list[str]:
        """The roots that clients joined, then those that lie on disk."""
        found: list[str] = []
        try:
            found = await self._hub.roots.seen()
        except StoreError as error:
            log.error("the roots on disk cannot be listed: %s", error)
        return list(dict.fromkeys([*self._hub.roots_by_use(), *found]))[:ROOTS_MAX]

    def _new_root(self) -> _Root:
        return _Root(Doubts(self._care.grace_s, self._care.patience_s))

    async def _watch(self, roots: list[str]) -> None:
        gone = [root for root in self._roots if root not in roots]
        await self._end(gone)
        for root in gone:
            self._hub.looks.pop(root, None)
        for root in roots:
            known = self._roots.setdefault(root, self._new_root())
            if known.task is None:
                known.task = asyncio.create_task(self._look_on(root, known))

    async def _look_on(self, root: str, known: _Root) -> None:
        while True:
            await self.look(root)
            is_busy = bool(self._hub.jobs.at(root)) or known.doubts.any
            await _either(known.soon, self._care.busy_s if is_busy else self._care.idle_s)

    async def _end(self, roots: list[str]) -> None:
        tasks = [task for root in roots if (task := self._roots.pop(root).task) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for `event`, which is then clear again, or for `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    finally:
        event.clear()
