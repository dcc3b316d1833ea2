"""Exports a checkpoint as a DCP directory: `.metadata`, files of boxes as torch.save writes them, and the file of `about.py`.

Invariant
  DCPEXPORT-1  About `memory` bytes are held at once: one batch that is read, and one that is written. A large tensor is written
      in several boxes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd import arguments
from checkpointd.config import LoadConfig
from checkpointd.export.consolidate import MEMORY_BYTES, ExportedFile, check_outside, memory_of
from checkpointd.export.output import Output, on_thread, translated
from checkpointd.export.selection import Exported
from checkpointd.export.stream import Batch, PlacedTensor, Slab, batches, pump
from checkpointd.layout.boxes import Box, boxes_of_range, whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.keys import LATEST, check_tag
from checkpointd.pipeline.read.checkpoint_view import read_view
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import named
from checkpointd.store.base import Store
from checkpointd_client.capture.dtypes import DTYPES, empty
from checkpointd_client.export.consolidate import run_on_store
from checkpointd_client.integrations.conversion import metadata_file
from checkpointd_client.integrations.conversion.metadata_file import DcpFileEntry, DcpFileRange
from checkpointd_client.integrations.conversion.objects import save_tensor
from checkpointd_client.integrations.dcp import about
from checkpointd_client.integrations.dcp.content import DcpContent, content_of

FILE_BYTES = 5 * 10**9
"""Once a file has as many bytes, the next one begins."""


class ExportedDCP(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export. `left_out`: arrays, and values that differed between the saving ranks; DCP cannot represent
    them.
    """

    root: str
    tag: str
    step: int
    out: str
    format: str
    tensors: int
    values: int
    bytes: int
    left_out: tuple[str, ...]
    files: tuple[ExportedFile, ...]


def export_dcp(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    force: bool = False,
    memory: int | str = MEMORY_BYTES,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> ExportedDCP:
    """Write checkpoint `tag` (default: latest) as a directory for DCP's FileSystemReader to `out`.

    It appears whole or not at all. About `memory` bytes are held at once, for tensors of any size. `on_progress` gets the bytes
    written and their total. Raises NotFoundError, UsageError if `out` is in the way, DamagedError with object, FQN and rank,
    StoreError, StoreFullError.
    """
    arguments.path("out", out)
    held = memory_of(memory)

    async def export(store: Store) -> ExportedDCP:
        check_outside(store, out)
        with Output(out, directory=True, force=force) as output:
            name = await named(store, None if tag is None or tag == LATEST else check_tag(tag))
            load = LoadConfig(budget_bytes=held // 4)
            content = content_of(await read_view(store, await root_view.find(store, name), load))
            files = _Files(output)
            with translated("writing", output.place):
                try:
                    total = await _stream(store, content, files, held // 4, on_progress)
                    files.finish(content)
                finally:
                    files.close()
            shown = output.publish()
        commit = content.world.checkpoint.commit
        return ExportedDCP(
            root=store.url,
            tag=name,
            step=commit.step,
            out=output.place,
            format="dcp",
            tensors=len(content.tensors),
            values=len(content.values) + len(content.objects),
            bytes=total,
            left_out=content.left_out,
            files=tuple(ExportedFile(name=file, size=size) for file, size in shown),
        )

    return run_on_store(root, export, read_only=True)


async def _stream(
    store: Store, content: DcpContent, files: _Files, batch_bytes: int, on_progress: Callable[[int, int], None]
) -> int:
    """Write all tensors to the files, reading a batch while the one before is written; returns their bytes."""
    placed = [PlacedTensor(tensor, tensor.dtype, "", 0) for tensor in content.tensors.values()]
    done, total = 0, sum(item.nbytes for item in placed)

    async def write(batch: Batch) -> None:
        nonlocal done
        await on_thread(lambda: files.add_all(batch))
        done += sum(_nbytes(slab) for slab, _ in batch)
        on_progress(done, total)

    found = batches(_slabs(placed, batch_bytes), batch_bytes)
    await pump(store, content.world, found, LoadConfig(budget_bytes=batch_bytes), write)
    return total


def _nbytes(slab: Slab) -> int:
    return (slab.stop - slab.start) * ITEM_BYTES[slab.placed.dtype]


def _slabs(placed: Sequence[PlacedTensor], slab_bytes: int) -> Iterator[Slab]:
    """Slabs of whole rows if these fit, so that a slab is one box; a view with scattered elements is one slab."""
    for item in placed:
        count, shape = item.count, item.tensor.shape
        row = max(1, math.prod(shape[1:]))
        step = max(1, slab_bytes // ITEM_BYTES[item.dtype]) if item.tensor.view.contiguous else max(1, count)
        step = step - step % row if step > row else step
        for start in range(0, max(count, 1), step):
            yield Slab(item, start, min(start + step, count))


@dataclass
class _Files:
    """Writes the files of the directory, one after the other; `written` says what lies where."""

    output: Output
    written: list[DcpFileEntry] = field(default_factory=list)
    _file: BinaryIO | None = None
    _name: str = ""
    _count: int = 0

    def add_all(self, batch: Batch) -> None:
        with translated("writing", self.output.place):
            for slab, memory in batch:
                self._add_slab(slab, slab.finished(memory))

    def _add_slab(self, slab: Slab, data: NDArray[Any]) -> None:
        tensor, at = slab.placed.tensor, 0
        if not slab.placed.count:
            self._add_tensor(tensor, whole(tensor.shape), empty(tensor.shape, DTYPES[tensor.dtype], torch.device("cpu")))
            return
        raw, item = data.view(np.uint8), ITEM_BYTES[tensor.dtype]
        for box in boxes_of_range(tensor.shape, slab.start, slab.stop):
            end = at + box.numel() * item
            part = torch.from_numpy(raw[at:end]).view(DTYPES[tensor.dtype]).view(box.sizes)
            self._add_tensor(tensor, box, part)
            at = end

    def _add_tensor(self, tensor: Exported, box: Box, part: torch.Tensor) -> None:
        self._add(tensor.name, box, lambda file: save_tensor(part, file))

    def _add(self, name: str, box: Box | None, write: Callable[[BinaryIO], object]) -> None:
        file = self._open()
        start = file.tell()
        write(file)
        self.written.append(DcpFileEntry(name, box, DcpFileRange(self._name, start, file.tell() - start)))
        if file.tell() >= FILE_BYTES:
            self.close()

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._name = f"__0_{self._count}.distcp"
            self._count += 1
            self._file = open(self.output.path(self._name), "xb")  # noqa: SIM115  # closed by close()
        return self._file

    def finish(self, content: DcpContent) -> None:
        for name in (*content.values, *content.objects):
            data = content.object_bytes(name)
            self._add(name, None, lambda file, data=data: file.write(data))  # type: ignore[misc]  # bound now
        self.close()
        data = metadata_file.encode(content.metadata(), self.written)
        self.output.create(metadata_file.NAME, data, len(data))
        told = about.encode(content.about(), data)
        self.output.create(about.NAME, told, len(told))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
