"""Ask the store of a root one question, and print the answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click
import msgspec

from checkpointd.errors import NotFoundError, UsageError
from checkpointd.layout.keys import LATEST, SERVICE
from checkpointd.pipeline import catalog
from checkpointd.store import open_store
from checkpointd.store.base import Store

T = TypeVar("T")


def ask(root: str, question: Callable[[Store], Awaitable[T]]) -> T:
    """What `question` makes of the store at `root`. Raises NotFoundError where there is no such root."""
    return asyncio.run(_ask(root, question))


async def _ask(root: str, question: Callable[[Store], Awaitable[T]]) -> T:
    async with store_at(root) as store:
        return await question(store)


def store_at(root: str) -> Store:
    """The store at `root`; where that is a directory in which files are shown, a DeepSpeed job's save_dir, the store of those.
    Raises as check_root.
    """
    store = open_store(root)
    if store.capabilities.shared and os.path.isdir(os.path.join(store.url, SERVICE, SERVICE, "epochs")):
        store = open_store(os.path.join(store.url, SERVICE))
    check_root(store)
    return store


def check_root(store: Store) -> None:
    """NotFoundError where there is no such root, UsageError where it cannot be one that a command looks at."""
    if not store.capabilities.shared:
        raise UsageError(f"{store.url} lives in the process that made it alone: there is nothing to see from here")
    if not os.path.lexists(store.url):
        raise NotFoundError(f"there is no directory {store.url}: give the root that the job was given")
    if not os.path.isdir(store.url):
        raise UsageError(f"the root {store.url} is not a directory: give the root that the job was given")


async def named_tag(store: Store, tag: str) -> str:
    """`tag`, or the one that the pointer names where it is `latest`."""
    if tag != LATEST:
        return tag
    found = await catalog.latest(store)
    if found is None:
        raise NotFoundError(f"there is no {LATEST} at {store.url}: nothing was committed there yet")
    return found


def show_json(answer: msgspec.Struct) -> None:
    """One document and a newline: indented on a terminal, on one line elsewhere."""
    data = msgspec.json.encode(answer)
    click.echo(msgspec.json.format(data, indent=2) if sys.stdout.isatty() else data)
