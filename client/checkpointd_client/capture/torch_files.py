"""Captures objects as files of torch.save: the bytes of the storages, and the hollow file around them.

torch writes each file without the bytes of its storages (`torch.serialization.skip_data`). So before save() returns, objects
are only pickled, which freezes every value except tensors. The zip directory tells where the bytes of each storage belong.
"""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import types
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture.leaves import Leaf, Leaves
from checkpointd_client.capture.state import Captured

# The records of a zip file, and the places of the CRC-32 in them (APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12).
_LOCAL, _LOCAL_CRC, _LOCAL_NAMES, _LOCAL_BYTES = b"PK\x03\x04", 14, 26, 30
_CENTRAL, _CENTRAL_CRC, _CENTRAL_NAMES, _CENTRAL_BYTES = b"PK\x01\x02", 16, 28, 46
_DESCRIPTOR, _DESCRIPTOR_CRC, _HAS_DESCRIPTOR = b"PK\x07\x08", 4, 8


Storages = list[tuple[torch.UntypedStorage, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The place of the bytes of one storage in the file, and all places of their CRC-32."""

    offset: int
    size: int
    sums_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedFile:
    """A file that is described already: the bytes around its tensors are kept, the tensors are still the user's."""

    node: tree.StoredFileNode
    leaves: tuple[Leaf, ...]


def capture_files(at: str, files: Mapping[str, object], optimizer_only: Collection[int]) -> Captured:
    """Capture `files`, objects by file name, as torch.save would write them, without copying a tensor. They are shown in `at`.
    An object may be a CapturedFile.

    `optimizer_only`: addresses of storages that only optimizer steps change. StateError for an object that cannot be pickled.
    """
    captured = [
        content if isinstance(content, CapturedFile) else capture_file(name, content, optimizer_only)
        for name, content in files.items()
    ]
    leaves = Leaves.of(leaf for file in captured for leaf in file.leaves)
    return Captured(leaves, (), tree.FilesNode(at, tuple(file.node for file in captured)), ())


def check_saveable(name: str, content: object) -> None:
    """Raise StateError, as `capture_files` does, if `content` cannot be pickled. This copies no tensor."""
    hollow_of(name, content)


@dataclass(frozen=True, slots=True)
class Hollow:
    """A file of torch.save without the bytes of its storages, of which each has a placeholder: `around` are all other bytes."""

    size: int
    around: bytes
    placeholders: list[Placeholder]
    storages: Storages


def hollow_of(name: str, content: object) -> Hollow:
    """The file `name` that torch.save would write, without the bytes of its storages. This copies no tensor. StateError if
    `content` cannot be pickled.
    """
    descriptor = os.memfd_create("checkpointd-hollow", os.MFD_CLOEXEC)
    with open(descriptor, "w+b") as file, tempfile.TemporaryDirectory(prefix="checkpointd-") as folder:
        # torch uses the file's name for the members of the archive.
        path = os.path.join(folder, os.path.basename(name) or "file")
        os.symlink(f"/proc/self/fd/{descriptor}", path)
        storages = _write_hollow(name, content, path)
        placeholders = placeholders_of(file)
        size = os.fstat(descriptor).st_size
        around = b"".join(_around(file, placeholders, size))
    return Hollow(size, around, placeholders, storages)


def capture_file(name: str, content: object, optimizer_only: Collection[int]) -> CapturedFile:
    """Capture one object, as `capture_files` does."""
    file = FileBuilder(name)
    hollow = hollow_of(name, content)
    tensors = [_bytes_of(storage, tensor) for storage, tensor in hollow.storages]
    file.add(hollow, tensors, [storage.data_ptr() in optimizer_only for storage, _ in hollow.storages])
    return file.captured()


class FileBuilder:
    """Describes the file `name` from its first byte to its last."""

    def __init__(self, name: str) -> None:
        self._name, self.size = name, 0
        self._around = bytearray()
        self._leaves: list[Leaf] = []
        self._placeholders: list[tuple[int, str]] = []
        self._sums: list[tuple[int, int]] = []

    def add_bytes(self, data: bytes | memoryview) -> None:
        """Go on with `data`."""
        self._around += data
        self.size += len(data)

    def add_tensor(self, tensor: torch.Tensor, *, by_steps: bool) -> None:
        """Go on with the bytes of a contiguous tensor. `by_steps`: only optimizer steps change it."""
        self._place(tensor, self.size, by_steps=by_steps)
        self.size += tensor.nbytes

    def add(self, hollow: Hollow, tensors: Sequence[torch.Tensor], by_steps: Sequence[bool]) -> None:
        """Go on with a file of torch.save, whose storages have the bytes of `tensors`."""
        for placeholder, tensor, only in zip(hollow.placeholders, tensors, by_steps, strict=True):
            self._sums += [(len(self._placeholders), self.size + at) for at in placeholder.sums_at]
            self._place(tensor, self.size + placeholder.offset, by_steps=only)
        self._around += hollow.around
        self.size += hollow.size

    def captured(self) -> CapturedFile:
        """The file that was described."""
        around = torch.frombuffer(self._around, dtype=torch.uint8) if self._around else torch.empty(0, dtype=torch.uint8)
        node = tree.StoredFileNode(
            name=self._name,
            size=self.size,
            hollow=self._name,
            placeholders=tuple(self._placeholders),
            sums=tuple(self._sums),
        )
        return CapturedFile(node, (Leaf(self._name, around, "uint8", optimizer_only=False), *self._leaves))

    def _place(self, tensor: torch.Tensor, offset: int, *, by_steps: bool) -> None:
        fqn = f"{self._name}/data/{len(self._placeholders)}"
        self._placeholders.append((offset, fqn))
        flat = tensor.detach()
        if flat.dtype != torch.uint8 or flat.dim() != 1:
            flat = flat.reshape(-1).view(torch.uint8)
        self._leaves.append(Leaf(fqn, flat, "uint8", optimizer_only=by_steps))


class _Recorder:
    """Records the storages that torch.save writes, by number, and for each a tensor that lies in it."""

    def __init__(self) -> None:
        self.found: dict[str, torch.UntypedStorage] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def note(self, number: str, value: Any) -> None:
        self.found[number] = getattr(value, "_untyped_storage", value)

    def module(self) -> types.SimpleNamespace:
        """A stand-in for the pickle module, to be passed to torch.save."""
        recorder = self

        class Pickler(pickle.Pickler):
            def __init__(self, *args: Any, **options: Any) -> None:
                named = type(self).persistent_id

                def persistent_id(value: object) -> object:
                    made = named(self, value)
                    if made is not None:
                        recorder.note(made[2], value)
                    return made

                self.persistent_id = persistent_id  # type: ignore[method-assign]  # torch's own is in the class below this one
                super().__init__(*args, **options)

            def reducer_override(self, value: Any) -> Any:
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    recorder.tensors.setdefault(value.untyped_storage()._cdata, value)
                return NotImplemented

        return types.SimpleNamespace(Pickler=Pickler, __name__="pickle")

    def storages(self) -> Storages:
        ordered = (self.found[str(number)] for number in range(len(self.found)))
        return [(storage, self.tensors.get(storage._cdata)) for storage in ordered]


def _write_hollow(name: str, content: object, path: str) -> Storages:
    recorder = _Recorder()
    try:
        with torch.serialization.skip_data():
            torch.save(content, path, pickle_module=recorder.module())
    except Exception as error:  # a __reduce__ may raise anything
        where = _culprit(content, path)
        raise StateError(f"{name} cannot be saved as torch.save saves it{where}: {error}") from error
    return recorder.storages()


def _culprit(content: object, path: str) -> str:
    """Names the key of the first value that cannot be pickled, in words; "" if each value can be pickled alone."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        try:
            with torch.serialization.skip_data():
                torch.save(value, path)
        except Exception:
            return f", because of {key!r}, a {type(value).__qualname__}"
    return ""


def _bytes_of(storage: torch.UntypedStorage, tensor: torch.Tensor | None) -> torch.Tensor:
    """The storage as bytes: if possible, a view that shares the tensor's version counter."""
    if tensor is not None and not tensor.is_conj() and not tensor.is_neg() and storage.nbytes() % tensor.itemsize == 0:
        whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
        if type(whole) is torch.Tensor:
            return whole.view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# --- the zip file ---------------------------------------------------------------------------------------------------


def placeholders_of(file: BinaryIO) -> list[Placeholder]:
    """The placeholder of each storage in a file of torch.save, by its number. The file may be hollow."""
    with zipfile.ZipFile(file) as archive:
        sums_at = dict(zip((info.filename for info in archive.infolist()), _central_sums(archive, file), strict=True))
        found = {}
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data"):
                offset = data_offset(file.fileno(), info.header_offset)
                places = (info.header_offset + _LOCAL_CRC, sums_at[info.filename])
                if info.flag_bits & _HAS_DESCRIPTOR:
                    places = (offset + info.file_size + _DESCRIPTOR_CRC, sums_at[info.filename])
                found[int(number)] = Placeholder(offset, info.file_size, places)
    return [found[number] for number in range(len(found))]


def data_offset(descriptor: int, header: int) -> int:
    """The offset of the bytes of the member whose local header is at `header`."""
    names, extra = struct.unpack("<HH", os.pread(descriptor, 4, header + _LOCAL_NAMES))
    return header + _LOCAL_BYTES + int(names) + int(extra)


def _central_sums(archive: zipfile.ZipFile, file: BinaryIO) -> Iterator[int]:
    """The offset of each member's CRC-32 in the central directory, in the order of the directory."""
    at = archive.start_dir
    for _ in archive.infolist():
        record = os.pread(file.fileno(), _CENTRAL_BYTES, at)
        yield at + _CENTRAL_CRC
        at += _CENTRAL_BYTES + sum(struct.unpack_from("<HHH", record, _CENTRAL_NAMES))


def _around(file: BinaryIO, placeholders: Sequence[Placeholder], size: int) -> Iterator[bytes]:
    """The bytes outside the placeholders, in order."""
    at = 0
    for placeholder in sorted(placeholders, key=lambda placeholder: placeholder.offset):
        yield os.pread(file.fileno(), placeholder.offset - at, at)
        at = placeholder.offset + placeholder.size
    yield os.pread(file.fileno(), size - at, at)
