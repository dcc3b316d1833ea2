"""Values of classes of Python's library: the parts that a tree stores of each, and the value made of them again."""

from __future__ import annotations

import io
import re
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

from checkpointd.errors import StateError

Parts = tuple[object, ...]
_Buffer = io.BytesIO | io.StringIO


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A class. `parts`: the plain values that tell all of a value; ValueError says why one cannot be stored. `types`: the
    classes that each part may have, empty for any plain value. `make`: the value of parts of these classes; ValueError,
    TypeError or ArithmeticError if there is none.
    """

    cls: type
    parts: Callable[[Any], Parts]
    types: tuple[tuple[type, ...], ...]
    make: Callable[..., Any]

    def made(self, parts: Parts) -> Any:
        """The value of any parts. ValueError, TypeError or ArithmeticError if there is none."""
        fit = (not types or type(part) in types for part, types in zip(parts, self.types, strict=False))
        if len(parts) != len(self.types) or not all(fit):
            raise TypeError(f"these are not the parts of a {self.cls.__name__}")
        return self.make(*parts)


def _wall_parts(value: datetime | time) -> Parts:
    zone = value.tzinfo
    if type(zone) not in (type(None), timezone, ZoneInfo):
        raise ValueError(
            f"its time zone is a {type(zone).__module__}.{type(zone).__qualname__}: use datetime.timezone or zoneinfo.ZoneInfo"
        )
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone


def _zone_parts(value: ZoneInfo) -> Parts:
    if value.key is None:
        raise ValueError("a ZoneInfo without a key cannot be found again: use ZoneInfo(key)")
    return (value.key,)


def _zone(key: str) -> ZoneInfo:
    if not _ZONE.fullmatch(key):
        raise ValueError("it is no key of a time zone")
    try:
        return ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise StateError(f"the time zone {key} is stored, and this machine does not know it: install tzdata") from error


_ZONE = re.compile(r"[\w+-]+(/[\w+-]+)*", re.ASCII)


def _buffer_parts(value: _Buffer) -> Parts:
    if value.closed:
        raise ValueError("it is closed, so its content is gone")
    state: Any = value.__getstate__()
    *parts, attributes = state  # the content and the position, and what the user has set
    if attributes:
        names = ", ".join(map(str, attributes))
        raise ValueError(f"it has attributes of its own ({names}), which would be lost: store its getvalue()")
    return tuple(parts)


def _bytes_io(*parts: object) -> io.BytesIO:
    made = io.BytesIO()
    _fill(made, parts)
    return made


def _string_io(*parts: object) -> io.StringIO:
    made = io.StringIO()
    _fill(made, parts)
    return made


def _fill(buffer: Any, parts: Parts) -> None:
    buffer.__setstate__((*parts, None))


def _paths(cls: type) -> ValueKind:
    return ValueKind(cls, lambda value: (str(value),), ((str,),), cls)


_ZONES = (type(None), timezone, ZoneInfo)
_KINDS = (  # a class before its base: messages name the first one
    _paths(PosixPath),
    _paths(PurePosixPath),
    _paths(PureWindowsPath),
    ValueKind(
        time,
        _wall_parts,
        ((str,), (int,), _ZONES),
        lambda text, fold, zone: time.fromisoformat(text).replace(fold=fold, tzinfo=zone),
    ),
    ValueKind(
        datetime,
        _wall_parts,
        ((str,), (int,), _ZONES),
        lambda text, fold, zone: datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone),
    ),
    ValueKind(date, lambda value: (value.isoformat(),), ((str,),), date.fromisoformat),
    ValueKind(timedelta, lambda value: (value.days, value.seconds, value.microseconds), ((int,),) * 3, timedelta),
    # Its arguments are the offset, and the name if it has one of its own.
    ValueKind(
        timezone,
        lambda value: (*value.__getinitargs__(), None)[:2],
        ((timedelta,), (str, type(None))),
        lambda offset, name: timezone(offset) if name is None else timezone(offset, name),
    ),
    ValueKind(ZoneInfo, _zone_parts, ((str,),), _zone),
    ValueKind(
        UUID,
        lambda value: (str(value), value.is_safe.name),
        ((str,), (str,)),
        lambda text, safe: UUID(text, is_safe=SafeUUID.__members__.get(safe, SafeUUID.unknown)),
    ),
    ValueKind(Decimal, lambda value: (str(value),), ((str,),), Decimal),
    # What numpy's integers are put into may hold them.
    ValueKind(Fraction, lambda value: (int(value.numerator), int(value.denominator)), ((int,),) * 2, Fraction),
    ValueKind(range, lambda value: (int(value.start), int(value.stop), int(value.step)), ((int,),) * 3, range),
    ValueKind(slice, lambda value: (value.start, value.stop, value.step), ((),) * 3, slice),
    ValueKind(bytearray, lambda value: (bytes(value),), ((bytes,),), bytearray),
    ValueKind(io.BytesIO, _buffer_parts, ((bytes,), (int,)), _bytes_io),
    ValueKind(io.StringIO, _buffer_parts, ((str,), (str, type(None)), (int,)), _string_io),
)
KINDS: dict[type, ValueKind] = {kind.cls: kind for kind in _KINDS}
BY_NAME: dict[str, ValueKind] = {kind.cls.__name__: kind for kind in _KINDS}
MUTABLE: frozenset[type] = frozenset({bytearray, io.BytesIO, io.StringIO})
"""The classes whose values a load fills in place."""


def refill(live: Any, value: Any) -> None:
    """Give `live` the content of `value`, which has the same class. StateError if something holds on to its memory."""
    try:
        if isinstance(live, bytearray):
            live[:] = value
        else:
            _fill(live, _buffer_parts(value))
    except (BufferError, ValueError) as error:
        raise StateError(
            f"a {type(live).__name__} cannot be filled, and the objects are now loaded in part: {error}: release the views "
            "and arrays on it, or load into a new one"
        ) from error
