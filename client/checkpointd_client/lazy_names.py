"""Names of a package that are imported at their first use, because their modules need a library that may not be installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`. `homes`: for each name, the module of the package that has it."""

    def __getattr__(name: str) -> Any:  # it becomes that of the package
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    return __getattr__
