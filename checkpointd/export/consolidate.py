"""Exports one checkpoint, or a part of it, as plain files, in four stages: select, lay out, stream, publish."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, get_args

import msgspec

from checkpointd import __version__, arguments
from checkpointd.bucket_urls import directory_of, is_bucket_url, parse
from checkpointd.codec.convert import target_of
from checkpointd.config import ABSENCE_S, EXPORT_BYTES_MIN, MIB, ExportDType, LoadConfig
from checkpointd.errors import UsageError
from checkpointd.export.bucket_output import BucketOutput
from checkpointd.export.output import ExportOutput, Output, on_thread, translated
from checkpointd.export.record import ExportRecord, ballot_of
from checkpointd.export.safetensors import INDEX, FilePlan, Item, Unsupported, file_names, index_json, plan_file, split
from checkpointd.export.selection import (
    METADATA,
    MODEL,
    Exported,
    Selection,
    check_ordinary,
    is_of_module,
    of_masters,
    select,
    with_plain_names,
)
from checkpointd.export.stream import PlacedTensor, Turn, at_once, stream
from checkpointd.layout import tree
from checkpointd.layout.boxes import whole
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.phrases import byte_count
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.checkpoint_view import CheckpointView, read_view
from checkpointd.pipeline.read.plan import BoxRequest, gaps
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import named
from checkpointd.pipeline.root.wholeness import check_whole
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience

DType = ExportDType
_TARGETS: dict[str, str | None] = {"keep": None, "fp32": "float32", "bf16": "bfloat16"}

MEMORY_BYTES = 512 * MIB
MEMORY_BYTES_MIN = EXPORT_BYTES_MIN


def memory_of(memory: int | str, least: int = MEMORY_BYTES_MIN) -> int:
    """`memory` in bytes; UsageError if it is not a size, or less than `least`."""
    held = byte_count(memory, "memory")
    if held < least:
        raise UsageError(f"memory is {held} bytes; at least {least} are needed")
    return held


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """The request for an export. `tag`: None means the tag that `latest` names. `only`: export only the part of the state below
    this name, and strip the name from the tensors' names.

    With `dtype` "fp32", the model's parameters come from their fp32 masters if the state has a part `master`.
    `rank`: the rank whose per-rank tensors are exported. `memory_bytes`: about how much memory the export uses.
    """

    tag: str | None = None
    only: str | None = None
    dtype: DType = "keep"
    rank: int | None = None
    force: bool = False
    memory_bytes: int = MEMORY_BYTES
    plain_names: bool = False
    """Whether names lose what wrappers such as torch.compile have put into them (`with_plain_names`)."""
    beside: Mapping[str, bytes] | None = None
    """Files to put beside the weights, by name, with a record of the export; None: neither, but a bucket gets the record."""

    def __post_init__(self) -> None:
        arguments.choice("dtype", self.dtype, get_args(DType))
        memory_of(self.memory_bytes)

    def dtype_of(self, tensor: Exported) -> str:
        """The dtype of `tensor` in the export."""
        return target_of(tensor.dtype, _TARGETS[self.dtype])


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the export and its size in bytes."""

    name: str
    size: int


class Consolidation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export. `tied` maps names to the name whose tensor they share; `bytes` counts the tensors' bytes."""

    root: str
    tag: str
    step: int
    out: str
    format: str
    tensors: int
    tied: Mapping[str, str]
    bytes: int
    files: tuple[ExportedFile, ...]


class Container(Protocol):
    """A file format: it creates files before their tensors are written, and completes them afterwards."""

    name: str

    def directory(self) -> bool:
        """Whether the output is a directory of files; otherwise it is one file."""
        ...

    def begin(self, selection: Selection, request: ExportRequest, output: ExportOutput) -> Sequence[PlacedTensor]:
        """Create the files in `output`; returns the place of each tensor, file by file, in the order of their offsets.

        UsageError if the format cannot hold a tensor.
        """
        ...

    def finish(self, sums: Mapping[str, int], output: ExportOutput) -> None:
        """Complete the files after all bytes were written; `sums` has the CRC-32 of each placed tensor by name."""
        ...


async def consolidate(
    store: Store,
    out: str | os.PathLike[str],
    container: Container,
    request: ExportRequest,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> Consolidation:
    """Export to `out`, which appears whole or not at all; `on_progress` receives the bytes written and their total.

    Raises NotFoundError, UsageError, DamagedError with object, FQN and rank, StoreError, StoreFullError.
    """
    check_outside(store, out)
    if request.beside and not container.directory():
        raise UsageError(
            f"files can be copied only into a directory, and {os.fspath(out)} is one file: give a directory as OUT"
        )
    async with _output(out, container, request) as output:
        checkpoint = await root_view.find(store, await named(store, request.tag))
        await check_whole(store, checkpoint, Patience(ABSENCE_S, ABSENCE_S))
        return await export_checkpoint(store, checkpoint, output, container, request, on_progress)


@asynccontextmanager
async def _output(out: str | os.PathLike[str], container: Container, request: ExportRequest) -> AsyncIterator[ExportOutput]:
    place = os.fspath(out)
    if not is_bucket_url(place):
        async with Output(place, directory=container.directory(), force=request.force) as output:
            yield output
        return
    if not container.directory() or container.name != Safetensors.name:
        raise UsageError(f"{place}: only a directory of safetensors can be written to a bucket")
    async with open_store(place) as store, BucketOutput(store, "", force=request.force) as in_bucket:
        yield in_bucket


async def export_checkpoint(
    store: Store,
    checkpoint: LoggedAttempt,
    output: ExportOutput,
    container: Container,
    request: ExportRequest,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
    *,
    turn: Turn = at_once,
) -> Consolidation:
    """Export `checkpoint` to `output`, which was entered, and show it there. `turn`: see `Turn`. Raises as `consolidate`."""
    load = LoadConfig(budget_bytes=request.memory_bytes // 4)
    world = await read_view(store, checkpoint, load)
    selection = select(world, request.only, request.rank)
    check_ordinary(world, selection)
    if request.dtype == "fp32" and request.only == MODEL:
        selection = of_masters(world, selection)
    if request.plain_names:
        selection = with_plain_names(selection, is_of_module=is_of_module(world, request.only))
    _check_whole(world, selection)
    placed = await on_thread(lambda: container.begin(selection, request, output))
    done, total = 0, sum(item.nbytes for item in placed)
    for name, data in (request.beside or {}).items():
        output.create(name, data, len(data))
    if request.beside is not None or isinstance(output, BucketOutput):
        output.describe(_record(store, checkpoint, request, total))
    on_progress(done, total)

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    sums = await stream(store, world, placed, load, request.memory_bytes // 4, add, write=output.write, turn=turn)
    with translated("writing", output.place):
        await on_thread(lambda: container.finish(sums, output))
    await turn(0)
    files = await output.show()
    return Consolidation(
        root=store.url,
        tag=checkpoint.tag,
        step=checkpoint.commit.step,
        out=output.place,
        format=container.name,
        tensors=len(selection.names),
        tied=selection.untied[1],
        bytes=total,
        files=tuple(ExportedFile(name=name, size=size) for name, size in files),
    )


def _record(store: Store, checkpoint: LoggedAttempt, request: ExportRequest, nbytes: int) -> ExportRecord:
    return ExportRecord(
        complete=True,
        root=store.url,
        tag=checkpoint.tag,
        attempt=str(checkpoint.id),
        order=checkpoint.commit.order,
        ballot=ballot_of(checkpoint),
        step=checkpoint.commit.step,
        only=request.only,
        dtype=request.dtype,
        bytes=nbytes,
        files=(),
        release=__version__,
        time=writer().time,
    )


def _check_whole(world: CheckpointView, selection: Selection) -> None:
    """Check that all elements are stored. This comes before any allocation by a shape, which may be damaged."""
    sources = {tensor.source for tensor in selection.names}
    missing = gaps(world, (BoxRequest(source.fqn, whole(source.shape), None, source.rank) for source in sources))
    if missing:
        raise missing[0]


def check_outside(store: Store, out: str | os.PathLike[str]) -> None:
    """UsageError if `out` lies inside the root, where it could be taken for a checkpoint or be in the way of one."""
    place = os.fspath(out)
    if is_bucket_url(place):
        if is_bucket_url(store.url) and parse(store.url).holds(parse(place)):
            raise UsageError(f"{place} lies inside the root {store.url}, which is for checkpoints: give a place outside")
        return
    if directory_of(store.url) is None:
        return
    root, place = os.path.realpath(store.url), os.path.realpath(out)
    if os.path.commonpath([root, place]) == root:
        raise UsageError(f"{place} lies inside the root {root}, which is for checkpoints: give a place outside")


class Safetensors:
    """safetensors: one file, or a directory of them with an index, as Hugging Face's libraries load them."""

    name = "safetensors"

    def __init__(self, out: str | os.PathLike[str], file_bytes_max: int | None) -> None:
        """`file_bytes_max`: the most bytes of tensors in each file of a directory. An `out` that ends in `.safetensors` is a
        single file, without a limit.
        """
        self._directory = not os.fspath(out).endswith(".safetensors")
        self._file_bytes_max = file_bytes_max if self._directory else None

    def directory(self) -> bool:
        return self._directory

    def begin(self, selection: Selection, request: ExportRequest, output: ExportOutput) -> Sequence[PlacedTensor]:
        tensors, tied = selection.untied
        by_name = {tensor.name: tensor for tensor in tensors}
        parts = split([Item(t.name, request.dtype_of(t), t.shape) for t in tensors], self._file_bytes_max)
        names = file_names(len(parts))
        placed: list[PlacedTensor] = []
        for name, items in zip(names, parts, strict=True):
            plan = _planned(name, items, tied, selection.versions)
            path = output.create(name, plan.header, plan.size)
            in_file = [PlacedTensor(by_name[item.name], item.dtype, path, plan.offsets[item.name]) for item in items]
            placed += sorted(in_file, key=lambda item: item.offset)
        if len(parts) > 1:
            index = index_json(zip(names, parts, strict=True))
            output.create(INDEX, index, len(index))
        return placed

    def finish(self, sums: Mapping[str, int], output: ExportOutput) -> None:
        """Nothing is left to do: the header, which was written first, describes the whole file."""


def _planned(name: str, items: Sequence[Item], tied: Mapping[str, str], versions: Mapping[str, tree.Node]) -> FilePlan:
    """The file with Hugging Face's metadata: the framework, and for every tied name the name whose tensor it shares. The
    versions of a module's parts are the JSON text under `_metadata`, where no format says that they should be.
    """
    here = {item.name for item in items}
    metadata = {other: kept for other, kept in tied.items() if kept in here}
    if versions:
        metadata[METADATA] = json.dumps(
            {path: dict(tree.items(version)) for path, version in versions.items()}, default=str, skipkeys=True
        )
    try:
        return plan_file(name, items, {**metadata, "format": "pt"})
    except Unsupported as error:
        raise UsageError(f"{error}: convert it (dtype fp32 or bf16), leave it out, or use the format torch") from error
