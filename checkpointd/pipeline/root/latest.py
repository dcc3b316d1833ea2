"""Moves `latest`: only after the outcome, and only forward.

Invariants
  POINTER-1  A symbolic link at `latest` is never followed. The next move replaces the link and leaves its target alone.
  POINTER-2  Who moved `latest` off a tag, or may have done so, looks at that tag once more, and gives `latest` back if a newer
      save has committed the tag meanwhile. That save found `latest` at its tag already, or moved it there again. In both cases
      the content is the same, so the mover's put could not tell.
  POINTER-3  A commit does not move `latest` off a newer commit that was removed: retention removes what `latest` does not name
      yet, and the commit after that one is about to move it on. Only a start, and whoever removes what `latest` names, moves it
      back.
  POINTER-4  Who decides an attempt late may find its checkpoint removed before `latest` could be moved to it. So `latest` moves
      to the newest checkpoint, and away from it again if it was removed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from checkpointd.commit.decide import moves_latest
from checkpointd.commit.facts import Order
from checkpointd.errors import DamagedError, LinkError, NotFoundError, StoreError
from checkpointd.layout.keys import LATEST, OUTCOME, is_tag
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import LATEST_BYTES_MAX, Checkpoint
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LOOKS_MAX = 8
PATIENCE_S = 30.0
"""How long to wait for a process that holds the lock of `latest`. It may have been stopped while it held the lock."""


async def move_latest(store: Store, tag: str, order: Order, *, is_start: bool = False) -> bool:
    """Let `latest` name `tag`, whose commit has `order`, unless it names a newer checkpoint. Returns whether it was moved.

    `is_start`: the commit may be old, so a `latest` that another program has written stays, and what it names counts only if it
    was not removed. Otherwise it counts as well (POINTER-3).

    Raises StoreError if the storage fails, or if the move takes longer than PATIENCE_S.
    """
    return await _move(store, tag, order, is_start=is_start, counts_removed=not is_start)


async def move_latest_to_newest(store: Store) -> str | None:
    """Let `latest` name the newest checkpoint whose save asked for it, and no removed one (POINTER-4). A `latest` that another
    program has written stays, since that save may be newer.

    Returns the tag that `latest` names now. Raises StoreError as `move_latest` does.
    """
    newest = await _newest(store)
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
    moved = await _move(store, left.tag, left.outcome.order, is_start=False, counts_removed=False)
    return left.tag if moved else None


async def _newest(store: Store) -> Checkpoint | None:
    """The newest checkpoint whose save asked for `latest`. Its outcome is durable (COMMIT-3)."""
    for _ in range(LOOKS_MAX):
        attempts = await catalog.with_newest_looked(store, await catalog.scan(store))
        newest = next((c for c in catalog.checkpoints_of(attempts) if c.outcome.save_latest), None)
        if newest is None:
            return None
        with suppress(NotFoundError):  # it was removed since the look
            await store.settle(f"{newest.prefix}/{OUTCOME}")
            return newest
    raise StoreError(f"the newest checkpoint at {store.url} was removed at each of {LOOKS_MAX} looks")


async def _move(store: Store, tag: str, order: Order, *, is_start: bool, counts_removed: bool) -> bool:
    replaced: list[bytes | None] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            moved = await _put(store, tag, order, replaced, is_start=is_start, counts_removed=counts_removed)
    except (TimeoutError, StoreError) as error:
        with suppress(StoreError):  # the put may have been done all the same; the next start moves `latest` on
            await _give_back(store, replaced, order)
        if not isinstance(error, TimeoutError):
            raise
        raise StoreError(
            f"{LATEST} at {store.url} could not be moved within {PATIENCE_S:g} s: another process has held its lock, or "
            "this one was stopped, for that long"
        ) from error
    return moved and not await _give_back(store, replaced, order)


async def _put(
    store: Store, tag: str, order: Order, replaced: list[bytes | None], *, is_start: bool, counts_removed: bool
) -> bool:
    """Put `tag` at `latest`, unless that would move it back. `replaced` gets what it may have named before the put."""
    while True:
        current = await _content(store)
        if current == f"{tag}\n".encode():
            return False
        if is_start and await catalog.is_of_another_program(store, (current or b"").decode(errors="replace")):
            return False
        if not moves_latest(await _order_of(store, current, is_start=is_start, counts_removed=counts_removed), order):
            return False
        replaced[:] = [current]
        if await store.put_if_match(LATEST, current, f"{tag}\n".encode()):
            return True


async def _give_back(store: Store, replaced: Sequence[bytes | None], order: Order) -> bool:
    """Move `latest` off the commit of `order`, if the tag it named before has a newer commit now (POINTER-2)."""
    for content in replaced:
        newest = await _order_of(store, content, is_start=False, counts_removed=False)
        if content is not None and newest is not None and moves_latest(order, newest):
            await _move(store, content.decode().removesuffix("\n"), newest, is_start=False, counts_removed=True)
            return True
    return False


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


async def _order_of(store: Store, content: bytes | None, *, is_start: bool, counts_removed: bool) -> Order | None:
    """The order of the checkpoint that `content` names; None if it names none, so that any commit may replace it.

    With `counts_removed`, a removed checkpoint counts as long as its outcome is there (POINTER-3).
    """
    tag = (content or b"").decode(errors="replace").removesuffix("\n")
    if not is_tag(tag):
        return None
    try:
        return (await catalog.find(store, tag)).outcome.order
    except NotFoundError:
        removed = await catalog.attempts_of(store, tag) if counts_removed else ()
        return max(
            (view.outcome.order for view in removed if view.state == "deleted" and view.outcome is not None), default=None
        )
    except DamagedError:
        return None
    except LinkError:
        if is_start:
            raise  # the link at the tag may lead to the checkpoint
        return None  # the job has gone on without that checkpoint, so its new commit is newer
