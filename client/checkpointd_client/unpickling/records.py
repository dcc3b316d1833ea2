"""The stand-in for each object that a pickle makes, and the errors of a pickle that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PickleFault(ValueError):
    """A pickle, or a file with one, that is cut off, damaged, or too large to read."""


class PickleLimit(PickleFault):
    """A pickle that may be sound, but would take too much time or memory."""


class Record:
    """An object that the pickle makes with the class or function `name`, which was not imported. `args` None: the name alone.

    `state` is the state that BUILD set; `items` are the appended values, or pairs of key and value.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        self.items: list[Any] = []

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"

    # The unpickler changes an object by these four methods. They change nothing but this Record.

    def append(self, value: Any) -> None:
        """Note that `value` was appended."""
        self._made().items.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """Note that `values` were appended."""
        self._made().items.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._made().items.append((key, value))

    def __setstate__(self, state: Any) -> None:
        self._made().state = state

    def _made(self) -> Record:
        if self.args is None:
            raise PickleFault(f"{self.name} is changed, which is not an object that this pickle made")
        return self
