"""DeepSpeed's files without running anything that is pickled in them: tensors mapped from the disk, plain values, and stand-ins
for objects of any other class.
"""

from __future__ import annotations

import pickle
import types
from typing import Any

import torch

from checkpointd.errors import DamagedError


class Unknown:
    """Stands for an object whose class was not imported: `name` is the class, `args` and `state` what it was made of."""

    name = ""

    def __init__(self, *args: object) -> None:
        self.args: list[object] = list(args)
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, value: object) -> None:
        """For a list of another class."""
        self.args.append(value)

    def extend(self, values: list[object]) -> None:
        self.args.extend(values)

    def __setitem__(self, key: object, value: object) -> None:
        self.args.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"


def _unknown(name: str) -> type[Unknown]:
    return type("Unknown", (Unknown,), {"name": name})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = torch._weights_only_unpickler._get_allowed_globals()
        full = f"{module}.{name}"
        return known[full] if full in known else _unknown(full)


_MODULE = types.SimpleNamespace(Unpickler=_Unpickler, load=None, __name__="pickle")


def read(path: str) -> dict[str, Any]:
    """What the file holds: its tensors lie on the disk until they are used. DamagedError where it is no file of torch.save."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_MODULE)
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a damaged pickle makes torch raise
        raise DamagedError(f"{path} cannot be read as a file of torch.save: {error!r}", key=path) from error
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is no checkpoint of DeepSpeed: it holds a {type(found).__name__}", key=path)
    return found
