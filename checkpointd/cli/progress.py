"""A progress bar on standard error, shown only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from checkpointd.cli.render import console


@contextmanager
def progress_bar(total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields the bar's update function, which takes the keywords of rich's `Progress.update`; `total` in bytes."""
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(True)),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        yield partial(bar.update, bar.add_task("", total=total))


@contextmanager
def progress_of_bytes() -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes the bytes done and their total."""
    with progress_bar() as update:
        yield lambda done, total: update(completed=done, total=total)
