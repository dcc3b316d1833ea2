"""The classes of enum members and named tuples: named at a save, and looked up at a load.

Invariants
  CLASSES-1  A class that a tree names is looked up among the modules that are already imported. Nothing is imported, and no
      code runs for the look. Only a class of enums or of named tuples is used.
  CLASSES-2  A class that a load could not find is refused by `save()`.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
from dataclasses import dataclass
from typing import Any

from checkpointd.arguments import shown
from checkpointd.errors import StateError


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A member of an enum class that this process does not have, as a reader gets it: the class in words, and the name and
    the value of the member.
    """

    enum: str
    name: str | None
    value: object


def is_namedtuple(value: object) -> bool:
    """Whether `value` is a tuple whose class gives names to its elements."""
    fields = inspect.getattr_static(type(value), "_fields", None) if isinstance(value, tuple) else None
    return type(fields) is tuple and len(fields) == len(value)  # type: ignore[arg-type]  # a tuple


def named(cls: type, fqn: str) -> tuple[str, str]:
    """The module and the qualified name of `cls`. StateError if a load would not find the class by them."""
    module, qualname = cls.__module__, cls.__qualname__
    if _find(module, qualname) is cls:
        return module, qualname
    if "<locals>" in qualname:
        why = "is defined inside a function"
    else:
        why = f"is not what the module {module} has under the name {qualname}"
    raise StateError(
        f"{fqn or 'the state'}: the class {module}.{qualname} {why}, so a load could not find it: define it at the top level "
        "of a module and under its own name, or store plain values"
    )


def enum_class(module: str, qualname: str, known: type | None = None) -> type[enum.Enum]:
    """The enum class of that name; `known`, if that is its name. StateError if there is none."""
    found = _class(module, qualname, known)
    if not _is_subclass(found, enum.Enum):
        raise _other_now(module, qualname, "no enum class")
    return found  # type: ignore[return-value]  # it was looked at


def namedtuple_class(module: str, qualname: str, fields: tuple[str, ...], known: type | None = None) -> type[tuple[Any, ...]]:
    """The class of named tuples of that name, with these fields; `known`, if that is its name. StateError if there is none."""
    found = _class(module, qualname, known)
    if not _is_subclass(found, tuple) or type(have := inspect.getattr_static(found, "_fields", None)) is not tuple:
        raise _other_now(module, qualname, "no class of named tuples")
    if have != fields:
        raise _other_now(module, qualname, f"a named tuple of {_listed(have)}, and one of {_listed(fields)} is stored")
    return found  # type: ignore[return-value]  # it was looked at


def member(cls: type[enum.Enum], name: str | None, value: object) -> enum.Enum:
    """The member of `cls`; StateError if it has none of that name, or a combination of flags has another name now.

    Whoever calls this compares the values of other members.
    """
    found: object = None
    if not _is_subclass(cls, enum.Flag):
        found = vars(cls)["_member_map_"].get(name)
    elif type(value) is int:
        found = vars(cls)["_value2member_map_"].get(value)
        found = _combination(cls, value) if found is None else found
    if isinstance(found, cls) and found._name_ == name:
        return found
    raise _other_now(cls.__module__, cls.__qualname__, f"an enum without the member {name} = {shown(value)}, which is stored")


def _combination(cls: type[enum.Enum], value: int) -> object:
    """The flags `value` of `cls`, combined by Python's own Flag, whatever `cls` overrides; None if there are no such flags."""
    if vars(cls)["_member_type_"] not in (object, int):
        return None
    try:
        return enum.Flag.__dict__["_missing_"].__func__(cls, value)
    except ValueError:
        return None


def _class(module: str, qualname: str, known: type | None) -> object:
    if known is not None and (known.__module__, known.__qualname__) == (module, qualname):
        return known
    found = _find(module, qualname)
    if found is not None:
        return found
    imported = module in sys.modules
    todo = "the module has no class of that name" if imported else f"import {module} before the load"
    raise StateError(
        f"a value of the class {module}.{qualname} is stored, and this process does not have the class: {todo}. If the class "
        "has moved, make it known under its old name as well"
    )


def _other_now(module: str, qualname: str, what: str) -> StateError:
    return StateError(
        f"a value of the class {module}.{qualname} is stored, and this is now {what}: load it with the class as it was"
    )


def _find(module: str, qualname: str) -> object:
    """What the dotted name `qualname` leads to in an imported module, through the dicts of classes alone; None if nowhere."""
    found: object = sys.modules.get(module)
    if not _is_subclass(type(found), types.ModuleType):
        return None
    # Not vars(): a module that is imported lazily would run its code at any attribute that is asked for in the usual way.
    content = object.__getattribute__(found, "__dict__")
    for name in qualname.split("."):
        found = content.get(name)
        if not _is_subclass(type(found), type):
            return None
        content = type.__dict__["__dict__"].__get__(found)
    return found


def _is_subclass(cls: object, of: type) -> bool:
    """What issubclass() says, without a call to code of a metaclass."""
    return of in type.__dict__["__mro__"].__get__(cls)


def _listed(fields: tuple[object, ...]) -> str:
    return f"({', '.join(map(str, fields))})"
