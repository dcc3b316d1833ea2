"""Values of Python's library come back exactly, and what a file says of them is made by their own classes or refused."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, get_args, get_type_hints
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture import scalars
from checkpointd_client.capture.plain import values

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
zones = (
    st.none()
    | st.timezones()
    | st.builds(
        timezone,
        st.timedeltas(timedelta(hours=-23), timedelta(hours=23)),
    )
)
named_zones = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), texts)


@st.composite
def buffers(draw: st.DrawFn) -> io.BytesIO:
    made = io.BytesIO(draw(st.binary(max_size=12)))
    made.seek(draw(st.integers(0, 20)))
    return made


@st.composite
def text_buffers(draw: st.DrawFn) -> io.StringIO:
    made = io.StringIO(newline=draw(st.sampled_from([None, "", "\n", "\r", "\r\n"])))
    made.write(draw(st.text("ab\r\n", max_size=12)))
    made.seek(draw(st.integers(0, 20)))
    return made


everything = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12).flatmap(
        lambda text: st.sampled_from([Path(text), PurePosixPath(text), PureWindowsPath(text)])
    ),
    st.dates(),
    st.times(timezones=zones | named_zones),
    st.datetimes(timezones=zones | named_zones),
    st.datetimes().map(lambda moment: moment.replace(fold=1)),
    st.timedeltas(),
    named_zones,
    st.timezones(),
    st.uuids() | st.builds(UUID, int=st.integers(0, 2**128 - 1), is_safe=st.sampled_from(SafeUUID)),
    st.decimals(),
    st.fractions(),
    st.slices(9) | st.builds(slice, texts, st.none() | st.integers() | st.floats(), st.just(np.int64(3))),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.binary(max_size=9).map(bytearray),
    buffers(),
    text_buffers(),
    st.sampled_from(
        [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged, torch.channels_last, torch.preserve_format]
    ),
)


def facts(value: Any) -> tuple[object, ...]:
    """What must be the same of two values, in words where == would be too generous."""
    match value:
        case io.BytesIO():
            return type(value), value.getvalue(), value.tell()
        case io.StringIO():
            return type(value), value.getvalue(), value.tell(), value.__getstate__()
        case datetime() | time():
            zone = value.tzinfo
            return (
                type(value),
                value.isoformat(),
                value.fold,
                type(zone),
                repr(zone),
                None if zone is None else zone.utcoffset(None),
            )
        case UUID():
            return type(value), value.int, value.is_safe
        case _:
            return type(value), repr(value)


@given(everything)
def test_a_value_comes_back_exactly(value: object) -> None:
    assert scalars.is_scalar(value)
    node = tree.decode(tree.encode(scalars.encode(value, "v")))
    assert facts(scalars.decode(node)) == facts(value)


@given(everything.filter(lambda value: type(value) not in values.MUTABLE and _hashable(value)))
def test_a_value_that_never_changes_comes_back_as_a_key(value: Any) -> None:
    node = tree.decode(tree.encode(scalars.key_node((value, 1), "v")))
    found: Any = scalars.decode_key(node)
    assert facts(found[0]) == facts(value)
    assert scalars.key_text(found) == scalars.key_text((value, 1))


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def test_a_zone_of_no_offset_is_the_one_that_python_calls_utc() -> None:
    assert scalars.decode(scalars.encode(UTC, "v")) is UTC


def test_every_kind_of_the_tree_has_its_class() -> None:
    assert set(get_args(get_type_hints(tree.LibraryValue)["kind"])) == values.BY_NAME.keys()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("PosixPath", (7,)),
        ("PosixPath", ()),
        ("date", ("tomorrow",)),
        ("datetime", ("2026-01-01T00:00:00", 0, "UTC")),
        ("datetime", ("2026-01-01T00:00:00", 2, None)),
        ("timedelta", (10**12, 0, 0)),
        ("timezone", (tree.LibraryValue("timedelta", (1, 0, 0)), None)),
        ("ZoneInfo", ("../../../etc/passwd",)),
        ("ZoneInfo", ("os.path",)),
        ("UUID", ("g" * 32, "safe")),
        ("Decimal", ("one",)),
        ("Decimal", (1.5,)),
        ("Fraction", (1, 0)),
        ("range", (0, 1, 0)),
        ("range", (0, 1, 1.0)),
        ("slice", (1, 2)),
        ("slice", (tree.Tensor("w"), None, None)),
        ("bytearray", (10**12,)),
        ("BytesIO", (tree.Bytes(b"a"), -1)),
        ("StringIO", ("a", "newline", 0)),
    ],
)
def test_parts_that_no_value_has_are_refused(kind: Any, parts: tuple[Any, ...]) -> None:
    node = tree.decode(tree.encode(tree.LibraryValue(kind, parts)))
    with pytest.raises(FormatError, match="holds a value that cannot be read"):
        scalars.decode(node)


@pytest.mark.parametrize(
    ("kind", "name"), [("layout", "channels_last"), ("memory_format", "strided"), ("layout", "load"), ("memory_format", "hub")]
)
def test_a_name_of_torchs_stands_for_nothing_else(kind: Any, name: str) -> None:
    with pytest.raises(FormatError, match="has no "):
        scalars.decode(tree.TorchName(kind, name))


@pytest.mark.parametrize("value", [bytearray(b"a"), io.BytesIO(b"a"), slice(1)], ids=["bytearray", "BytesIO", "slice"])
def test_a_value_that_may_change_is_no_key(value: object) -> None:
    with pytest.raises(StateError, match="dict key of type"):
        scalars.key_node(value, "v")
    with pytest.raises(FormatError, match="as a key"):
        scalars.decode_key(scalars.encode(value, "v"))


def test_a_number_that_has_no_hash_is_no_key() -> None:
    with pytest.raises(FormatError, match=r"a decimal\.Decimal as a key"):
        scalars.decode_key(tree.LibraryValue("Decimal", ("sNaN",)))


def test_a_time_zone_that_this_machine_lacks_is_named_with_what_to_do() -> None:
    with pytest.raises(StateError, match=r"time zone Mars/Olympus .*install tzdata"):
        scalars.decode(tree.LibraryValue("ZoneInfo", ("Mars/Olympus",)))


def test_a_zone_from_a_file_is_refused() -> None:
    assert ZoneInfo("UTC").key == "UTC"
    data = io.BytesIO(b"TZif2" + bytes(15) + bytes(24) + b"TZif2" + bytes(15) + bytes(24) + b"\nUTC0\n")
    zone = ZoneInfo.from_file(data)
    with pytest.raises(StateError, match=r"^v: .*use ZoneInfo\(key\)"):
        scalars.encode(datetime(2026, 1, 1, tzinfo=zone), "v")


@pytest.mark.parametrize("live", [bytearray(b"old and longer"), io.BytesIO(b"old and longer"), io.StringIO("old and longer")])
def test_a_value_is_refilled_in_place(live: Any) -> None:
    new = type(live)("new" if isinstance(live, io.StringIO) else b"new")
    if not isinstance(new, bytearray):
        new.seek(2)
    values.refill(live, new)
    assert facts(live) == facts(new)


@pytest.mark.parametrize("live", [bytearray(b"old"), io.BytesIO(b"old")])
def test_memory_that_somebody_holds_on_to_is_an_error_with_a_name(live: Any) -> None:
    with (
        memoryview(live if isinstance(live, bytearray) else live.getbuffer()),
        pytest.raises(StateError, match="release the views"),
    ):
        values.refill(live, type(live)(b"of another size"))


def test_dates_are_no_datetimes() -> None:
    assert type(scalars.decode(scalars.encode(date(2026, 1, 1), "v"))) is date
    assert scalars.decode(scalars.encode([Decimal("1.10"), Fraction(2, 4)][1], "v")) == Fraction(1, 2)
