"""Where a command looks: ROOT and TAG of the command line, and CHECKPOINTD_ROOT where ROOT was left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from checkpointd.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_MISSING_ROOT = "which root? Give its path, as in `checkpointd {example}`, or set CHECKPOINTD_ROOT"


def places(metavar: str) -> Callable[[F], F]:
    """The arguments of a command as the tuple `places`."""
    return click.argument("places", nargs=-1, metavar=metavar)


def as_json() -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document, errors included (on standard error).")


def only_root(places: tuple[str, ...], command: str) -> str:
    """`[ROOT]`."""
    _at_most(places, 1)
    return places[0] if places else _environment_root(f"{command} /mnt/ckpts/run1")


def maybe_root(places: tuple[str, ...]) -> str | None:
    """`[ROOT]` of a command that has something to do without one, too."""
    _at_most(places, 1)
    return places[0] if places else _set_root()


def root_and_tag(places: tuple[str, ...], command: str) -> tuple[str, str]:
    """`[ROOT] TAG`: one argument alone is the tag."""
    _at_most(places, 2)
    if len(places) == 2:
        return places[0], places[1]
    if len(places) == 1 and not _can_be_tag(places[0]):
        raise _which_tag(command, places[0])
    root = _environment_root(f"{command} /mnt/ckpts/run1 global_step100")
    if not places:
        raise _which_tag(command, root)
    return root, places[0]


def root_and_maybe_tag(places: tuple[str, ...], command: str) -> tuple[str, str | None]:
    """`[ROOT] [TAG]`: one argument alone is the tag where CHECKPOINTD_ROOT is set and it has no slash, else the root."""
    _at_most(places, 2)
    if len(places) == 2:
        return places[0], places[1]
    if len(places) == 1 and not (_set_root() and _can_be_tag(places[0])):
        return places[0], None
    return _environment_root(f"{command} /mnt/ckpts/run1"), places[0] if places else None


def _which_tag(command: str, root: str) -> UsageError:
    return UsageError(f"which tag? Name one, as in `checkpointd {command} {root} global_step100`, or `latest`")


def _can_be_tag(text: str) -> bool:
    return "/" not in text and text not in {".", ".."}


def _at_most(places: tuple[str, ...], most: int) -> None:
    if len(places) > most:
        raise UsageError(f"{len(places)} arguments are more than this command takes: {' '.join(places[most:])!r} is left over")


def _environment_root(example: str) -> str:
    root = _set_root()
    if root is None:
        raise UsageError(_MISSING_ROOT.format(example=example))
    return root


def _set_root() -> str | None:
    from checkpointd.config import environment_root  # only where it is needed: it brings in numpy

    return environment_root()
