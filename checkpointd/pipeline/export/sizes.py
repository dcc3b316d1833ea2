"""Sizes as people give them."""

from __future__ import annotations

import re

from checkpointd.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\Z", re.IGNORECASE | re.ASCII)
_EXPONENTS = {"K": 1, "M": 2, "G": 3, "T": 4}


def byte_count(size: int | str, what: str) -> int:
    """`5GB` (10**9 to the G, as Hugging Face has it), `5GiB` (2**30), or a number of bytes; UsageError names `what`."""
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        match = _SIZE.match(str(size).strip())
        if match is None:
            raise UsageError(f"{what} is {size!r}: give a number of bytes, or one with a unit, such as 5GB or 5GiB")
        unit = _EXPONENTS[match[2].upper()] if match[2] else 0
        count = round(float(match[1]) * (1024 if match[3] else 1000) ** unit)
    if count < 1:
        raise UsageError(f"{what} is {size!r}; it must be greater than 0")
    return count
