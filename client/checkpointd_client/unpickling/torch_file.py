"""Reads files of torch.save without running anything that is pickled in them: tensors that share memory with the file, plain
values, and Records for objects of any other class.

One open file is checked and read: `entries_of` finds the entries, and neither torch nor another program opens it again.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from typing import IO, Any

import torch
from torch._utils import set_tensor_metadata

from checkpointd_client.unpickling import unpickler
from checkpointd_client.unpickling.archive import ArchiveEntry, entries_of
from checkpointd_client.unpickling.records import PickleFault, PickleLimit, Record

PICKLE_BYTES_MAX = 256 << 20
VIEWED_TIMES = 16
VIEWED_BYTES_MIN = 64 << 20
"""All tensors together may be so many times larger than the archive, or have so many bytes: views and expanded tensors are."""
DIMENSIONS_MAX = 64


def mapped(file: IO[bytes]) -> Callable[[], mmap.mmap]:
    """The memory of a whole file on the disk, for UntrustedTorchFile. Writing to it changes no file."""
    return lambda: mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class UntrustedTorchFile:
    """A file of torch.save. `memory` gives its bytes when the first tensor needs them; the tensors write to a copy of these."""

    def __init__(self, file: IO[bytes], memory: Callable[[], Any]) -> None:
        self._file, self._memory = file, memory
        self.entries = entries_of(file)
        """By name, such as `data.pkl` and `data/0`."""
        self._buffer: Any = None
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._tensor_makers: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._untyped,
        }
        self._left = max(VIEWED_BYTES_MIN, VIEWED_TIMES * sum(entry.size for entry in self.entries.values()))

    def value(self) -> Any:
        """The object that was saved. Raises PickleFault."""
        if self._bytes("byteorder", default=b"little") != sys.byteorder.encode():
            raise PickleFault("it was saved on a machine with another byte order")
        made = {
            unpickler.PERSISTENT: self._storage,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            **self._tensor_makers,
        }
        try:
            return unpickler.read(self._bytes("data.pkl"), {**_MAKERS, **made}, constants=_CONSTANTS)
        except RuntimeError as error:  # torch's own, such as for a size that does not fit into 64 bits
            raise PickleFault(f"it holds a tensor that torch does not make: {error!s:.999}") from error

    def _bytes(self, name: str, default: bytes | None = None) -> bytes:
        entry = self.entries.get(name)
        if entry is None:
            if default is None:
                raise PickleFault(f"it holds no {name}, which torch.save writes")
            return default
        if entry.size > PICKLE_BYTES_MAX:
            raise PickleLimit(f"its {name} has {entry.size} bytes, more than {PICKLE_BYTES_MAX}")
        self._file.seek(entry.offset)
        return self._file.read(entry.size)

    # --- makers -------------------------------------------------------------------------------------------------------

    def _storage(self, *saved: Any) -> Any:
        """A storage and the dtype of its elements; a Record if its class is unknown, such as that of a quantized tensor."""
        kind, storage, key, _, numel = saved if len(saved) == 5 else (None,) * 5
        named = storage.name if kind == "storage" and type(storage) is Record and storage.args is None else ""
        if not named or type(key) is not str or type(numel) is not int or numel < 0:
            raise PickleFault("it refers to something other than a storage")
        dtype, entry = _STORAGES.get(named), self.entries.get(f"data/{key}")
        if dtype is None:
            return Record(named, ())
        if entry is None or numel * dtype.itemsize > entry.size:
            raise PickleFault(f"it does not hold the {numel} elements of its storage {key:.99}")
        if key not in self._storages:
            self._storages[key] = self._filled(entry)
        return _TypedStorage(self._storages[key], dtype)

    def _filled(self, entry: ArchiveEntry) -> torch.UntypedStorage:
        if not entry.size:
            return torch.UntypedStorage(0)
        if self._buffer is None:
            self._buffer = self._memory()
        flat = torch.frombuffer(self._buffer, dtype=torch.uint8, count=entry.size, offset=entry.offset)
        return flat.untyped_storage()

    def _tensor(
        self, stored: Any, offset: Any, size: Any, stride: Any, trained: Any = False, _hooks: Any = None, metadata: Any = None
    ) -> Any:
        """As torch._utils._rebuild_tensor_v2, without hooks."""
        return self._viewed(stored, None, (offset, size, stride), trained, metadata)

    def _untyped(
        self, stored: Any, offset: Any, size: Any, stride: Any, trained: Any, _hooks: Any, dtype: Any, metadata: Any = None
    ) -> Any:
        """As torch._utils._rebuild_tensor_v3, for dtypes without a storage class."""
        if not isinstance(dtype, torch.dtype):
            raise PickleFault("a tensor without a valid dtype")
        return self._viewed(stored, dtype, (offset, size, stride), trained, metadata)

    def _viewed(self, stored: Any, dtype: torch.dtype | None, view: tuple[Any, Any, Any], trained: Any, metadata: Any) -> Any:
        """A view of a storage, or a Record if that is one. `metadata`: whether the stored values are conjugated or negated."""
        if type(stored) is Record:
            return Record(stored.name, ())
        if type(stored) is not _TypedStorage or not _is_view(*view):
            raise PickleFault("a tensor without a valid storage or sizes")
        offset, size, stride = view
        made = torch.empty(0, dtype=dtype or stored.dtype)
        nbytes, held = math.prod(size) * made.itemsize, stored.storage.nbytes()
        if nbytes and (offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * made.itemsize > held:
            raise PickleFault(f"a tensor of the sizes {list(size)} in a storage of {held} bytes, which end before it")
        self._left -= nbytes
        if self._left < 0:
            raise PickleLimit(f"its tensors unfold to much more than it holds, such as one of the sizes {list(size)}")
        made.set_(stored.storage, offset if nbytes else 0, tuple(size), tuple(stride))
        if metadata:
            set_tensor_metadata(made, _checked_metadata(metadata))
        return made.requires_grad_() if trained is True else made

    def _from_type(self, function: Any, kind: Any, args: Any, *_: Any) -> Any:
        """A tensor with attributes, which are dropped; a Record if its class or its maker is unknown."""
        known = type(function) is Record and type(kind) is Record and type(args) is tuple
        if known and kind.name in _TENSOR_CLASSES and function.name in self._tensor_makers:
            return self._tensor_makers[function.name](*args)
        return Record(kind.name if type(kind) is Record else "a tensor", args if type(args) is tuple else ())


class _TypedStorage:
    """A storage, and the dtype of its elements."""

    __slots__ = ("dtype", "storage")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.storage, self.dtype = storage, dtype


def _is_view(offset: Any, size: Any, stride: Any) -> bool:
    if not isinstance(size, tuple) or not isinstance(stride, tuple) or not len(size) == len(stride) <= DIMENSIONS_MAX:
        return False
    return all(type(n) is int and n >= 0 for n in (offset, *size, *stride))


def _checked_metadata(metadata: Any) -> dict[str, bool]:
    if type(metadata) is not dict:
        raise PickleFault("a tensor without valid metadata")
    for name, value in metadata.items():
        if name not in ("conj", "neg") or type(value) is not bool:
            named = name if type(name) is str else type(name).__name__
            raise PickleFault(f"a tensor with the metadata {named:.99}, which is not known")
    return metadata


def _parameter(data: Any, trained: Any, *_: Any) -> Any:
    if type(data) is Record:
        return data
    if type(data) is not torch.Tensor:
        raise PickleFault("a parameter that is not a tensor")
    return torch.nn.Parameter(data, requires_grad=trained is True)


def _bytes(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise PickleFault("bytes in another encoding than latin1")
    return text.encode("latin1")


def _bytearray(data: Any = b"", *encoding: Any) -> bytearray:
    if encoding and type(data) is str:
        data = _bytes(data, "latin1")
    if type(data) is not bytes:
        raise PickleFault("a bytearray of something other than bytes")
    return bytearray(data)


def _size(items: Any) -> torch.Size:
    if type(items) is not tuple or not all(type(item) is int for item in items):
        raise PickleFault("a torch.Size of something other than numbers")
    return torch.Size(items)


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


_TENSOR_CLASSES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"}
_MAKERS: unpickler.Makers = {
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
    "builtins.complex": _complex,
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _bytes,
}
_STORAGES: dict[str, torch.dtype] = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
    "torch.storage.UntypedStorage": torch.uint8,
}
_CONSTANTS = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
