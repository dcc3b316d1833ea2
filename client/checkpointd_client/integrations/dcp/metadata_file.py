"""`.metadata` of a DCP directory, which is a pickle: read by an unpickler that knows DCP's own classes alone, and written.

Classes that are allowed hold data alone; to make one runs no code but DCP's. Everything else is refused by name.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from checkpointd.errors import FormatError, NotFoundError, UsageError
from checkpointd.layout.boxes import Box, tiling_fault
from checkpointd_client.dtypes import NAMES
from checkpointd_client.integrations.dcp.paths import Path as StatePath

NAME = ".metadata"
_OF_DCP = "torch.distributed.checkpoint.metadata"
_OF_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
_ALLOWED = {
    (_OF_DCP, "BytesStorageMetadata"),
    (_OF_DCP, "ChunkStorageMetadata"),
    (_OF_DCP, "Metadata"),
    (_OF_DCP, "MetadataIndex"),
    (_OF_DCP, "StorageMeta"),
    (_OF_DCP, "TensorProperties"),
    (_OF_DCP, "TensorStorageMetadata"),
    (_OF_DCP, "_MEM_FORMAT_ENCODING"),
    (_OF_SHARDS, "MEM_FORMAT_ENCODING"),
    (_OF_SHARDS, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
_PATHS = {"pathlib", "pathlib._local"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if module in _PATHS and name in {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}:
            return _joined  # where the checkpoint was saved: not needed, and no path of this system
        raise FormatError(f"it names {module}.{name}, which is no part of DCP's metadata and is not loaded")


def _joined(*parts: str) -> str:
    return "/".join(map(str, parts))


@dataclass(frozen=True, slots=True)
class Place:
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
    chunks: tuple[tuple[Box, Place], ...]


@dataclass(frozen=True, slots=True)
class Described:
    """All that a DCP directory holds."""

    tensors: tuple[SourceTensor, ...]
    objects: Mapping[str, Place]
    paths: Mapping[str, StatePath]


def read(directory: Path) -> Described:
    """What `directory` holds. NotFoundError where there is no metadata, FormatError where it is not DCP's or adds not up."""
    path = directory / NAME
    try:
        with path.open("rb") as file:
            found = _unpickled(file, path)
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no {path}: it is no DCP directory, or one that was saved without collectives, by ranks on their own"
        ) from None
    try:
        return _described(found, directory)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{path} is not the metadata of a DCP directory: {error!r}", key=str(path)) from error


def _unpickled(file: IO[bytes], path: Path) -> Metadata:
    try:
        found = _Unpickler(file).load()
    except FormatError as error:
        raise FormatError(f"{path} is refused: {error}", key=str(path)) from None
    except Exception as error:  # bytes of unknown origin: whatever goes wrong is that they cannot be read
        raise FormatError(f"{path} is damaged: {error!r}", key=str(path)) from error
    if not isinstance(found, Metadata):
        raise FormatError(f"{path} holds a {type(found).__name__}, not the metadata of a DCP directory", key=str(path))
    return found


def _described(found: Metadata, directory: Path) -> Described:
    tensors, objects = [], {}
    for fqn, stored in found.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            objects[_name(fqn)] = _place(found, MetadataIndex(fqn), directory)
        elif isinstance(stored, TensorStorageMetadata):
            tensors.append(_tensor(_name(fqn), stored, found, directory))
        else:
            raise TypeError(f"{fqn!r} is a {type(stored).__name__}")
    paths = found.planner_data if isinstance(found.planner_data, dict) else {}
    return Described(tuple(tensors), objects, {_name(fqn): tuple(map(_key, path)) for fqn, path in paths.items()})


def _tensor(fqn: str, stored: TensorStorageMetadata, found: Metadata, directory: Path) -> SourceTensor:
    name, shape = NAMES.get(stored.properties.dtype), _sizes(stored.size)
    if name is None:
        raise UsageError(f"{fqn} is of {stored.properties.dtype}, which cannot be stored")
    chunks = [
        (Box(_sizes(c.offsets), _sizes(c.sizes)), _place(found, MetadataIndex(fqn, c.offsets), directory))
        for c in stored.chunks
    ]
    # Parts without elements may lie at the place of another one, whose bytes are then named.
    filled = tuple((box, place) for box, place in chunks if box.numel())
    fault = tiling_fault(shape, [box for box, _ in filled])
    if fault:
        raise FormatError(f"{fqn} in {directory}: {fault}", fqn=fqn)
    return SourceTensor(fqn, name, shape, filled)


def _place(found: Metadata, index: MetadataIndex, directory: Path) -> Place:
    info = found.storage_data.get(index)
    if info is None:
        raise FormatError(f"{directory / NAME} does not say where {index.fqn} lies", fqn=index.fqn)
    if getattr(info, "transform_descriptors", None):
        raise UsageError(
            f"{index.fqn} was saved through {', '.join(info.transform_descriptors)}, an extension of DCP's file system: "
            "load it with DCP, and save it again without"
        )
    file, offset, length = str(info.relative_path), int(info.offset), int(info.length)
    if Path(file).name != file or offset < 0 or length < 0:
        raise FormatError(f"{directory / NAME} says that {index.fqn} lies in {file!r} at {offset}, which cannot be")
    return Place(file, offset, length)


def _name(fqn: object) -> str:
    if not isinstance(fqn, str):
        raise TypeError(f"{fqn!r} is no name")
    return fqn


def _key(key: object) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"{key!r} is no key")
    return key


def _sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


# --- on the way out -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """Something that was written to a file of a directory: a box of a tensor, or an object, which has none."""

    name: str
    box: Box | None
    place: Place


def encode(metadata: Metadata, written: Sequence[Written]) -> bytes:
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
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.7 and later
    return pickle.dumps(metadata)


def _places(written: Sequence[Written]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for one in written:
        index = MetadataIndex(one.name, None if one.box is None else one.box.offsets)
        yield index, _StorageInfo(one.place.file, one.place.offset, one.place.length)
