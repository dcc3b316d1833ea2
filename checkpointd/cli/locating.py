"""Paths on the command line: a root, a tag's directory in it, or the save_dir of a DeepSpeed job. Also finds roots nearby.

Nothing here writes, or fails because a directory cannot be read: the store reports that error when it is asked.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from checkpointd.commands import command
from checkpointd.layout.keys import LATEST, LOG, LOG_ROOT, SERVICE, AttemptId, is_tag
from checkpointd.other_formats import is_root, of_others

NEAR_SHOWN = 4
"""The most roots in one suggestion."""
_LOOKED_AT_MAX = 1000
"""The most directories that a search reads."""


@dataclass(frozen=True, slots=True)
class Location:
    """A root, and the tag if the path leads into one of its tags."""

    root: str
    tag: str | None = None


def environment_root() -> str | None:
    """The value of CHECKPOINTD_ROOT; None if it is not set."""
    from checkpointd import config  # imported late, because it imports numpy

    return config.environment_root()


def locate(text: str) -> Location | None:
    """The place to which the path `text` leads; None if neither it nor a directory above it is a root, or if it is a URL."""
    if "://" in text:
        return None
    path = os.path.abspath(text)
    for above, inside in _upwards(path):
        root = root_at(above)
        if root is not None:
            return _place(text if root == path else root, inside)
    return None


def root_at(path: str) -> str | None:
    """The root at the directory `path`: `path` itself, or `path/.checkpointd`, the root of a DeepSpeed job whose save_dir is
    `path`.
    """
    for root in (path, os.path.join(path, SERVICE)):
        if is_root(root):
            return root
    return None


def _upwards(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`path` and every directory above it, each with the names that lead back to `path`."""
    inside: tuple[str, ...] = ()
    while True:
        yield path, inside
        above, name = os.path.split(path)
        if above == path:
            return
        path, inside = above, (name, *inside)


def _place(root: str, inside: Sequence[str]) -> Location | None:
    if not inside or inside[0] in (SERVICE, LOG):
        return Location(root)
    first = inside[0]
    if first == LATEST and len(inside) == 1:
        return Location(root, LATEST)
    if is_tag(first) and (len(inside) == 1 or AttemptId.parse(inside[1]) or root.endswith(f"/{SERVICE}")):
        return Location(root, first)
    return None


def is_used(path: str) -> bool:
    """Whether a job ever saved at the directory `path`. Also True if there are tags without a log, which reports then say, and
    if the directory cannot be read: the store then gives the reason.
    """
    try:
        os.stat(os.path.join(path, LOG_ROOT))
        return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return True
    if not os.access(path, os.R_OK | os.X_OK):
        return True
    return any(AttemptId.parse(name) for tag in _directories(path) if is_tag(tag) for name in _directories(f"{path}/{tag}"))


def _directories(path: str) -> list[str]:
    """The names of the directories in `path`; empty if it cannot be listed."""
    try:
        with os.scandir(path) as found:
            return sorted(entry.name for entry, _ in zip(found, range(_LOOKED_AT_MAX), strict=False) if entry.is_dir())
    except OSError:
        return []


def roots_near(path: str) -> list[str]:
    """Roots near `path`: those directly below it, those beside it with a similar name, and the nearest one above it."""
    above = [root for place, _ in list(_upwards(path))[1:] if (root := root_at(place))]
    below = _roots_in(path, _directories(path))
    beside, name = os.path.split(path)
    siblings = _directories(beside) if not os.path.isdir(path) else []
    alike = _roots_in(beside, difflib.get_close_matches(name, siblings, n=NEAR_SHOWN, cutoff=0.6))
    return list(dict.fromkeys([*below, *alike, *above[:1]]))


def _roots_in(path: str, names: Sequence[str]) -> list[str]:
    return [root for name in names if (root := root_at(os.path.join(path, name)))]


# --- suggestions -------------------------------------------------------------------------------------------------


def corrected(old: str, *new: str) -> str:
    """The whole command line as it was given, but with the words `new` in place of `old`."""
    context = click.get_current_context(silent=True)
    given = context.obj if context is not None and isinstance(context.obj, list) else []
    if old in given:
        at = given.index(old)
        return command(*given[:at], *new, *given[at + 1 :])
    name = context.info_name if context is not None and context.info_name else "list"
    return command(name, *new)


def suggestion(path: str, given: str) -> str:
    """Commands with the roots near `path`, which is not a root, in place of `given`; if none lies in it, what it is instead."""
    if not _roots_in(path, _directories(path)) and (other := of_others(path)) is not None:
        return other
    found = roots_near(path)
    if not found:
        return "give the root that the job was given"
    commands = " or ".join(corrected(given, root) for root in found[:NEAR_SHOWN])
    more = f" ({len(found) - NEAR_SHOWN} more roots are near)" if len(found) > NEAR_SHOWN else ""
    return f"did you mean {commands}?{more}"
