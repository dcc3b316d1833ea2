"""Moves `latest`: only after the outcome, and only forward.

Invariants
  POINTER-1  A symbolic link at `latest` is never followed. The next move replaces the link and leaves its target alone.
  POINTER-2  Who moved `latest` off a tag, or may have done so, looks at that tag once more, and gives `latest` back if a newer
      save has committed the tag meanwhile. That save found `latest` at its tag already, or moved it there again. In both cases
      the content is the same, so the mover's put could not tell. If `latest` has left the mover's tag by then, and the newer
      save asked for `latest`, it is an ordinary move to that save's tag.
  POINTER-3  A commit does not move `latest` off a newer commit that was removed: retention removes what `latest` does not name
      yet, and the commit after that one is about to move it on. Only a start, and whoever removes what `latest` names, moves it
      back.
  POINTER-4  Who decides an attempt late may find its checkpoint removed before `latest` could be moved to it. So `latest` moves
      to the newest checkpoint, and away from it again if it was removed meanwhile.
  POINTER-5  Who leaves `latest` at a commit relies on it, so it makes durable first what their writers may not have: `latest`,
      and the outcome of that commit. Who gives `latest` back makes durable the outcome that it gives it back to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from checkpointd.commit.decide import moves_latest
from checkpointd.commit.facts import Order
from checkpointd.errors import DamagedError, LinkError, NotFoundError, StoreError
from checkpointd.layout.keys import LATEST, OUTCOME, is_tag
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import LATEST_BYTES_MAX, Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LOOKS_MAX = 8
PATIENCE_S = 30.0
"""How long a move of `latest` may take, and then its look at what it replaced. The holder of the lock may have been stopped."""


async def move_latest(store: Store, tag: str, order: Order, *, is_start: bool = False) -> bool:
    """Let `latest` name `tag`, whose commit has `order`, unless it names a newer checkpoint. Returns whether it was moved.

    `is_start`: the commit may be old, so a `latest` that another program has written stays, and what it names counts only if it
    was not removed. Otherwise it counts as well (POINTER-3).

    Raises StoreError if the storage fails, or if the move, or its look at what it replaced, takes longer than PATIENCE_S.
    """
    return await _Mover(store, tag, order, is_start=is_start, counts_removed=not is_start).run()


async def move_latest_to_newest(store: Store, known: CatalogLog | None = None) -> str | None:
    """Let `latest` name the newest checkpoint whose save asked for it, and no removed one (POINTER-4). A `latest` that another
    program has written stays, since that save may be newer. `known`: the catalog's log as this process has read it already.

    Returns the tag that `latest` names now. Raises StoreError as `move_latest` does.
    """
    newest = await _newest(store, known)
    if newest is not None:
        await move_latest(store, newest.tag, newest.outcome.order, is_start=True)
    named = await catalog.readable_latest(store)
    if named is not None and await _is_removed(store, named):
        return await move_latest_away(store, named)
    return named


async def _is_removed(store: Store, tag: str) -> bool:
    """Whether this project has removed the checkpoint of `tag`, and no other was saved there."""
    if not is_tag(tag):
        return False
    states = {view.state for view in await catalog.attempts_of(store, tag)}
    return "deleted" in states and states.isdisjoint({"committed", "damaged", "unreadable"})


async def move_latest_away(store: Store, tag: str) -> str | None:
    """If `latest` names the removed `tag`, let it name the newest checkpoint that is left, or remove it if there is none.

    Returns the tag that `latest` names now, if it was moved.
    """
    if await catalog.readable_latest(store) != tag:
        return None
    left = await _newest(store)
    if left is None:
        await store.delete(LATEST)
        left = await _newest(store)  # a commit meanwhile may have been named by the `latest` that was just removed
    if left is None:
        return None
    mover = _Mover(store, left.tag, left.outcome.order, is_start=False, counts_removed=False)
    return left.tag if await mover.run() else None


async def _newest(store: Store, known: CatalogLog | None = None) -> Checkpoint | None:
    """The newest checkpoint whose save asked for `latest`. Its outcome is durable (COMMIT-3)."""
    for _ in range(LOOKS_MAX):
        attempts = await catalog.with_newest_looked(store, await catalog.scan(store, known, newest=0))
        newest = next((c for c in catalog.checkpoints_of(attempts) if c.may_be_latest), None)
        if newest is None:
            return None
        with suppress(NotFoundError):  # it was removed since the look
            await store.settle(f"{newest.prefix}/{OUTCOME}")
            return newest
    raise StoreError(f"the newest checkpoint at {store.url} was removed at each of {LOOKS_MAX} looks")


class _Named(NamedTuple):
    """A checkpoint that `latest` names: its order, the key of its outcome, and whether its save asked for `latest`."""

    order: Order
    outcome: str
    asked: bool


@dataclass(slots=True)
class _Mover:
    """One move of `latest` to the commit of `order` at `tag`. If it is cancelled, the next commit or start goes on."""

    store: Store
    tag: str
    order: Order
    is_start: bool
    counts_removed: bool
    replaced: bytes | None = None
    """What `latest` named before the put, which may have been done."""

    async def run(self) -> bool:
        """Returns whether `latest` was moved, and names the tag for all that this move knows."""
        moving, looking = "could not be moved", "was moved, but whether it has to go back could not be told"
        try:
            moved = await self._within_patience(self._put(), moving)
        except StoreError:
            with suppress(StoreError):
                await self._within_patience(self._give_back(), looking)
            raise
        return moved and not await self._within_patience(self._give_back(), looking)

    async def _within_patience(self, step: Coroutine[Any, Any, bool], fault: str) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await step
        except TimeoutError as error:
            raise StoreError(
                f"{LATEST} at {self.store.url} {fault} within {PATIENCE_S:g} s: another process holds its lock, the storage "
                "does not answer, or this process was stopped meanwhile"
            ) from error

    async def _put(self) -> bool:
        """Put the tag at `latest`, unless that would move it back."""
        own = _content_of(self.tag)
        while True:
            current = await _content(self.store)
            with suppress(NotFoundError):  # what is to be settled is gone since the look: look again
                if current == own or await self._stays(current):
                    await self.store.settle(LATEST)
                    return False
                self.replaced = current
                if await self.store.put_if_match(LATEST, current, own):
                    return True

    async def _stays(self, current: bytes | None) -> bool:
        """Whether `latest`, whose content is `current`, does not move. The commit that it names is then durable (POINTER-5)."""
        if self.is_start and await catalog.is_of_another_program(self.store, (current or b"").decode(errors="replace")):
            return True
        named = await _named(self.store, current, is_start=self.is_start, counts_removed=self.counts_removed)
        if named is None or moves_latest(named.order, self.order):
            return False
        await self.store.settle(named.outcome)
        return True

    async def _give_back(self) -> bool:
        """If the tag that `latest` named before has a newer commit now, give `latest` back to it (POINTER-2). And so on, if the
        tag that `latest` leaves now was committed again, too. Returns whether `latest` is known to name another tag.
        """
        here, there, order = _content_of(self.tag), self.replaced, self.order
        with suppress(NotFoundError):  # it was removed since the look
            while there is not None:
                newest = await _named(self.store, there, is_start=False, counts_removed=False)
                if newest is None or not moves_latest(order, newest.order):
                    break
                await self.store.settle(newest.outcome)
                if not await self.store.put_if_match(LATEST, here, there):
                    if newest.asked:  # `latest` may have moved on to yet another commit that is older
                        await replace(self, tag=_tag_in(there), order=newest.order, counts_removed=True, replaced=None).run()
                    return await _content(self.store) != _content_of(self.tag)
                here, there, order = there, here, newest.order
        return here == self.replaced


def _content_of(tag: str) -> bytes:
    return f"{tag}\n".encode()


def _tag_in(content: bytes | None) -> str:
    return (content or b"").decode(errors="replace").removesuffix("\n")


async def _content(store: Store) -> bytes | None:
    try:
        return await store.get(LATEST, size_max=LATEST_BYTES_MAX)
    except NotFoundError:
        return None
    except LinkError:
        # checkpointd did not make it. The next put replaces the link and leaves its target alone (POINTER-1).
        log.warning("%s at %s is a symbolic link: a file takes its place. Its target is not touched", LATEST, store.url)
        return None
    except DamagedError:
        # Far too long for a tag, so checkpointd did not write it. It cannot be compared and replaced, so it is removed.
        await store.delete(LATEST)
        return None


async def _named(store: Store, content: bytes | None, *, is_start: bool, counts_removed: bool) -> _Named | None:
    """The checkpoint that `content` names; None if it names none, so that any commit may replace it.

    With `counts_removed`, a removed checkpoint counts as long as its outcome is there (POINTER-3).
    """
    tag = _tag_in(content)
    if not is_tag(tag):
        return None
    try:
        found = await catalog.find(store, tag)
        return None if found.left_behind else _named_by(found)
    except NotFoundError:
        removed = await catalog.attempts_of(store, tag) if counts_removed else ()
        outcomes = [(view, view.outcome) for view in removed if view.state == "deleted" and view.outcome is not None]
        return max((_named_by(Checkpoint(tag, view.attempt, outcome)) for view, outcome in outcomes), default=None)
    except DamagedError:
        return None
    except LinkError:
        if is_start:
            raise  # the link at the tag may lead to the checkpoint
        return None  # the job has gone on without that checkpoint, so its new commit is newer


def _named_by(checkpoint: Checkpoint) -> _Named:
    return _Named(checkpoint.outcome.order, f"{checkpoint.prefix}/{OUTCOME}", checkpoint.outcome.save_latest)
