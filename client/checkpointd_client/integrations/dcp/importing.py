"""Imports a DCP directory as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from checkpointd import arguments
from checkpointd.errors import FormatError, UsageError
from checkpointd.export.consolidate import memory_of
from checkpointd.layout import tree
from checkpointd.layout.keys import check_tag, is_tag
from checkpointd_client.integrations.conversion import metadata_file
from checkpointd_client.integrations.conversion.importing import (
    MEMORY_BYTES,
    MEMORY_BYTES_MIN,
    ImportJob,
    import_at,
    refuse_other,
)
from checkpointd_client.integrations.conversion.items import described
from checkpointd_client.integrations.conversion.metadata_file import Described
from checkpointd_client.integrations.dcp import about
from checkpointd_client.integrations.dcp.about import About
from checkpointd_client.integrations.dcp.source import OBJECT_BYTES_MAX, Directory
from checkpointd_client.integrations.dcp.tagged import step_of


class ImportedDCP(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an import. `parts`: how many ranks the checkpoint records; `pickled`: values that are not plain; `loose`:
    some tensors that lie at the top, as those of a module whose state_dict() was saved alone.
    """

    root: str
    tag: str
    step: int
    source: str
    tensors: int
    values: int
    bytes: int
    parts: int
    pickled: tuple[str, ...]
    loose: tuple[str, ...]


def import_dcp(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    step: int | None = None,
    save_latest: bool = True,
    force: bool = False,
    module: str | None = None,
    memory: int | str = MEMORY_BYTES,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> ImportedDCP:
    """Make checkpoint `tag` below `root` from the DCP directory `source`, which is only read.

    `tag`: None takes the directory's name. `step`: None takes the step that export_dcp recorded; if it recorded none, the last
    number in the tag, or 0. Metrics and client_state are those that export_dcp recorded. About `memory` bytes are held at once,
    for tensors of any size. `module`: the name under which `load({module: model})` is to find what lies at the top of the
    directory, as after `dcp.save(model.state_dict())`. `force`: import even if the tag exists. `on_progress` gets the bytes
    written and their total.

    Raises NotFoundError, UsageError with the right command if `source` is of another format, FormatError if the directory is
    damaged or its metadata names anything but DCP's own classes, RootInUseError if a job is alive at the root, StoreError.
    """
    arguments.path("source", source)
    held = memory_of(memory, MEMORY_BYTES_MIN)
    path = Path(source).absolute()
    if not os.path.lexists(path / metadata_file.NAME):
        refuse_other(path, root)
    tag = _tag_of(path) if tag is None else check_tag(tag)
    found, told = metadata_file.read(path), about.read(path)
    if module is not None:
        found = found.below(module)
    if step is None:
        step = step_of(tag) if told is None else told.step
    with Directory(path) as directory:
        content, pickled = _tree(found, directory, told)
        job = ImportJob(
            given=str(path),
            source=str(path),
            tensors=found.tensors,
            root=content,
            reader=directory,
            tag=tag,
            step=step,
            metrics={} if told is None else told.metrics,
            save_latest=save_latest,
            memory=held,
            on_progress=on_progress,
        )
        url, nbytes, parts = import_at(root, job, force=force)
    return ImportedDCP(
        root=url,
        tag=tag,
        step=step,
        source=str(path),
        tensors=len(found.tensors),
        values=len(found.objects),
        bytes=nbytes,
        parts=parts,
        pickled=pickled,
        loose=found.loose()[:4],
    )


def _tag_of(path: Path) -> str:
    if not is_tag(path.name):
        raise UsageError(f"{path.name!r} cannot be a tag: name one")
    return path.name


def _tree(found: Described, directory: Directory, told: About | None) -> tuple[tree.Node, tuple[str, ...]]:
    """The tree with all names and values, and the names of the values that are not plain."""
    leaves: dict[str, tree.Tensor | bytes] = {tensor.fqn: tree.Tensor(tensor.fqn) for tensor in found.tensors}
    nbytes = sum(place.length for place in found.objects.values())
    if nbytes > OBJECT_BYTES_MAX:
        raise FormatError(f"{directory.path} names objects of {nbytes} bytes together, more than {OBJECT_BYTES_MAX}")
    leaves |= {name: directory.object(name, place) for name, place in found.objects.items()}
    return described(leaves, found.paths, () if told is None else told.client_items())
