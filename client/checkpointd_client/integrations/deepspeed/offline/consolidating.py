"""Writes the fp32 weights in DeepSpeed's files as plain files, for `checkpointd consolidate`."""

from __future__ import annotations

import os
from collections.abc import Callable

from checkpointd.errors import UsageError
from checkpointd.export.consolidate import Consolidation, Container, ExportedFile, ExportRequest
from checkpointd.export.output import Output
from checkpointd.layout.keys import SERVICE
from checkpointd_client.integrations.deepspeed.offline.fp32 import lazy_state_dict
from checkpointd_client.integrations.deepspeed.offline.fp32_files import fill
from checkpointd_client.integrations.deepspeed.offline.zero_files import open_files


def consolidate_zero(
    root: str,
    directory: str,
    out: str,
    container: Container,
    request: ExportRequest,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> Consolidation:
    """Write the weights of the checkpoint in `directory`, below `root`, to `out`, which appears whole or not at all.

    Raises NotFoundError, DamagedError naming the file, UsageError, StoreError, StoreFullError.
    """
    if request.only not in (None, "model"):
        raise UsageError(f"--only {request.only}: from DeepSpeed's files only the fp32 weights ('model') can be written")
    if request.rank is not None:
        raise UsageError("--rank is for values that each rank has for itself: DeepSpeed's files hold shared weights")
    inside, place = os.path.realpath(directory), os.path.realpath(out)
    if os.path.commonpath([inside, place]) == inside or f"{os.sep}{SERVICE}{os.sep}" in f"{place}{os.sep}":
        raise UsageError(f"{place} lies inside a checkpoint: give a place outside")
    tag = os.path.relpath(directory, root)
    with Output(out, directory=container.directory(), force=request.force) as output:
        written = fill(lazy_state_dict(root, tag), container, request, output, on_progress)
        files = output.publish()
    steps = open_files(directory).model.content.get("global_steps", 0)
    return Consolidation(
        root=root,
        tag=tag,
        step=steps if isinstance(steps, int) else 0,
        out=output.place,
        format=container.name,
        tensors=len(written.selection.names),
        tied=written.selection.untied[1],
        bytes=written.bytes,
        files=tuple(ExportedFile(name=name, size=size) for name, size in files),
    )
