"""The arguments ROOT and TAG of a command. CHECKPOINTD_ROOT replaces a missing ROOT.

A path into a root works, too: `ROOT/TAG` means the root and the tag, `ROOT/.checkpointd` the root.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from checkpointd.cli.completing import complete_place
from checkpointd.cli.locating import corrected, environment_root, locate
from checkpointd.commands import at_tag
from checkpointd.commands import command as command_line
from checkpointd.errors import UsageError
from checkpointd.layout.keys import AttemptId

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLE_ROOT, EXAMPLE_TAG = "/mnt/ckpts/run1", "global_step100"


def places(metavar: str) -> Callable[[F], F]:
    """The arguments of a command as the tuple `places`."""
    return click.argument("places", nargs=-1, metavar=metavar, shell_complete=complete_place(metavar))


def as_json() -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document, errors included (on standard error).")


def only_root(places: tuple[str, ...], command: str) -> str:
    """`[ROOT]`. UsageError if the path is a tag's directory."""
    given = given_root(places, command)
    place = locate(given)
    if place is not None and place.tag is not None:
        raise UsageError(
            f"{given} is in the root {place.root}, at the tag {place.tag}: {corrected(given, place.root)} takes the root, "
            f"{command_line('inspect', *at_tag(place.root, place.tag))} shows the tag"
        )
    return place.root if place else given


def given_root(places: tuple[str, ...], *example: str) -> str:
    """`[ROOT]` as given, for commands that make a missing root."""
    _at_most(places, 1)
    return places[0] if places else _environment_root(*example, EXAMPLE_ROOT)


def maybe_root(places: tuple[str, ...]) -> str | None:
    """`[ROOT]` of a command that also works without a root."""
    _at_most(places, 1)
    return places[0] if places else environment_root()


def root_and_tag(places: tuple[str, ...], command: str) -> tuple[str, str]:
    """`[ROOT] TAG`. A single argument is the tag, or a path to it."""
    _at_most(places, 2)
    if len(places) == 2:
        return _root_of(places[0], places[1])
    if len(places) == 1 and not (environment_root() and _can_be_tag(places[0])):
        place = locate(places[0])
        if place is not None and place.tag is not None:
            return place.root, place.tag
        if place is not None or not _can_be_tag(places[0]):
            raise _which_tag(command, places[0])
    root = _environment_root(command, EXAMPLE_ROOT, EXAMPLE_TAG)
    if not places:
        raise _which_tag(command, root)
    return _root_of(root, places[0])


def before_out(places: tuple[str, ...], command: str, example: str) -> tuple[tuple[str, ...], str]:
    """`[ROOT] [TAG]` and OUT of `[ROOT] [TAG] OUT`. UsageError if OUT, or the root, is missing."""
    if len(places) > 1 or (places and environment_root()):
        return places[:-1], places[-1]
    line = command_line(command, *(places or (EXAMPLE_ROOT,)), example)
    raise UsageError(f"where to? Give the root and the place to write to, as in {line}")


def root_and_maybe_tag(places: tuple[str, ...], command: str) -> tuple[str, str | None]:
    """`[ROOT] [TAG]`, as `given_root_and_maybe_tag`; a path to a tag gives both."""
    return located(*given_root_and_maybe_tag(places, command))


def given_root_and_maybe_tag(places: tuple[str, ...], command: str) -> tuple[str, str | None]:
    """`[ROOT] [TAG]` as given. A single argument without a slash is the tag if CHECKPOINTD_ROOT is set."""
    _at_most(places, 2)
    if len(places) == 2:
        return places[0], places[1]
    if len(places) == 1 and not (environment_root() and _can_be_tag(places[0])):
        return places[0], None
    return _environment_root(command, EXAMPLE_ROOT), places[0] if places else None


def located(root: str, tag: str | None) -> tuple[str, str | None]:
    """The root and the tag to which `root` and `tag` lead."""
    if tag is not None:
        return _root_of(root, tag)
    place = locate(root)
    return (place.root, place.tag) if place else (root, None)


def _root_of(given: str, tag: str) -> tuple[str, str]:
    """ROOT and TAG of two arguments. UsageError if the first is already a tag's directory."""
    place = locate(given)
    if place is not None and place.tag is not None:
        if AttemptId.parse(tag) or tag == place.tag:
            meant = f"{command_line('explain', *at_tag(place.root, place.tag))} shows all its attempts"
        else:
            meant = f"{corrected(given, place.root)} looks for {tag} there"
        raise UsageError(f"{given} is in the root {place.root}, at the tag {place.tag}: {meant}")
    root = place.root if place else given
    return root, _named(root, tag)


def _named(root: str, tag: str) -> str:
    """The tag that `tag` means: it may end in a slash, as a shell completes it, or be the whole path of the directory."""
    name = tag.rstrip("/")
    if "/" not in name:
        return name or tag
    place = locate(tag)
    if place is not None and place.tag is not None and os.path.realpath(place.root) == os.path.realpath(root):
        return place.tag
    return tag


def _which_tag(command: str, root: str) -> UsageError:
    return UsageError(f"which tag? Name one, as in {command_line(command, root, EXAMPLE_TAG)}, or `latest`")


def _can_be_tag(text: str) -> bool:
    return "/" not in text and text not in {".", ".."}


def _at_most(places: tuple[str, ...], most: int) -> None:
    if len(places) > most:
        raise UsageError(f"{len(places)} arguments are more than this command takes: {' '.join(places[most:])!r} is left over")


def _environment_root(*example: str) -> str:
    root = environment_root()
    if root is None:
        raise UsageError(f"which root? Give its path, as in {command_line(*example)}, or set CHECKPOINTD_ROOT")
    return root
