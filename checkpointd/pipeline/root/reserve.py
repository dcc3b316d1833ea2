"""The ballast: disk space kept in reserve at the root, so that a start can write its small objects on a full disk.

Without it, the leftovers of a dead job could fill the disk, and the start that would remove them could not write.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from checkpointd.errors import StoreError, StoreFullError
from checkpointd.layout.keys import SERVICE
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")
T = TypeVar("T")

KEY = f"{SERVICE}/ballast"
BALLAST_BYTES = 256 << 10


async def drop(store: Store) -> None:
    """Give the space back to the disk."""
    await store.delete(KEY)


async def take_aboard(store: Store) -> None:
    """Put the ballast if it is missing and the store can be full. A disk without room for it is not an error."""
    if not store.capabilities.can_be_full:
        return
    try:
        if await store.stat(KEY) is None:
            await store.put_if_absent(KEY, bytes(BALLAST_BYTES))
    except StoreError as error:
        log.warning("no room for %d bytes of ballast at %s: %s", BALLAST_BYTES, store.url, error)


async def on_full_disk(store: Store, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`, which makes room; if the disk is too full even for its marks, run it again with the space of the ballast."""
    try:
        return await work()
    except StoreFullError:
        await drop(store)
    try:
        return await work()
    finally:
        await take_aboard(store)
