"""What a start lays at a root and no reader needs: the ballast, and a README for people.

The ballast is disk space in reserve. Without it, the leftovers of a dead job could fill the disk, and the start that would
remove them could not write its small objects.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from checkpointd.errors import StoreError, StoreFullError
from checkpointd.layout.keys import LATEST, README, SERVICE
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")
T = TypeVar("T")

KEY = f"{SERVICE}/ballast"
BALLAST_BYTES = 256 << 10


README_TEXT = f"""\
This directory is a root of checkpointd: each directory below it holds what was saved under one tag.
List what is here:    checkpointd list .
Remove a checkpoint:  checkpointd delete . TAG       or by rule: checkpointd gc . --keep-last 3
Never by hand:        rm, mv or cp of single directories. A checkpoint may need objects of other tags.
To copy, take all of this directory with cp -a, rsync -a or tar, or: checkpointd mirror . TO
The file {LATEST} names the tag that a restart loads.
"""


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


async def lay(store: Store) -> None:
    """Put the ballast and the README if they are missing. A storage that does not take them is not an error."""
    await take_aboard(store)
    try:
        if await store.stat(README) is None:
            await store.put_if_absent(README, README_TEXT.encode(), durable=False)
    except StoreError as error:
        log.info("no %s is put at %s: %s", README, store.url, error)


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
