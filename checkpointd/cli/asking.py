"""Asks the store of a root one question."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from checkpointd.bucket_urls import directory_of, is_bucket_url, parse
from checkpointd.cli.locating import is_used, suggestion
from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd.layout.keys import LATEST, LOG, LOG_ROOT, AttemptId, default_tag, is_tag
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import named
from checkpointd.report.log import look
from checkpointd.store import open_store
from checkpointd.store.base import Entry, Store

T = TypeVar("T")


def ask(root: str, question: Callable[[Store], Awaitable[T]], *, unused: bool = False, read_only: bool = False) -> T:
    """The answer to `question` about the store at `root`; with `read_only`, it refuses writes. Raises as `check_root`."""
    found: list[T] = []

    async def run() -> None:
        found.append(await _ask(root, question, unused=unused, read_only=read_only))

    # asyncio writes the repr of a task's result when it ends, and an answer may have millions of parts.
    asyncio.run(run())
    return found[0]


def ask_about_tag(root: str, tag: str, question: Callable[[Store, str], Awaitable[T]], *, read_only: bool = False) -> T:
    """As `ask`, about the tag that `tag` means."""

    async def named(store: Store) -> T:
        return await question(store, await named_tag(store, tag))

    return ask(root, named, read_only=read_only)


async def _ask(root: str, question: Callable[[Store], Awaitable[T]], *, unused: bool, read_only: bool) -> T:
    async with open_store(root, read_only=read_only) as store:
        check_root(store, root, unused=unused)
        await check_used(store, root, unused=unused)
        try:
            return await question(store)
        except NotFoundError as error:
            _, log_damage = await look(store)
            if log_damage:
                raise DamagedError(f"{error}. Perhaps it is there all the same: {log_damage}", key=LOG) from error
            raise


def check_root(store: Store, given: str, *, unused: bool = False) -> None:
    """NotFoundError if the root that was `given` does not exist, or if no job ever saved there and not `unused`; UsageError if
    it cannot be a root. The messages suggest roots nearby.
    """
    path = store.url
    if not store.capabilities.shared:
        raise UsageError(f"{path} exists only in the process that made it: commands cannot see it")
    if directory_of(path) is None:
        return
    if not os.path.lexists(path):
        raise NotFoundError(f"there is no directory {path}: {suggestion(path, given)}")
    if not os.path.isdir(path):
        raise UsageError(f"the root {path} is not a directory: {suggestion(path, given)}")
    if not unused and not is_used(path):
        raise NotFoundError(f"{path} is not a root (no job ever saved there): {suggestion(path, given)}")


async def check_used(store: Store, given: str, *, unused: bool = False) -> None:
    """The same for a root in a bucket; UsageError if it lies in another root."""
    if not is_bucket_url(store.url) or await _is_used(store):
        return
    if (outer := await root_around(store, given)) is not None:
        raise UsageError(f"{store.url} lies in the root {outer}: give that one, and {_name(given)} as the tag")
    if not unused:
        raise NotFoundError(f"{store.url} is not a root (no job ever saved there): give the root that the job was given")


async def root_around(store: Store, given: str) -> str | None:
    """The root in which the place `given` in a bucket lies; None if there is none, or if the place is a root itself."""
    if not is_bucket_url(store.url) or not _name(given) or await _is_used(store):
        return None
    place = parse(given)
    async with open_store(replace(place, prefix=place.prefix.rpartition("/")[0]).url, read_only=True) as outer:
        return outer.url if await outer.stat(LOG_ROOT) is not None else None


def _name(given: str) -> str:
    return parse(given).prefix.rpartition("/")[2]


async def _is_used(store: Store) -> bool:
    return await store.stat(LOG_ROOT) is not None or any(map(_is_of_tag, await store.list("")))


def _is_of_tag(entry: Entry) -> bool:
    return entry.is_prefix and is_tag(entry.name) and AttemptId.parse(entry.name) is None


async def named_tag(store: Store, tag: str) -> str:
    """The tag that `tag` means: for `latest` that of the checkpoint that a load takes, for a number that is no tag that of the
    step.
    """
    return await _tag_of_step(store, tag) if tag.isdecimal() and tag.isascii() else await named(store, tag)


async def maybe_named_tag(store: Store, tag: str | None) -> str | None:
    """As `named_tag`; None if no tag was given."""
    return None if tag is None else await named_tag(store, tag)


def check_place(root: str, tag: str | None, out: str, name: str) -> None:
    """UsageError if the command `name` got no tag, and `out` names a checkpoint at `root`: the place to write to is missing."""
    meant = out.rstrip("/")
    if tag is None and (meant == LATEST or (is_tag(meant) and ask(root, lambda store: _has(store, meant), read_only=True))):
        raise place_is_missing(root, meant, name)


def place_is_missing(root: str, tag: str, name: str) -> UsageError:
    return UsageError(
        f"{tag} is a checkpoint of {root}; where to? Give the place as well, as in {command(name, *at_tag(root, tag), 'OUT')}. "
        f"A directory of that name is ./{tag}"
    )


async def _has(store: Store, name: str) -> bool:
    return await named_tag(store, name) in await root_view.tags(store)


async def _tag_of_step(store: Store, number: str) -> str:
    """`global_step149000` for `149000`, or the only tag that ends in that number; otherwise `number` unchanged."""
    known = await root_view.tags(store)
    for name in (number, default_tag(int(number))):
        if name in known:
            return name
    ending = [name for name in known if name.endswith(number) and not name[-len(number) - 1].isdecimal()]
    return ending[0] if len(ending) == 1 else number
