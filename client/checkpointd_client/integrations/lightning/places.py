"""Where a checkpoint of Lightning's lies: the path that Lightning gives, and the root and the tag for it.

Invariants
  PLACE-1  A path has one tag, and no other path below the same directory has that tag.
  PLACE-2  Paths that Lightning itself saves are those of other file systems, and names that begin with a dot, which it uses for
      scratch files of its tuner.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from checkpointd.errors import FormatError, UsageError
from checkpointd.layout.files import check_place
from checkpointd.layout.keys import SERVICE, check_tag, shown_key
from checkpointd.layout.manifest import digest

_FILE = "file://"
_SEPARATOR = "--"


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """A checkpoint is shown at `at`, a relative path, in the directory `folder`, in which the root lies."""

    folder: str
    at: str

    @property
    def root(self) -> str:
        return os.path.join(self.folder, SERVICE)

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.at)

    @property
    def name(self) -> str:
        return os.path.basename(self.at)

    @property
    def tag(self) -> str:
        """UsageError if no tag can have such a name."""
        name = self.at.replace("/", _SEPARATOR)
        unique = name if name.split(_SEPARATOR) == self.at.split("/") else f"{name}{_SEPARATOR}{_short_digest(self.at)}"
        return check_tag(unique)


def _short_digest(text: str) -> str:
    return digest(text.encode())[:16]


def local_path(path: str | os.PathLike[str]) -> str | None:
    """The absolute path, whose directories lead through no link; None if it is a URL of another file system."""
    text = os.fspath(path).removeprefix(_FILE)
    if "://" in text:
        return None
    folder, name = os.path.split(os.path.abspath(os.path.expanduser(text)))
    return os.path.join(os.path.realpath(folder), name)


def place_to_save(path: str | os.PathLike[str], folders: Collection[str]) -> CheckpointPlace | None:
    """The place for a save to `path`; None if Lightning itself saves it (PLACE-2).

    `folders`: the directories whose roots are in use. One above the path is preferred, and else its own directory is taken.
    """
    absolute = local_path(path)
    if absolute is None:
        return None
    above = [folder for folder in folders if absolute.startswith(f"{folder.rstrip('/')}/")]
    folder = max(above, key=len, default=os.path.dirname(absolute))
    place = CheckpointPlace(folder, os.path.relpath(absolute, folder))
    try:
        check_place(place.at)
        _ = place.tag
    except (FormatError, UsageError):
        return None
    return place


def place_shown(path: str | os.PathLike[str]) -> CheckpointPlace | None:
    """The place whose commit is, or was last, shown at `path`; None if no root near it shows one there."""
    absolute = local_path(path)
    if absolute is None:
        return None
    folder = os.path.dirname(absolute)
    while True:
        place = CheckpointPlace(folder, os.path.relpath(absolute, folder))
        if os.path.isfile(os.path.join(place.root, shown_key(place.at))):
            return place
        if folder == os.path.dirname(folder):
            return None
        folder = os.path.dirname(folder)


def place_to_load(path: str | os.PathLike[str]) -> CheckpointPlace | None:
    """The place whose commit is shown at `path`, or where a link there leads to; None if no root near it shows one there."""
    absolute = local_path(path)
    return None if absolute is None else place_shown(os.path.realpath(absolute))
