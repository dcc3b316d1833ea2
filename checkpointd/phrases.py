"""Sizes, times, ranks and lists as messages write them; also reads sizes that people write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from checkpointd.errors import UsageError

LISTED_MAX = 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?)B?|B)?\Z", re.IGNORECASE | re.ASCII)
_EXPONENTS = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def byte_size(nbytes: int, blank: str = " ") -> str:
    """`1.5 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}{blank}{_UNITS[unit]}" if unit else f"{nbytes}{blank}B"


def lasting(seconds: float) -> str:
    """A short length of time: `12 ms`, `7.2 s`, `95 s`."""
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def byte_count(size: int | str, what: str) -> int:
    """Bytes from `5GB` (G is 10**9, as in Hugging Face), `5GiB` (Gi is 2**30) or a number. UsageError names `what`."""
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


def listed(names: Sequence[str], most: int = LISTED_MAX) -> str:
    """`a, b and 5 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def runs(numbers: Iterable[int]) -> list[range]:
    """The runs of consecutive numbers, in order."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def run_text(run: range) -> str:
    """`7`, or `0-3`."""
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])


def rank_runs(ranks: Iterable[int], most: int = LISTED_MAX) -> str:
    """`rank 3`, or `ranks 0-2, 5 and 7 more`."""
    found = runs(ranks)
    more = sum(map(len, found[most:]))
    plural = len(found) != 1 or len(found[0]) > 1
    return f"rank{'s' if plural else ''} {', '.join(map(run_text, found[:most]))}{f' and {more} more' if more else ''}"
