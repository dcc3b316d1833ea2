"""A checkpoint as Ray registers it: a directory with one small file, which names a checkpoint at the root.

Ray copies, lists and removes whole directories. A checkpoint at the root shares objects with others, so Ray gets references.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

import msgspec

from checkpointd.errors import FormatError, NotFoundError, UsageError
from checkpointd_client.integrations.ray.storage import FOLDER, root_of
from checkpointd_client.reader import OpenCheckpoint, open_checkpoint

NAME = "checkpointd.json"
OF_THE_RUN = f"../{FOLDER}"
"""Written in place of the run's own root, so that a run that was copied elsewhere refers to its copy."""


class Reference(msgspec.Struct, frozen=True):
    """The checkpoint `tag` of `step` at `root`; `tag` is None if nothing had been committed.

    `failed`: why the save that was reported failed; it is then the newest checkpoint before it.
    """

    root: str
    tag: str | None
    attempt: str | None = None
    step: int | None = None
    failed: str | None = None

    def write(self, filesystem: Any, directory: str) -> None:
        """Make `directory` of a pyarrow file system, with this in it."""
        filesystem.create_dir(directory)
        with filesystem.open_output_stream(posixpath.join(directory, NAME)) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)))


def read(filesystem: Any, directory: str) -> Reference:
    """The reference in `directory`. Raises UsageError if there is none, FormatError if it cannot be read."""
    path = posixpath.join(directory, NAME)
    try:
        with filesystem.open_input_stream(path) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory} has no {NAME}: RayCheckpointer.report() has not reported this checkpoint. Open it with "
            "the program that wrote it"
        ) from error
    try:
        return msgspec.json.decode(content, type=Reference)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} cannot be read as a reference to a checkpoint: {error}", key=path) from error


def tags(filesystem: Any, experiment: str, known: Mapping[str, str | None]) -> dict[str, str | None]:
    """The directories in `experiment` that hold a reference, with the tags that these name. Those that are `known` are not
    read again.
    """
    from pyarrow.fs import FileSelector, FileType

    found = {}
    for entry in filesystem.get_file_info(FileSelector(experiment)):
        if entry.type is not FileType.Directory or entry.base_name == FOLDER:
            continue
        try:
            found[entry.path] = known[entry.path] if entry.path in known else read(filesystem, entry.path).tag
        except (UsageError, FormatError):
            continue  # Ray keeps other directories there, too, and a killed worker may leave a part of a reference
    return found


def open_reported(checkpoint: Any, **options: Any) -> OpenCheckpoint:
    """Open a `ray.train.Checkpoint` that `RayCheckpointer.report()` reported, such as `result.checkpoint`, in any process.

    `options` are those of `open_checkpoint`. Raises UsageError if something else reported the checkpoint. Raises
    NotFoundError if no save had committed when it was reported, or if the checkpoint was removed since.
    """
    found = read(checkpoint.filesystem, checkpoint.path)
    if found.tag is None:
        raise NotFoundError(f"{checkpoint.path}: the save that it reports failed, and there was no earlier one: {found.failed}")
    inside = found.root == OF_THE_RUN
    root = root_of(checkpoint.filesystem, posixpath.dirname(checkpoint.path.rstrip("/"))) if inside else found.root
    return open_checkpoint(root, found.tag, attempt=found.attempt, **options)
