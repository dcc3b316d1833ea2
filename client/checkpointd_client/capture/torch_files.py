"""Objects as the files that torch.save makes of them, taken apart: the bytes of the storages, and what stands around them.

torch writes each file without the bytes of its storages (`torch.serialization.skip_data`), so that pickling, which freezes
everything that is no tensor, is all that is done before save() returns. Where the bytes go, says the zip directory.
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
from checkpointd_client.capture.state import Captured, Leaf

# The records of a zip file and where in them the CRC-32 stands (APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12).
_LOCAL, _LOCAL_CRC, _LOCAL_NAMES, _LOCAL_BYTES = b"PK\x03\x04", 14, 26, 30
_CENTRAL, _CENTRAL_CRC, _CENTRAL_NAMES, _CENTRAL_BYTES = b"PK\x01\x02", 16, 28, 46
_DESCRIPTOR, _DESCRIPTOR_CRC, _HAS_DESCRIPTOR = b"PK\x07\x08", 4, 8


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Where the bytes of one storage go in the file, and every place that has their CRC-32."""

    offset: int
    size: int
    sums_at: tuple[int, ...]


def capture_files(at: str, files: Mapping[str, object], optimizer_only: Collection[int]) -> Captured:
    """Take the files that torch.save would make of `files`, by name, apart without copying a tensor; `at` is to show them.

    `optimizer_only`: addresses of the storages that change inside optimizer steps alone. StateError for what cannot be pickled.
    """
    leaves: list[Leaf] = []
    nodes: list[tree.StoredFileNode] = []
    for name, content in files.items():
        node, found = _capture(name, content, optimizer_only)
        nodes.append(node)
        leaves += found
    return Captured(tuple(leaves), (), tree.FilesNode(at, tuple(nodes)), ())


def check_saveable(name: str, content: object) -> None:
    """StateError for what cannot be pickled, as `capture_files` raises it; no tensor is copied."""
    _capture(name, content, ())


def _capture(name: str, content: object, optimizer_only: Collection[int]) -> tuple[tree.StoredFileNode, list[Leaf]]:
    descriptor = os.memfd_create("checkpointd-hollow", os.MFD_CLOEXEC)
    with open(descriptor, "w+b") as file, tempfile.TemporaryDirectory(prefix="checkpointd-") as folder:
        # torch names the members of the archive after the file.
        path = os.path.join(folder, os.path.basename(name) or "file")
        os.symlink(f"/proc/self/fd/{descriptor}", path)
        storages = _write_hollow(name, content, path)
        placeholders = placeholders_of(file)
        size = os.fstat(descriptor).st_size
        around = b"".join(_around(file, placeholders, size))
    leaves = [Leaf(name, torch.frombuffer(bytearray(around), dtype=torch.uint8), "uint8", optimizer_only=False)]
    for number, (storage, tensor) in enumerate(storages):
        by_steps = storage.data_ptr() in optimizer_only
        leaves.append(Leaf(f"{name}/data/{number}", _bytes_of(storage, tensor), "uint8", optimizer_only=by_steps))
    node = tree.StoredFileNode(
        name=name,
        size=size,
        hollow=name,
        placeholders=tuple((placeholder.offset, f"{name}/data/{number}") for number, placeholder in enumerate(placeholders)),
        sums=tuple((number, at) for number, placeholder in enumerate(placeholders) for at in placeholder.sums_at),
    )
    return node, leaves


Storages = list[tuple[torch.UntypedStorage, torch.Tensor | None]]


class _Recorder:
    """Storages in the order of their numbers, each with a tensor that lies in it."""

    def __init__(self) -> None:
        self.found: dict[str, torch.UntypedStorage] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def note(self, number: str, value: Any) -> None:
        self.found[number] = getattr(value, "_untyped_storage", value)

    def module(self) -> types.SimpleNamespace:
        """What torch.save takes for the pickle module."""
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
    except Exception as error:  # whatever a __reduce__ raises
        where = _culprit(content, path)
        raise StateError(f"{name} cannot be saved as torch.save saves it{where}: {error}") from error
    return recorder.storages()


def _culprit(content: object, path: str) -> str:
    """By which key what cannot be pickled is found, in words; "" where no single value is to blame."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        try:
            with torch.serialization.skip_data():
                torch.save(value, path)
        except Exception:
            return f", because of {key!r}, a {type(value).__qualname__}"
    return ""


def _bytes_of(storage: torch.UntypedStorage, tensor: torch.Tensor | None) -> torch.Tensor:
    """The storage as bytes: a view that shares the tensor's version counter where it can."""
    if tensor is not None and not tensor.is_conj() and not tensor.is_neg() and storage.nbytes() % tensor.itemsize == 0:
        whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
        if type(whole) is torch.Tensor:
            return whole.view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# --- the zip file ---------------------------------------------------------------------------------------------------


def placeholders_of(file: BinaryIO) -> list[Placeholder]:
    """Where each storage of a file of torch.save lies, by its number; the file may be hollow."""
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
    """Where the bytes of the member begin whose local header is at `header`."""
    names, extra = struct.unpack("<HH", os.pread(descriptor, 4, header + _LOCAL_NAMES))
    return header + _LOCAL_BYTES + int(names) + int(extra)


def _central_sums(archive: zipfile.ZipFile, file: BinaryIO) -> Iterator[int]:
    """Where the central directory has the CRC-32 of each member, in the order of the directory."""
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
