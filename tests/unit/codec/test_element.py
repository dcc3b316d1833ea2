"""What the codec makes of dtype names."""

from __future__ import annotations

import pytest

from checkpointd.codec import ElementType


@pytest.mark.parametrize(
    ("dtype", "itemsize", "kind"),
    [
        ("bfloat16", 2, "float"),
        ("float16", 2, "float"),
        ("float32", 4, "float"),
        ("float64", 8, "float"),
        ("complex32", 2, "float"),
        ("complex64", 4, "float"),
        ("complex128", 8, "float"),
        ("float8_e4m3fn", 1, "float"),
        ("float8_e8m0fnu", 1, "float"),
        ("int64", 8, "other"),
        ("uint16", 2, "other"),
        ("bool", 1, "other"),
        ("<f4", 4, "float"),
        (">f4", 4, "other"),
        ("<c16", 8, "float"),
        ("<f16", 1, "other"),
        ("|S7", 1, "other"),
        ("qint32", 1, "other"),
        ("no such dtype, (", 1, "other"),
    ],
)
def test_dtype(dtype: str, itemsize: int, kind: str) -> None:
    element = ElementType.of_dtype(dtype)
    assert (element.itemsize, element.kind) == (itemsize, kind)


@pytest.mark.parametrize(("itemsize", "rotation"), [(1, 0), (2, 1), (4, 1), (8, 1)])
def test_only_floats_of_several_bytes_are_rotated(itemsize: int, rotation: int) -> None:
    assert ElementType(itemsize, "float").rotation == rotation
    assert ElementType(itemsize, "other").rotation == 0


@pytest.mark.parametrize("itemsize", [0, 3, 16, -1])
def test_odd_sizes_are_refused(itemsize: int) -> None:
    with pytest.raises(ValueError, match=f"itemsize is {itemsize}, not one of"):
        ElementType(itemsize, "float")


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'int'"):
        ElementType(4, "int")  # type: ignore[arg-type]
