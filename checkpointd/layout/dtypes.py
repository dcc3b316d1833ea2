"""The dtypes that a stored tensor may have, by torch's names (without `torch.`), and their sizes in bytes. Imports no torch.

A new dtype is added here and in the list of docs/FORMAT.md; the client then takes it as soon as torch has it. If numpy does not
know it, `codec/element.py` needs its width and kind. To convert or export its values, extend `codec/convert.py` and
`export/safetensors.py`.
"""

from __future__ import annotations

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    # Elements of less than a byte: torch counts the byte that holds them as the element.
    **dict.fromkeys(("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    **{f"{sign}int{width}": 1 for sign in ("", "u") for width in range(1, 8)},
    "bits16": 2,
}
