"""Stores values that are not plain as torch.save writes them, if the user asks for it.

Unpickling uses torch.load(weights_only=True), which refuses code, unless the caller allows the code to run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import torch

from checkpointd.errors import FormatError, StateError, UnsafeObjectError
from checkpointd_client.capture.flatten import CLIENT_STATE, Flattener
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.unpickling.archive import entries_of
from checkpointd_client.unpickling.records import PickleFault

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_DATA, _CLASS = "checkpointd.pickled", "checkpointd.class"
"""The keys of the dict that replaces such a value in client_state."""


def saved(value: object) -> bytes:
    """The bytes that torch.save writes for `value`."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def where_it_was(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """For torch.load: the device that a storage was saved from, or the host if this process does not have that device."""
    try:
        restored: torch.UntypedStorage = torch.serialization.default_restore_location(storage, location)
    except RuntimeError:
        return storage
    return restored


def loaded(data: bytes, fqn: str, *, opt_in: str, map_location: Any = "cpu") -> Any:
    """The value in `data`. If torch.load(weights_only=True) refuses it, UnsafeObjectError names `fqn` and the argument `opt_in`
    that allows the code.
    """
    file = io.BytesIO(data)
    try:
        entries_of(file)  # torch would decompress what a stranger has compressed
        file.seek(0)
        return torch.load(file, map_location=map_location, weights_only=True)
    except PickleFault as error:
        raise FormatError(f"{fqn} is an object that torch.save did not write: {error}", fqn=fqn) from error
    except Exception as error:  # the bytes may come from anywhere, and torch may raise anything
        named = _GLOBAL.search(str(error))
        reason = f"it names {named[1]}" if named else str(error).partition("\n")[0]
        raise UnsafeObjectError(
            f"{fqn} is an object that torch.load(weights_only=True) does not load ({reason:.300}): if you trust who wrote the "
            f"checkpoint, pass {opt_in}, and its code will run"
        ) from error


# --- in client_state -------------------------------------------------------------------------------------------------


def packed(client_state: Mapping[str, object], classes: TensorClasses = ONLY_BUILT_IN) -> dict[str, object]:
    """`client_state` with each value that is not plain as a pickle. StateError names a value that cannot be pickled.

    `classes`: the classes of tensors that are stored as they are.
    """
    return {
        key: value if _is_plain(value, classes) else _packed(value, f"{CLIENT_STATE}.{key}")
        for key, value in client_state.items()
    }


def unpacked(client_state: Mapping[str, object], *, allowed: bool) -> dict[str, object]:
    """The inverse of `packed`. If code is not `allowed` to run, UnsafeObjectError names the first value that needs it."""
    return {
        key: _unpacked(value, f"{CLIENT_STATE}.{key}", allowed=allowed) if _is_packed(value) else value
        for key, value in client_state.items()
    }


def _is_plain(value: object, classes: TensorClasses) -> bool:
    walk = Flattener(exclude_frozen_parameters=False, classes=classes)
    try:
        walk.root({}, {"value": value})
    except StateError:
        return False
    return True


def _packed(value: object, fqn: str) -> dict[str, object]:
    try:
        return {_DATA: saved(value), _CLASS: type_name(value)}
    except Exception as error:  # the user's objects may raise anything
        raise StateError(f"{fqn}: {type_name(value)} cannot be pickled: {type(error).__name__}: {error}") from error


def _is_packed(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {_DATA, _CLASS} and type(value[_DATA]) is bytes


def _unpacked(value: Any, fqn: str, *, allowed: bool) -> object:
    if not allowed:
        return loaded(value[_DATA], f"{fqn}, of class {value[_CLASS]},", opt_in="pickle_client_state=True")
    try:
        return torch.load(io.BytesIO(value[_DATA]), map_location="cpu", weights_only=False)
    except Exception as error:  # the user's classes may raise anything
        raise StateError(
            f"{fqn}: {value[_CLASS]} cannot be unpickled here: {type(error).__name__}: {error}. Is its module importable?"
        ) from error
