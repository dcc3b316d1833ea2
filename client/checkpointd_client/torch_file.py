"""The file of torch.save, made around tensors that are not there yet: torch writes it hollow, the bytes are put in later.

torch pickles fake tensors, which have no memory, and leaves room for their bytes (`torch.serialization.skip_data`). Where the
rooms are says the directory of the zip file that it is, which also has a checksum of each: both are set right at the end.
"""

from __future__ import annotations

import os
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpointd.errors import UsageError
from checkpointd.pipeline.export.consolidate import Request
from checkpointd.pipeline.export.output import Output, reserve
from checkpointd.pipeline.export.selection import Exported, Selection, Source, View, contiguous_stride
from checkpointd.pipeline.export.stream import Placed
from checkpointd_client.dtypes import DTYPES

# The records of a zip file and where in them the CRC-32 stands (APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12).
_LOCAL, _LOCAL_CRC, _LOCAL_NAMES, _LOCAL_BYTES = b"PK\x03\x04", 14, 26, 30
_CENTRAL, _CENTRAL_CRC, _CENTRAL_NAMES, _CENTRAL_BYTES = b"PK\x01\x02", 16, 28, 46
_DESCRIPTOR, _DESCRIPTOR_CRC, _HAS_DESCRIPTOR = b"PK\x07\x08", 4, 8


@dataclass(frozen=True, slots=True)
class Room:
    """Where the bytes of one storage go in the file, and every place that has their CRC-32."""

    offset: int
    size: int
    sums_at: tuple[int, ...]


class TorchFile:
    """A dict of tensors by name as torch.save writes it; names that share memory share a storage."""

    name = "torch"

    def __init__(self) -> None:
        self._rooms: dict[str, Room] = {}

    def directory(self) -> bool:
        return False

    def begin(self, selection: Selection, request: Request, output: Output) -> Sequence[Placed]:
        path = output.path("")
        stored = _sources(selection)
        dtypes = {source: request.dtype_of(tensor) for source, tensor in stored.items()}
        _write_hollow(selection, dtypes, path)
        rooms = _rooms(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        # torch numbers the storages as it meets them, which is the order of the names.
        self._rooms = {tensor.name: rooms[number] for number, tensor in enumerate(stored.values())}
        return [Placed(tensor, dtypes[source], path, self._rooms[tensor.name].offset) for source, tensor in stored.items()]

    def finish(self, sums: Mapping[str, int], output: Output) -> None:
        """Put the checksums in, as every zip reader looks for them."""
        descriptor = os.open(output.path(""), os.O_WRONLY | os.O_CLOEXEC)
        try:
            for name, room in self._rooms.items():
                for at in room.sums_at:
                    os.pwrite(descriptor, struct.pack("<I", sums[name]), at)
        finally:
            os.close(descriptor)


def _sources(selection: Selection) -> dict[Source, Exported]:
    """What is stored, in the order in which names first need it: all of each source, whatever a name shows of it."""
    found: dict[Source, Exported] = {}
    for tensor in selection.names:
        source = tensor.source
        whole = View(source.shape, contiguous_stride(source.shape), 0)
        found.setdefault(source, Exported(source.fqn, source.fqn, source, whole))
    return found


def _write_hollow(selection: Selection, dtypes: Mapping[Source, str], path: str) -> None:
    missing = next((source for source, dtype in dtypes.items() if dtype not in DTYPES), None)
    if missing is not None:
        raise UsageError(f"{missing.fqn} has the dtype {dtypes[missing]}, which this torch does not have")
    with _quiet(), FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        storages = {source: torch.empty(source.shape, dtype=DTYPES[dtype]) for source, dtype in dtypes.items()}
        shown = {
            tensor.name: storages[tensor.source].as_strided(tensor.view.shape, tensor.view.stride, tensor.view.offset)
            for tensor in selection.names
        }
        try:
            torch.save(shown, path)
        except KeyError as error:
            names = [name for name, tensor in shown.items() if str(tensor.dtype) in str(error)]
            raise UsageError(f"{', '.join(names)} cannot be saved by this torch: {error.args[0]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of complex32 wherever such a tensor is made; here none is ever computed with."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def _rooms(path: str) -> list[Room]:
    """Where each storage lies, by its number."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        sums_at = dict(zip((info.filename for info in archive.infolist()), _central_sums(archive, path), strict=True))
        found = {}
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data"):
                offset = data_offset(file.fileno(), info.header_offset)
                places = (info.header_offset + _LOCAL_CRC, sums_at[info.filename])
                if info.flag_bits & _HAS_DESCRIPTOR:
                    places = (offset + info.file_size + _DESCRIPTOR_CRC, sums_at[info.filename])
                found[int(number)] = Room(offset, info.file_size, places)
    return [found[number] for number in range(len(found))]


def data_offset(descriptor: int, header: int) -> int:
    """Where the bytes of the member begin whose local header is at `header`."""
    names, extra = struct.unpack("<HH", os.pread(descriptor, 4, header + _LOCAL_NAMES))
    return header + _LOCAL_BYTES + int(names) + int(extra)


def _central_sums(archive: zipfile.ZipFile, path: str) -> Iterator[int]:
    """Where the central directory has the CRC-32 of each member, in the order of the directory."""
    with open(path, "rb") as file:
        at = archive.start_dir
        for _ in archive.infolist():
            file.seek(at)
            record = file.read(_CENTRAL_BYTES)
            yield at + _CENTRAL_CRC
            at += _CENTRAL_BYTES + sum(struct.unpack_from("<HHH", record, _CENTRAL_NAMES))
