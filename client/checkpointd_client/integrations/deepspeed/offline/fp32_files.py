"""Writes weights to files for other programs, reading each on demand; the files appear whole, the index last.

Invariant
  WEIGHTFILE-1  About `SLAB_BYTES` of a tensor are in memory at once.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from checkpointd.config import MIB
from checkpointd.errors import UsageError
from checkpointd.export.consolidate import Container, ExportRequest, Safetensors
from checkpointd.export.output import ExportOutput, Output, translated
from checkpointd.export.safetensors import INDEX, Item, split
from checkpointd.export.selection import Exported, Selection, StoredSourceTensor, whole_view
from checkpointd.export.stream import PlacedTensor
from checkpointd.phrases import byte_count
from checkpointd_client.capture.dtypes import DTYPES, NAMES
from checkpointd_client.export.torch_file import TorchFile

if TYPE_CHECKING:
    from checkpointd_client.integrations.deepspeed.offline.lazy_tensor import LazyTensor

SLAB_BYTES = 32 * MIB
SINGLE, SHARD, TORCH_INDEX = (
    "pytorch_model.bin",
    "pytorch_model-{number:05d}-of-{count:05d}.bin",
    "pytorch_model.bin.index.json",
)


class TorchFiles:
    """A directory of files of torch.save, with the names that Hugging Face gives them."""

    name = "torch"

    def __init__(self, file_bytes_max: int | None) -> None:
        self._file_bytes_max = file_bytes_max
        self._files: list[tuple[TorchFile, _OneFile, Sequence[PlacedTensor]]] = []

    def directory(self) -> bool:
        return True

    def begin(self, selection: Selection, request: ExportRequest, output: ExportOutput) -> Sequence[PlacedTensor]:
        kept, tied = selection.untied
        parts = split([Item(t.name, request.dtype_of(t), t.shape) for t in kept], self._file_bytes_max)
        names = [SHARD.format(number=n, count=len(parts)) for n in range(1, len(parts) + 1)] if len(parts) > 1 else [SINGLE]
        weight_map: dict[str, str] = {}
        for file, items in zip(names, parts, strict=True):
            here = {item.name for item in items}
            shown = tuple(t for t in selection.names if tied.get(t.name, t.name) in here)
            inside, made = _OneFile(output, file), TorchFile()
            self._files.append((made, inside, made.begin(Selection(shown), request, inside)))
            weight_map |= {tensor.name: file for tensor in shown}
        if len(parts) > 1:
            total = sum(item.nbytes for items in parts for item in items)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
            output.create(TORCH_INDEX, text.encode(), len(text.encode()))
        return [item for _, _, placed in self._files for item in placed]

    def finish(self, sums: Mapping[str, int], output: ExportOutput) -> None:
        for made, inside, _ in self._files:
            made.finish(sums, inside)


class _OneFile(Output):
    """One file of an output directory, as an output for a container of one file."""

    def __init__(self, output: ExportOutput, name: str) -> None:
        self._output, self._name = output, name

    def path(self, name: str) -> str:
        return self._output.path(self._name)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The result of `fill`."""

    selection: Selection
    bytes: int


def write_files(
    tensors: Mapping[str, LazyTensor],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None,
    *,
    safe_serialization: bool,
) -> None:
    """Write `tensors`, in fp32, into `output_dir`, which is made if missing; files of the same names are replaced."""
    most = None if max_shard_size is None else byte_count(max_shard_size, "max_shard_size")
    place = os.path.abspath(os.fspath(output_dir))
    if os.path.lexists(place) and not os.path.isdir(place):
        raise UsageError(f"{place} must be a directory, but is a file: give another place")
    with translated("creating", place):
        os.makedirs(place, exist_ok=True)
    container: Container = Safetensors(f"{place}/", most) if safe_serialization else TorchFiles(most)
    made = os.path.join(place, f".converted-{secrets.token_hex(6)}")
    with Output(made, directory=True) as output:
        fill(tensors, container, ExportRequest(dtype="fp32"), output)
        names = [name for name, _ in output.publish()]
    with translated("publishing", place):
        for name in sorted(names, key=lambda name: name in (INDEX, TORCH_INDEX)):
            os.replace(os.path.join(made, name), os.path.join(place, name))
        os.rmdir(made)


def fill(
    tensors: Mapping[str, LazyTensor],
    container: Container,
    request: ExportRequest,
    output: Output,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> WrittenFiles:
    """Make the files of `container` in `output`, and write the tensors into them."""
    selection = selection_of(tensors)
    placed = container.begin(selection, request, output)
    done, total = 0, sum(item.nbytes for item in placed)
    sums: dict[str, int] = {}
    on_progress(done, total)
    with translated("writing", output.place):
        for item in placed:
            sums[item.tensor.name] = _write(tensors[item.tensor.source.fqn], item)
            done += item.nbytes
            on_progress(done, total)
        container.finish(sums, output)
    return WrittenFiles(selection, total)


def selection_of(tensors: Mapping[str, LazyTensor]) -> Selection:
    """A selection of all `tensors`; names of one object are tied."""
    owners: dict[int, str] = {}
    found = []
    for name, tensor in tensors.items():
        owner, shape = owners.setdefault(id(tensor), name), tuple(tensor.shape)
        if tensor.dtype not in NAMES:
            raise UsageError(f"{name} is of {tensor.dtype}, which no file format supports")
        source = StoredSourceTensor(owner, NAMES[tensor.dtype], shape, None)
        found.append(Exported(name, owner, source, whole_view(shape)))
    return Selection(tuple(found))


def _write(tensor: LazyTensor, item: PlacedTensor) -> int:
    """Write the elements to their place, some at a time; returns their CRC-32."""
    checksum, dtype = 0, DTYPES[item.dtype]
    step = max(1, SLAB_BYTES // max(tensor.dtype.itemsize, dtype.itemsize))
    descriptor = os.open(item.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for start in range(0, item.count, step):
            part = torch.empty(min(step, item.count - start), dtype=tensor.dtype)
            tensor.copy(start, part)
            data = part.to(dtype).view(torch.uint8).numpy().data
            checksum = zlib.crc32(data, checksum)
            at = item.offset + start * dtype.itemsize
            while data:
                written = os.pwrite(descriptor, data, at)
                data, at = data[written:], at + written
    finally:
        os.close(descriptor)
    return checksum
