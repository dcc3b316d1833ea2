"""`.metadata` of a DCP directory, a pickle: read as records of DCP's own classes (`unpickler.py`), and written.

No name in it is imported, and a name that is not DCP's is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from checkpointd.errors import FormatError, NotFoundError, UnreadableError, UsageError
from checkpointd.layout.boxes import Box, tiling_fault
from checkpointd.regular_files import open_regular
from checkpointd.system_errors import in_words
from checkpointd_client.capture.dtypes import NAMES
from checkpointd_client.integrations.conversion.paths import Path as StatePath
from checkpointd_client.unpickling import unpickler
from checkpointd_client.unpickling.records import PickleLimit, Record
from checkpointd_client.unpickling.torch_file import PICKLE_BYTES_MAX

NAME = ".metadata"
_PATH_MAX = 4096
_OFFSET_MAX = (1 << 63) - 1
"""The last byte that a file can have."""
_EXTRA_STATE = "_extra_state"
_OF_DCP = "torch.distributed.checkpoint.metadata"
_OF_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
_KNOWN = {
    *(
        f"{_OF_DCP}.{name}"
        for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
    ),
    *(f"{_OF_DCP}.{name}" for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(f"{_OF_SHARDS}.{name}" for name in ("MEM_FORMAT_ENCODING", "TensorProperties")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
}
_CONSTANTS = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.layout)}


def _joined(*parts: object) -> str:
    names = [_name(part) for part in parts]
    if sum(map(len, names)) > _PATH_MAX:
        raise ValueError(f"a path of more than {_PATH_MAX} characters")
    return "/".join(names)


def _size(items: object) -> tuple[object, ...]:
    if type(items) is not tuple:
        raise TypeError(f"a {type(items).__name__} is not a size")
    return items


_MAKERS: unpickler.Makers = {
    "torch.Size": _size,
    # Where the checkpoint was saved: not needed, and perhaps a path of another system.
    **{
        f"{module}.{name}": _joined
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def _check_name(full: str) -> None:
    if full not in _KNOWN and full not in _MAKERS and full not in _CONSTANTS and full != "collections.OrderedDict":
        raise FormatError(f"it names {full}, which is not part of DCP's metadata and is not loaded")


Fields = Mapping[str, Any]
"""The attributes of an object of DCP's."""
Places = Mapping[tuple[str, str], Fields]
"""By FQN and offsets as text: an attacker can choose tuples of numbers with equal hashes, but not strings."""


@dataclass(frozen=True, slots=True)
class DcpFileRange:
    """Bytes in a file of the directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor, and where each of its boxes lies."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, DcpFileRange], ...]


@dataclass(frozen=True, slots=True)
class Described:
    """All that a DCP directory holds."""

    tensors: tuple[SourceTensor, ...]
    objects: Mapping[str, DcpFileRange]
    paths: Mapping[str, StatePath]

    def loose(self) -> tuple[str, ...]:
        """The tensors at the top whose names are those of a module's tensors, such as `layers.0.weight`."""
        return tuple(t.fqn for t in self.tensors if "." in t.fqn and len(self.paths.get(t.fqn, (t.fqn,))) == 1)

    def below(self, module: str) -> Described:
        """The same, with the tensors at the top, and what modules keep beside theirs, below the name `module`."""
        moved = {t.fqn for t in self.tensors} | {name for name in self.objects if name.endswith(_EXTRA_STATE)}
        moved = {name for name in moved if len(self.paths.get(name, (name,))) == 1}
        taken = {name.partition(".")[0] for name in (*self.objects, *(t.fqn for t in self.tensors)) if name not in moved}
        if not moved or module in taken or not module or "." in module:
            why = (
                "nothing lies at the top" if not moved else f"the directory has a part {module!r}" if module in taken else "bad"
            )
            raise UsageError(f"what lies at the top cannot be put below the module name {module!r}: {why}")
        named = {name: f"{module}.{name}" for name in moved}
        return Described(
            tuple(replace(t, fqn=named.get(t.fqn, t.fqn)) for t in self.tensors),
            {named.get(name, name): place for name, place in self.objects.items()},
            {**{k: v for k, v in self.paths.items() if k not in moved}, **{named[name]: (module, name) for name in moved}},
        )


def read(directory: Path) -> Described:
    """The metadata of `directory`. NotFoundError if there is none, FormatError if it is not DCP's or contradicts itself."""
    path = directory / NAME
    data = content_of(path)
    if data is None:
        raise NotFoundError(
            f"there is no {path}: this is not a DCP directory, or each rank saved on its own, without collectives"
        )
    try:
        return _described(_unpickled(data, path), directory)
    except (AttributeError, TypeError, LookupError, ValueError, OverflowError) as error:
        raise FormatError(f"{path} is not the metadata of a DCP directory: {error!r}", key=str(path)) from error


def content_of(path: Path) -> bytes | None:
    """The bytes of a file; None if there is no such file. UnreadableError if it cannot be read or is not a regular file,
    FormatError if it is too long.
    """
    try:
        with open_regular(path) as file:
            data = file.read(PICKLE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {in_words(error, 'file')}") from error
    if len(data) > PICKLE_BYTES_MAX:
        raise FormatError(f"{path} has more than {PICKLE_BYTES_MAX} bytes, and is not read", key=str(path))
    return data


def _unpickled(data: bytes, path: Path) -> Fields:
    try:
        found = unpickler.read(data, _MAKERS, constants=_CONSTANTS, check_name=_check_name, into_records=True)
    except FormatError as error:
        raise FormatError(f"{path} is refused: {error}", key=str(path)) from None
    except PickleLimit as error:
        raise FormatError(f"{path} is not read: {error}", key=str(path)) from error
    except Exception as error:  # bytes of unknown origin: any error means that they cannot be read
        raise FormatError(f"{path} is damaged: {error!r}", key=str(path)) from error
    if not _is(found, "Metadata"):
        kind = found.name if isinstance(found, Record) else type(found).__name__
        raise FormatError(f"{path} holds a {kind}, not the metadata of a DCP directory", key=str(path))
    return _fields(found)


def _is(value: object, name: str) -> bool:
    return isinstance(value, Record) and value.args is not None and value.name.rpartition(".")[2] == name


def _fields(value: object) -> Fields:
    """The attributes of an object of DCP's."""
    if not isinstance(value, Record) or not isinstance(value.state, dict):
        raise TypeError(f"a {type(value).__name__} has no fields")
    return value.state


def _described(found: Fields, directory: Path) -> Described:
    tensors, objects = [], {}
    places = _places_of(found)
    for fqn, stored in found["state_dict_metadata"].items():
        if _is(stored, "BytesStorageMetadata"):
            objects[_name(fqn)] = _place(places, _name(fqn), None, directory)
        elif _is(stored, "TensorStorageMetadata"):
            tensors.append(_tensor(_name(fqn), _fields(stored), places, directory))
        else:
            raise TypeError(f"{_name(fqn)} is a {stored.name if isinstance(stored, Record) else type(stored).__name__}")
    planned = found.get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    return Described(tuple(tensors), objects, {_name(fqn): _path(path) for fqn, path in paths.items()})


def _places_of(found: Fields) -> dict[tuple[str, str], Fields]:
    """Where objects and boxes lie, by FQN and, for a box, its offsets."""
    places = {}
    for key, info in found["storage_data"].items():
        index = _fields(key)
        offsets = index.get("offset")
        places[_name(index["fqn"]), str(None if offsets is None else _sizes(offsets))] = _fields(info)
    return places


def _tensor(fqn: str, stored: Fields, places: Places, directory: Path) -> SourceTensor:
    # torch pickles the properties as a tuple that begins with the dtype.
    properties = stored["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    name, shape = NAMES.get(dtype), _sizes(stored["size"])
    if name is None:
        raise UsageError(
            f"{fqn} is of {dtype if isinstance(dtype, torch.dtype) else type(dtype).__name__}, which cannot be stored"
        )
    chunks = []
    for chunk in map(_fields, stored["chunks"]):
        offsets = _sizes(chunk["offsets"])
        chunks.append((Box(offsets, _sizes(chunk["sizes"])), _place(places, fqn, offsets, directory)))
    # A part without elements may name the place of another part's bytes.
    filled = tuple((box, place) for box, place in chunks if box.numel())
    fault = tiling_fault(shape, [box for box, _ in filled])
    if fault:
        raise FormatError(f"{fqn} in {directory}: {fault}", fqn=fqn)
    return SourceTensor(fqn, name, shape, filled)


def _place(places: Places, fqn: str, offsets: tuple[int, ...] | None, directory: Path) -> DcpFileRange:
    info = places.get((fqn, str(offsets)))
    if info is None:
        raise FormatError(f"{directory / NAME} does not say where {fqn} lies", fqn=fqn)
    transforms = info.get("transform_descriptors")
    if transforms:
        named = ", ".join(_name(one)[:99] for one in transforms[:9])
        raise UsageError(
            f"{fqn} was saved through {named}, an extension of DCP's file system: load it with DCP, and save it again without"
        )
    file, offset, length = _name(info["relative_path"]), int(info["offset"]), int(info["length"])
    if "/" in file or file in ("", ".", "..") or min(offset, length) < 0 or offset + length > _OFFSET_MAX:
        raise FormatError(f"{directory / NAME} says that {fqn} lies in {file!r:.99} at {offset}, which is impossible")
    return DcpFileRange(file, offset, length)


def _name(fqn: object) -> str:
    if not isinstance(fqn, str):
        raise TypeError(f"a {type(fqn).__name__} is not a name")
    return fqn


def _path(keys: Sequence[object]) -> StatePath:
    if not keys or not all(isinstance(key, str | int) for key in keys):
        raise TypeError("planner_data has a path that is empty, or has other keys than strings and numbers")
    return tuple(key for key in keys if isinstance(key, str | int))


def _sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DcpFileEntry:
    """A box of a tensor, or an object (`box` None), that was written to a file of a directory."""

    name: str
    box: Box | None
    place: DcpFileRange


def encode(metadata: Metadata, written: Sequence[DcpFileEntry]) -> bytes:
    """`metadata` for a directory that holds `written`, as DCP's file system pickles it."""
    boxes: dict[str, list[Box]] = {}
    for one in written:
        if one.box is not None:
            boxes.setdefault(one.name, []).append(one.box)
    for name, found in boxes.items():
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        stored.chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in found]
    metadata.storage_data = dict(_places(written))
    metadata.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def _places(written: Sequence[DcpFileEntry]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for one in written:
        index = MetadataIndex(one.name, None if one.box is None else one.box.offsets)
        yield index, _StorageInfo(one.place.file, one.place.offset, one.place.length)
