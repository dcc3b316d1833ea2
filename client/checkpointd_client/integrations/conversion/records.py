"""Records of objects in a pickle that is read without running it (`opcodes.py`), and limits for its depth and size."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any

DEPTH_MAX = 200
UNFOLDED_MAX = 1 << 23


class PickleFault(ValueError):
    """A pickle that is cut off, damaged, or too large to read."""


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


def check_shape(found: Any, *, into_records: bool) -> None:
    """Raise PickleFault if `found` contains itself, nests too deep, or unfolds to much more than it holds.

    The contents of Records are checked only with `into_records`: otherwise no caller unfolds them, and objects may refer to
    themselves.
    """
    containers = _CONTAINERS | {Record} if into_records else _CONTAINERS
    sizes: dict[int, tuple[int, int]] = {}
    held = 0
    open_: set[int] = set()
    todo: list[tuple[Any, bool]] = [(found, False)]
    while todo:
        value, is_left = todo.pop()
        number = id(value)
        if is_left:
            open_.discard(number)
            unfolded, depth, children = 1, 0, _children(value)
            for child in children:
                size, below = sizes.get(id(child)) or (_weight(child), 0)
                unfolded, depth = unfolded + size, max(depth, below)
            sizes[number] = unfolded, depth + 1
            held += 1 + len(children)
            if depth >= DEPTH_MAX:
                raise PickleLimit(f"it nests deeper than {DEPTH_MAX}")
            if unfolded > max(UNFOLDED_MAX, 16 * held):
                raise PickleLimit("it refers to its own parts so often that it would unfold without end")
        elif number in open_:
            raise PickleLimit(f"a {type(value).__name__} contains itself")
        elif number not in sizes and type(value) in containers:
            open_.add(number)
            todo.append((value, True))
            todo.extend((child, False) for child in _children(value) if type(child) in containers)


_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple, set, frozenset})


def _children(value: Any) -> Collection[Any]:
    if type(value) is Record:
        return (value.args or (), value.state, value.items)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value  # type: ignore[no-any-return]  # a list, tuple or set


def _weight(value: Any) -> int:
    """The weight of a leaf; long text weighs more, since it may be referred to often."""
    return 1 + (len(value) >> 6) if isinstance(value, str | bytes | bytearray) else 1
