"""Where the checkpoints that are shown in a directory have their root, and what a save there is called."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass

from checkpointd.errors import UsageError
from checkpointd.layout.files import check_place
from checkpointd.layout.keys import SERVICE, check_tag
from checkpointd.layout.manifest import digest
from checkpointd.system_errors import in_words

SEPARATOR = "--"


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a save goes: the root of its Checkpointer, its tag there, and the tag directory, relative to the root."""

    root: str
    tag: str
    at: str

    @staticmethod
    def root_of(save_dir: str, root: str | None) -> str:
        """The root of the checkpoints of `save_dir`."""
        return SaveTarget.of(save_dir, "any", root).root

    @staticmethod
    def of(save_dir: str, tag: str, root: str | None) -> SaveTarget:
        """UsageError if `save_dir` is outside `root`, or if `tag` cannot be the name of a directory."""
        folder = os.path.abspath(save_dir)
        base = own_root(folder) if root is None else os.path.abspath(root)
        below = os.path.relpath(folder, base)
        if below.split(os.sep)[0] == os.pardir:
            raise UsageError(
                f"{folder} does not lie in {base}, which was given as root: give a directory above everything that you save"
            )
        parts = [*([] if below == os.curdir else below.split(os.sep)), check_tag(tag)]
        return SaveTarget(base, check_tag(_joined(parts)), check_place("/".join(parts)))


def _joined(parts: list[str]) -> str:
    """The tag for a directory below the root; unique, or one save would replace the files of another."""
    name = SEPARATOR.join(parts)
    return name if name.split(SEPARATOR) == parts else f"{name}{SEPARATOR}{digest('/'.join(parts).encode())[:16]}"


def own_root(folder: str) -> str:
    """The root for a save_dir if none was given: the save_dir itself, or the directory above a `checkpoint-N`.

    The libraries make a `checkpoint-N` for each save and remove old ones. Accelerate's (`checkpoint_N`) lie in a directory
    `checkpoints` that may contain nothing else, so the root is the directory above that.
    """
    above, name = os.path.split(folder)
    found = re.fullmatch(r"checkpoint([-_])\d+", name)
    if found is None:
        return folder
    return os.path.dirname(above) if found[1] == "_" and os.path.basename(above) == "checkpoints" else above


def unmade(directory: str) -> str | None:
    """Make a directory. Returns why that failed; None if the directory exists now."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        return in_words(error, "file", os.path.dirname(directory))
    return None


def store_of(root: str) -> str:
    """The directory of the store of a root."""
    return os.path.join(root, SERVICE)


def mount_fault(store: str, save_dir: str) -> str | None:
    """Why files of the store cannot be shown in `save_dir`; None if no reason is known."""
    with suppress(OSError):
        if os.stat(store).st_dev != os.stat(save_dir).st_dev:
            return (
                f"{save_dir} lies on another file system than {store}: no files can be shown in it, as they share their space "
                "with the store; name a root on the same one"
            )
    return None
