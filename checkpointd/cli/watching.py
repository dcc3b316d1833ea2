"""Watches an answer that changes: a live page on a terminal, a line for each change in a pipe, or JSON documents."""

from __future__ import annotations

import asyncio
import operator
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import click
import msgspec

from checkpointd.cli.formatting import printable
from checkpointd.cli.render import Block, Note, console, rich_page, show_json, warn
from checkpointd.errors import SidecarError, StoreError
from checkpointd.times import utc

A = TypeVar("A", bound=msgspec.Struct)


async def watch(
    look: Callable[[], Awaitable[A]],
    interval_s: float,
    *,
    as_json: bool,
    page: Callable[[A], Iterable[Block]],
    changes: Callable[[A | None, A], Iterable[str]],
    same: Callable[[A, A], bool] = operator.eq,
) -> None:
    """Call `look` every `interval_s` seconds and show its answers, without end. A failed look is reported and tried again.

    `changes` gives lines for the differences between two answers. A JSON document is printed if an answer is not the `same`.
    """
    looks = _looks(look, interval_s)
    if not as_json and sys.stdout.isatty():
        await _watch_live(looks, page)
        return
    before: A | None = None
    async for found in _succeeded(looks):
        if not as_json:
            for line in changes(before, found):
                click.echo(f"{utc(time.time())}  {printable(line)}")
        elif before is None or not same(before, found):
            show_json(found)
        sys.stdout.flush()
        before = found


async def _looks(look: Callable[[], Awaitable[A]], interval_s: float) -> AsyncIterator[A | StoreError | SidecarError]:
    while True:
        try:
            yield await look()
        except (StoreError, SidecarError) as error:
            yield error
        await asyncio.sleep(interval_s)


async def _succeeded(looks: AsyncIterator[A | StoreError | SidecarError]) -> AsyncIterator[A]:
    """The answers. Each new error goes to standard error once."""
    before = ""
    async for found in looks:
        if not isinstance(found, StoreError | SidecarError):
            if before:
                warn("there is an answer again")
            before = ""
            yield found
        elif str(found) != before:
            before = str(found)
            warn(before)


async def _watch_live(looks: AsyncIterator[A | StoreError | SidecarError], page: Callable[[A], Iterable[Block]]) -> None:
    """While there is no answer, the page says that and since when: what was seen before may be so no longer."""
    from rich.console import Group
    from rich.live import Live

    answered = ""
    with Live(console=console(sys.stdout), auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        async for found in looks:
            if isinstance(found, StoreError | SidecarError):
                last = f"the last answer came at {answered}; " if answered else ""
                shown: list[Block] = [Note(str(found), "bad"), Note(f"{last}this goes on asking")]
            else:
                shown, answered = list(page(found)), utc(time.time())
            live.update(Group(*rich_page(shown, live.console.width)), refresh=True)
