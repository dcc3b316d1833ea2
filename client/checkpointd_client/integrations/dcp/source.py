"""Reads a DCP directory: each box of a tensor is a file of torch.save inside a larger file, and is read in parts.

Invariant
  DCPSOURCE-1  Only the wanted part of a tensor is read into memory. A box whose elements lie in another order (transposed) is
      mapped as a whole, and the kernel may drop its pages.
"""

from __future__ import annotations

import io
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.errors import FormatError, NotFoundError, UnreadableError
from checkpointd.layout.boxes import Box
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.regions import slices
from checkpointd.pipeline.read.plan import CARRIERS
from checkpointd.pipeline.shard import Bytes
from checkpointd.regular_files import open_regular
from checkpointd.system_errors import in_words
from checkpointd_client.capture.dtypes import NAMES
from checkpointd_client.integrations.conversion.metadata_file import DcpFileRange
from checkpointd_client.unpickling.torch_file import UntrustedTorchFile

_LOOK_BYTES = 4096
OBJECT_BYTES_MAX = 1 << 28
"""The largest object that is read: it must fit into an index."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Where the elements of one box lie: `nbytes` of storage from byte `offset` of the file; `stride` and `first` count
    elements.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    offset: int
    nbytes: int
    contiguous: bool


class Directory:
    """The files of a DCP directory, one of them open at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = ""
        self._file: io.BufferedReader | None = None
        self._known: tuple[DcpFileRange, Elements] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def object(self, name: str, place: DcpFileRange) -> bytes:
        """The bytes of an object."""
        if place.length > OBJECT_BYTES_MAX:
            raise FormatError(f"{name} is an object of {place.length} bytes, more than {OBJECT_BYTES_MAX}", fqn=name)
        data = bytearray(place.length)
        self._fill(place.file, memoryview(data), place.offset, name)
        return bytes(data)

    def copy(self, fqn: str, dtype: str, frame: Box, place: DcpFileRange, part: Box, target: Bytes) -> None:
        """Copy `part` into `target`, as ElementReader asks. FormatError if `place` holds no box like `frame` of `dtype`."""
        elements = self._elements(fqn, place)
        if (elements.dtype, elements.shape) != (dtype, frame.sizes):
            raise FormatError(
                f"{fqn}: {place.file} holds {elements.dtype}{list(elements.shape)}, "
                f"and the metadata says {dtype}{list(frame.sizes)}",
                fqn=fqn,
            )
        if elements.contiguous:
            start = elements.first + _position(frame, part)
            self._fill(place.file, target.data, elements.offset + start * ITEM_BYTES[dtype], fqn)
        else:
            target.view(CARRIERS[ITEM_BYTES[dtype]])[:] = self._mapped(place, elements)[slices(frame, part)].reshape(-1)

    def _elements(self, fqn: str, place: DcpFileRange) -> Elements:
        if self._known is None or self._known[0] != place:
            self._known = place, _looked_at(self._open(place.file), fqn, place)
        return self._known[1]

    def _open(self, name: str) -> io.BufferedReader:
        if self._file is None or self._name != name:
            if self._file is not None:
                self._file.close()
            try:
                self._file = open_regular(self.path / name)
            except FileNotFoundError:
                raise NotFoundError(f"{self.path} has no file {name}, which its metadata names") from None
            except OSError as error:
                raise UnreadableError(f"{self.path / name} cannot be opened: {in_words(error, 'file')}") from error
            self._name = name
        return self._file

    def _fill(self, name: str, target: memoryview, offset: int, fqn: str) -> None:
        descriptor = self._open(name).fileno()
        while target:
            try:
                got = os.preadv(descriptor, [target], offset)
            except OSError as error:
                raise UnreadableError(f"reading {self.path / name} failed: {in_words(error, 'file')}") from error
            if not got:
                raise FormatError(f"{self.path / name} ends before byte {offset + len(target)}, where {fqn} ends", fqn=fqn)
            target, offset = target[got:], offset + got

    def _mapped(self, place: DcpFileRange, elements: Elements) -> NDArray[Any]:
        """The box, mapped from the file."""
        carrier = CARRIERS[ITEM_BYTES[elements.dtype]]
        mapped = _section(self._open(place.file), elements.offset, elements.nbytes)
        flat = np.frombuffer(mapped, np.uint8).view(carrier)[elements.first :]
        strides = [stride * carrier.itemsize for stride in elements.stride]
        return np.lib.stride_tricks.as_strided(flat, elements.shape, strides, writeable=False)


class _FileSection(io.RawIOBase):
    """A part of a file, readable as a file of its own."""

    def __init__(self, descriptor: int, place: DcpFileRange) -> None:
        super().__init__()
        self._descriptor, self._place, self._at = descriptor, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, target: Any) -> int:
        room = memoryview(target).cast("B")[: max(0, self._place.length - self._at)]
        got = os.preadv(self._descriptor, [room], self._place.offset + self._at) if room else 0
        self._at += got
        return got


def _section(file: io.BufferedReader, offset: int, nbytes: int) -> memoryview:
    """These bytes of the file as memory; writing to it does not change the file."""
    before = offset % mmap.ALLOCATIONGRANULARITY
    return memoryview(mmap.mmap(file.fileno(), nbytes + before, offset=offset - before, access=mmap.ACCESS_COPY))[before:]


def _position(frame: Box, part: Box) -> int:
    """The row-major number in `frame` of the first element of `part`."""
    at = 0
    for offset, size, inside in zip(frame.offsets, frame.sizes, part.offsets, strict=True):
        at = at * size + inside - offset
    return at


def _looked_at(file: io.BufferedReader, fqn: str, place: DcpFileRange) -> Elements:
    """Describe the file of torch.save at `place` without reading its elements."""
    view = io.BufferedReader(_FileSection(file.fileno(), place), _LOOK_BYTES)
    try:
        content = UntrustedTorchFile(view, lambda: _section(file, place.offset, place.length))
        tensor = content.value()
    except Exception as error:  # bytes of unknown origin: any error means that they cannot be read
        raise FormatError(f"{fqn}: {place.file} has no tensor of torch.save at byte {place.offset}: {error!r}") from error
    stored = [entry for name, entry in content.entries.items() if name.startswith("data/")]
    if not isinstance(tensor, torch.Tensor) or len(stored) != 1:
        raise FormatError(f"{fqn}: {place.file} holds a {type(tensor).__name__} in {len(stored)} storages, not a tensor in one")
    found = Elements(
        dtype=NAMES.get(tensor.dtype, str(tensor.dtype)),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        first=int(tensor.storage_offset()),
        offset=place.offset + stored[0].offset,
        nbytes=stored[0].size,
        contiguous=tensor.is_contiguous(),
    )
    last = found.first + sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True)) + 1
    if tensor.is_conj() or tensor.is_neg() or last * tensor.itemsize > found.nbytes:
        raise FormatError(f"{fqn}: {place.file} does not have all of its elements, or has them conjugated or negated", fqn=fqn)
    return found
