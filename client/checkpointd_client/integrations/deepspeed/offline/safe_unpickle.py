"""Reads DeepSpeed's files without running anything that is pickled in them: tensors mapped from the disk, plain values, and
Records for objects of any other class.
"""

from __future__ import annotations

import codecs
import math
import os
import stat
import types
import zipfile
from typing import IO, Any

import torch
from torch._utils import set_tensor_metadata
from torch.serialization import StorageType

from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd_client.integrations.conversion import opcodes
from checkpointd_client.integrations.conversion.records import PickleFault, PickleLimit, Record

PICKLE_BYTES_MAX = 256 << 20
EXPANDED_BYTES_MAX = 1 << 30
"""How much larger than its storage a tensor may be; expanded tensors are larger."""


def read(path: str) -> dict[str, Any]:
    """Read a file; its tensors stay on the disk until they are used. DamagedError if torch.save did not write it.

    NotFoundError if it does not exist. UsageError if it would take too much time or memory, for example because of its depth.
    """
    try:
        _check_archive(path)
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_MODULE)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist: it was removed, or links to a removed file. Load another tag") from error
    except PickleLimit as error:
        raise UsageError(f"{path} is too large to read: {error}. Save it again without such values") from error
    except Exception as error:  # a damaged file may raise any error in torch
        raise DamagedError(f"{path} cannot be read as a file of torch.save: {error!r}", key=path) from error
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is not a checkpoint of DeepSpeed: it holds a {type(found).__name__}", key=path)
    return found


def _check_archive(path: str) -> None:
    """Raise PickleFault if torch.load would do more than read: wait for a pipe, run TorchScript, or decompress."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise PickleFault("it is not a regular file")
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise PickleFault(f"{info.filename} is compressed, which torch.save never does")
            if info.filename.endswith("constants.pkl"):
                raise PickleFault("it is a program of TorchScript")
            if info.filename.endswith("data.pkl") and info.file_size > PICKLE_BYTES_MAX:
                raise PickleFault(f"its pickle has {info.file_size} bytes, more than {PICKLE_BYTES_MAX}")


class _Unpickler:
    """Replaces pickle's Unpickler in torch.load; torch sets `persistent_load`, which finds a storage."""

    persistent_load: Any

    def __init__(self, file: IO[bytes], **_: object) -> None:
        self._file = file

    def load(self) -> Any:
        return opcodes.read(self._file.read(), _MAKERS, constants=_CONSTANTS, persistent=self._storage)

    def _storage(self, saved: Any) -> Any:
        kind, storage, key, location, numel = saved if type(saved) is tuple and len(saved) == 5 else (None,) * 5
        named = storage.name if kind == "storage" and type(storage) is Record and storage.args is None else ""
        if not named or type(key) is not str or type(location) is not str or type(numel) is not int or numel < 0:
            raise PickleFault("it refers to something other than a storage")
        found = _STORAGES.get(named)
        # An unknown storage, such as that of a quantized tensor, becomes a Record.
        return Record(named, ()) if found is None else self.persistent_load(("storage", found, key, location, numel))


_MODULE = types.SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="pickle")


# --- makers -----------------------------------------------------------------------------------------------------------


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, trained: Any = False, _hooks: Any = None, metadata: Any = None
) -> Any:
    """As torch._utils._rebuild_tensor_v2, without hooks."""
    return _viewed(storage, None, (offset, size, stride), trained, metadata)


def _untyped(
    storage: Any, offset: Any, size: Any, stride: Any, trained: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    """As torch._utils._rebuild_tensor_v3, for dtypes without a storage class."""
    if not isinstance(dtype, torch.dtype):
        raise PickleFault("a tensor without a valid dtype")
    return _viewed(storage, dtype, (offset, size, stride), trained, metadata)


def _viewed(storage: Any, dtype: torch.dtype | None, view: tuple[Any, Any, Any], trained: Any, metadata: Any) -> Any:
    """A view of `storage`, or a Record if that is one. `metadata`: whether the stored values are conjugated or negated."""
    if type(storage) is Record:
        return Record(storage.name, ())
    offset, size, stride = view
    if not isinstance(storage, torch.storage.TypedStorage) or not all(
        type(n) is int and n >= 0 for n in (offset, *size, *stride)
    ):
        raise PickleFault("a tensor without a valid storage or sizes")
    made = torch.empty(0, dtype=dtype or storage.dtype)
    if math.prod(size) * made.element_size() > storage._untyped_storage.nbytes() + EXPANDED_BYTES_MAX:
        raise PickleFault(f"a tensor of the sizes {list(size)} in a storage of {storage._untyped_storage.nbytes()} bytes")
    made.set_(storage._untyped_storage, offset, tuple(size), tuple(stride))
    if metadata:
        set_tensor_metadata(made, _checked_metadata(metadata))
    return made.requires_grad_() if trained is True else made


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


def _from_type(function: Any, kind: Any, args: Any, *_: Any) -> Any:
    """A tensor with attributes, which are dropped; a Record if its class or its maker is unknown."""
    known = type(function) is Record and type(kind) is Record and type(args) is tuple
    if known and kind.name in _TENSOR_CLASSES and function.name in _TENSOR_MAKERS:
        return _TENSOR_MAKERS[function.name](*args)
    return Record(kind.name if type(kind) is Record else "a tensor", args if type(args) is tuple else ())


def _bytes(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise PickleFault("bytes in another encoding than latin1")
    return codecs.encode(text, "latin1")


def _bytearray(data: Any = b"", *encoding: Any) -> bytearray:
    if encoding and type(data) is str:
        data = _bytes(data, "latin1")
    if type(data) is not bytes:
        raise PickleFault("a bytearray of something other than bytes")
    return bytearray(data)


def _size(items: Any) -> torch.Size:
    if not all(type(item) is int for item in items):
        raise PickleFault("a torch.Size of something other than numbers")
    return torch.Size(items)


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


_TENSOR_MAKERS: dict[str, Any] = {"torch._utils._rebuild_tensor_v2": _tensor, "torch._utils._rebuild_tensor": _tensor}
_TENSOR_MAKERS["torch._utils._rebuild_tensor_v3"] = _untyped
_TENSOR_CLASSES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"}
_MAKERS: opcodes.Makers = {
    **_TENSOR_MAKERS,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "builtins.complex": _complex,
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _bytes,
}
_KINDS = (
    "BFloat16",
    "Bool",
    "Byte",
    "Char",
    "ComplexDouble",
    "ComplexFloat",
    "Double",
    "Float",
    "Half",
    "Int",
    "Long",
    "Short",
)
_STORAGES: dict[str, Any] = {f"torch.{kind}Storage": StorageType(f"{kind}Storage") for kind in _KINDS}
_STORAGES["torch.storage.UntypedStorage"] = torch.UntypedStorage
_CONSTANTS = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
