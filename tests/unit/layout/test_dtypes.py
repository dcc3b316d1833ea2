"""The element types: those of docs/FORMAT.md, with the sizes that torch gives them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from checkpointd.layout.dtypes import ITEM_BYTES

PAGE = Path(__file__).parents[3] / "docs" / "FORMAT.md"


def on_the_page() -> dict[str, int]:
    """Every dtype of the page's table with its bytes; the like of `int1` to `int7` are seven."""
    found: dict[str, int] = {}
    table = PAGE.read_text().partition("| bytes per element | dtypes |")[2].partition("\n\n")[0]
    for size, names in re.findall(r"^\| (\d+)[^|]* \| (.*) \|$", table, re.MULTILINE):
        text = re.sub(r"`(\w*int)1` to `\w+7`", lambda m: " ".join(f"`{m[1]}{n}`" for n in range(1, 8)), names)
        found |= dict.fromkeys(re.findall(r"`(\w+)`", text), int(size))
    return found


def test_the_page_lists_every_dtype_with_its_size() -> None:
    assert on_the_page() == ITEM_BYTES


def test_sizes_are_torchs_own() -> None:
    for name, size in ITEM_BYTES.items():
        dtype = getattr(torch, name, None)
        assert dtype is None or dtype.itemsize == size, name
