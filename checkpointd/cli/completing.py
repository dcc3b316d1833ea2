"""Completion of ROOT, TAG and OUT in a shell: directories, the tags of the root before them, files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem

from checkpointd.cli.locating import environment_root, locate
from checkpointd.layout.keys import LATEST, AttemptId, is_tag

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_place(metavar: str) -> Completer:
    """The completion of arguments such as `[ROOT] [TAG] OUT`."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before: tuple[str, ...] = ctx.params.get(param.name or "", ()) or ()
        return list(_offered(metavar, before, incomplete))

    return complete


def _offered(metavar: str, before: tuple[str, ...], incomplete: str) -> Iterator[CompletionItem]:
    """Offers directories or files first: a shell drops other offers that come before them."""
    kinds = [word.strip("[]") for word in metavar.split()]
    if len(before) >= len(kinds):
        return
    kind = kinds[len(before)]
    yield CompletionItem(incomplete, type="dir" if kind in ("ROOT", "SRC") else "file")
    if kind == "ROOT" and "TAG" in kinds and (root := environment_root()):
        yield from _tags(root, incomplete)
    if kind == "TAG" and before:
        yield from _tags(before[0], incomplete)


def _tags(root: str, incomplete: str) -> Iterator[CompletionItem]:
    """The tags at `root` that begin with `incomplete`, the highest numbers first; none if the root cannot be read."""
    place = locate(os.path.expanduser(root))
    folder = place.root if place else root
    try:
        names = [entry.name for entry in os.scandir(folder) if is_tag(entry.name) and entry.is_dir()]
    except OSError:
        return
    saved = [name for name in names if name.startswith(incomplete) and _has_attempts(f"{folder}/{name}")]
    for name in sorted(saved, key=lambda name: (len(name), name), reverse=True):
        yield CompletionItem(name)
    if LATEST.startswith(incomplete) and os.path.isfile(f"{folder}/{LATEST}"):
        yield CompletionItem(LATEST)


def _has_attempts(folder: str) -> bool:
    try:
        return any(AttemptId.parse(name) for name in os.listdir(folder))
    except OSError:
        return False
