"""Paths of the command line: a root, a tag's directory in it, or a DeepSpeed job's save_dir; and which roots are near.

Nothing here writes, and nothing fails because a directory cannot be looked into: that is said when the store is asked.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from checkpointd.commands import command
from checkpointd.layout.keys import LATEST, SERVICE, AttemptId, is_tag

NEAR_SHOWN = 4
"""So many roots are suggested at most."""
_LOOKED_AT_MAX = 1000
"""So many directories are looked into on the way."""


@dataclass(frozen=True, slots=True)
class Location:
    """A root, and the tag where a path led into one of its tags."""

    root: str
    tag: str | None = None


def locate(text: str) -> Location | None:
    """What the path `text` leads to; None where neither it nor what lies above it is a root, or where it is no path."""
    if "://" in text:
        return None
    path = os.path.abspath(text)
    for above, inside in _upwards(path):
        root = root_at(above)
        if root is not None:
            return _place(text if root == path else root, inside)
    return None


def root_at(path: str) -> str | None:
    """The root at the directory `path`: itself, or the one in which a DeepSpeed job that was given it as save_dir keeps its
    checkpoints.
    """
    for root in (path, os.path.join(path, SERVICE)):
        if os.path.isdir(os.path.join(root, SERVICE, "epochs")):
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
    if not inside or inside[0] == SERVICE:
        return Location(root)
    first = inside[0]
    if first == LATEST and len(inside) == 1:
        return Location(root, LATEST)
    if is_tag(first) and (len(inside) == 1 or AttemptId.parse(inside[1]) or root.endswith(f"/{SERVICE}")):
        return Location(root, first)
    return None


def is_used(path: str) -> bool:
    """Whether a job ever saved at the directory `path`, or that cannot be told: the store then says why.

    Also where only the tags were copied, and not `.checkpointd`.
    """
    try:
        os.stat(os.path.join(path, SERVICE, "epochs"))
        return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return True
    if not os.access(path, os.R_OK | os.X_OK):
        return True
    return any(AttemptId.parse(name) for tag in _directories(path) if is_tag(tag) for name in _directories(f"{path}/{tag}"))


def _directories(path: str) -> list[str]:
    """The names of the directories in `path`; empty where it cannot be listed."""
    try:
        with os.scandir(path) as found:
            return sorted(entry.name for entry, _ in zip(found, range(_LOOKED_AT_MAX), strict=False) if entry.is_dir())
    except OSError:
        return []


def roots_near(path: str) -> list[str]:
    """Roots that may have been meant: those directly below `path`, those beside it with a similar name, the one above it."""
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
    """The command line as it was given, with the words `new` in place of `old`: whole, ready to run."""
    context = click.get_current_context(silent=True)
    given = context.obj if context is not None and isinstance(context.obj, list) else []
    if old in given:
        at = given.index(old)
        return command(*given[:at], *new, *given[at + 1 :])
    name = context.info_name if context is not None and context.info_name else "list"
    return command(name, *new)


def suggestion(path: str, given: str) -> str:
    """What to give instead of `given`, which is no root, in words: commands, whole; or that nothing is near."""
    found = roots_near(path)
    if not found:
        return "give the root that the job was given"
    commands = " or ".join(corrected(given, root) for root in found[:NEAR_SHOWN])
    more = f" ({len(found) - NEAR_SHOWN} more roots are near)" if len(found) > NEAR_SHOWN else ""
    return f"did you mean {commands}?{more}"
