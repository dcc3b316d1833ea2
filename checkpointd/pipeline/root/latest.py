"""Moves `latest`, which names the newest checkpoint for people and other programs. No decision here reads it.

Invariant
  POINTER-1  `latest` is replaced only if it has not changed since the log was read, and the log is read again afterwards. A
      symbolic link at `latest` is never followed: the next move replaces the link and leaves its target alone.
"""

from __future__ import annotations

import asyncio
import logging

from checkpointd.commands import at_tag, command
from checkpointd.commit.branches import newest_of
from checkpointd.errors import DamagedError, LinkError, NotFoundError, StoreError
from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LOOKS_MAX = 8
PATIENCE_S = 30.0
"""How long a move of `latest` may take. The holder of the lock may have been stopped."""


def going_back(root: str, tag: str) -> str:
    """What to do instead of writing `tag` into `latest`."""
    back = command("rollback", *at_tag(root, tag))
    return f"An edit of {LATEST} alone changes no load; to go back to {tag}, stop the job: {back}"


async def move_latest(root_log: RootLog, *, is_start: bool = False) -> str | None:
    """Let `latest` name the newest checkpoint that asked for it, or remove it if there is none. Returns the tag that it names
    now.

    `is_start`: a `latest` that another program has written stays, since that save may be newer. Raises StoreError if the
    storage fails, or if this takes longer than PATIENCE_S.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _moved(root_log, is_start=is_start)
    except TimeoutError as error:
        raise StoreError(f"latest at {root_log.store.url} could not be moved within {PATIENCE_S:g} s") from error


async def _moved(root_log: RootLog, *, is_start: bool) -> str | None:
    store = root_log.store
    for _ in range(LOOKS_MAX):
        there = await _there(store)  # before the log: whatever put it has read the log before
        newest = newest_of(seen := await root_log.look(settles=True))
        if root_log.fault:
            raise StoreError(root_log.unreadable)
        if there is not None and (is_start or newest is None) and await _is_of_others(store, there):
            return None
        wanted = None if newest is None else f"{newest.tag}\n".encode()
        if wanted is None:
            if there is not None:
                await store.delete(LATEST)
        elif there != wanted and not await store.put_if_match(LATEST, there, wanted):
            continue
        after = newest if (state := await root_log.look()) is seen else newest_of(state)
        if (after and after.prefix) == (newest and newest.prefix):
            return None if newest is None else newest.tag
    raise StoreError(f"latest at {store.url} was moved by others at each of {LOOKS_MAX} looks")


async def _there(store: Store) -> bytes | None:
    """The content of `latest`; None if there is none, or a symbolic link. One that is too long to be a tag goes."""
    try:
        return await store.get(LATEST, size_max=root_view.LATEST_BYTES_MAX)
    except (NotFoundError, LinkError):
        return None
    except DamagedError as error:
        log.warning("%s; it is written anew", error)
        await store.delete(LATEST)
        return None


async def _is_of_others(store: Store, content: bytes) -> bool:
    try:
        return await root_view.is_of_another_program(store, content.decode())
    except UnicodeDecodeError:
        return False
