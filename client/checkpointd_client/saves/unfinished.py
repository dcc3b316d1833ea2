"""A directory that other programs fill beside a save."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from checkpointd.errors import FormatError, UsageError
from checkpointd.layout.files import check_names, check_place
from checkpointd.layout.keys import SERVICE
from checkpointd.store.base import Store
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.showing import plain_files_of


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An unfinished directory at `path`, which is filled beside a save. The save names it by `name`."""

    name: str
    path: str


def check_shows(store: Store, at: str, names: Collection[str] = ()) -> PlainFiles:
    """What shows checkpoints of the root `store` at `at`; UsageError if nothing can, or if a file cannot have its name."""
    plain = plain_files_of(store)
    if plain is None:
        raise UsageError(
            f"checkpoints are shown beside the root, which must be a directory named {SERVICE}: {store.url} is not"
        )
    try:
        check_place(at)
        check_names(names)
    except FormatError as error:
        raise UsageError(str(error)) from error
    return plain
