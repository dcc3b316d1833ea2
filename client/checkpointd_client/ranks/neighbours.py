"""Finds the roots beside a root, above it and below it, for a warning: a new root there may be a mistyped path."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from checkpointd.bucket_urls import directory_of, is_bucket_url, parse
from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import LOG_ROOT, SERVICE
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store, each
from checkpointd.store.opening import open_store

LOOKED_MAX = 32
"""The directories beside the root that are looked into: those whose names resemble its name most."""
LOOK_S = 10.0


async def is_new(store: Store) -> bool:
    """Whether no job ever saved at `store`."""
    root_log = RootLog.of(store)
    return not (await root_log.look()).start and not root_log.fault and not await root_view.directories(store)


async def neighbours(url: str) -> list[str]:
    """The roots in the directory that holds the root at `url`, the most similar names first, those below the root, and that
    directory if it is one.

    Empty if it cannot be looked at within LOOK_S: a start does not depend on it.
    """
    above, name, inside = _place(url)
    if not above:
        return []
    try:
        store = open_store(above, read_only=True)
    except CheckpointdError:
        return []
    try:
        async with asyncio.timeout(LOOK_S):
            return await _neighbours(store, name, inside)
    except (CheckpointdError, TimeoutError):
        return []
    finally:
        with suppress(CheckpointdError):
            await store.close()


def _place(url: str) -> tuple[str, str, str]:
    """The place above the root at `url`, the root's name there, and the path from such a name to its root.

    The root of a library that shows its checkpoints as directories is `.checkpointd` beside them, so its name is that of the
    directory that holds both.
    """
    if is_bucket_url(url):
        location = parse(url)
        above, _, name = location.prefix.rpartition("/")
        return (replace(location, prefix=above).url, name, "") if name else ("", "", "")
    path = directory_of(url)
    if path is None:
        return "", "", ""
    inside = f"/{SERVICE}" if os.path.basename(path) == SERVICE else ""
    above, name = os.path.split(path.removesuffix(inside))
    return (above if name else ""), name, inside


async def _neighbours(store: Store, name: str, inside: str) -> list[str]:
    async def found(other: str) -> str | None:
        with suppress(CheckpointdError):  # a link, or a directory that this user may not read
            if await store.stat(f"{other}{inside}/{LOG_ROOT}".lstrip("/")) is not None:
                return f"{store.url}/{other}{inside}" if other else f"{store.url}{inside}"
        return None

    names = [entry.name for entry in await store.list("") if entry.is_prefix and entry.name not in (name, SERVICE)]
    names.sort(key=lambda other: -_likeness(name, other))
    below: list[str] = []
    with suppress(CheckpointdError):  # as above
        below = [f"{name}/{entry.name}" for entry in await store.list(name) if entry.is_prefix and entry.name != SERVICE]
    return [root for root in await each(found, [*names[:LOOKED_MAX], *below[:LOOKED_MAX], ""]) if root is not None]


def _likeness(name: str, other: str) -> float:
    """The part of two names that they have in common at their beginning and their end, between 0 and 1.

    A slip of the keyboard leaves most of both. It is quick, since the directory may hold thousands of names.
    """
    begin = _alike(name, other)
    end = _alike(name[begin:][::-1], other[begin:][::-1])
    return (begin + end) / max(len(name), len(other), 1)


def _alike(name: str, other: str) -> int:
    """With how many characters both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
