"""Numbers, times and foreign text for people. Sizes and times contain no blank, so that scripts can split columns at blanks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from checkpointd import phrases
from checkpointd.phrases import byte_size, run_text
from checkpointd.times import utc

ABSENT = "-"


def size(nbytes: int | None) -> str:
    """`1.5GiB`; `-` for None."""
    return ABSENT if nbytes is None else byte_size(nbytes, "")


def part(done: int, total: int) -> str:
    """`1.0GiB of 1.5GiB`: never more than the whole, though what is written again counts twice."""
    return f"{size(min(done, total))} of {size(total)}"


def ratio(raw: int | None, stored: int | None) -> str:
    """Stored bytes per raw byte: below 1 if the codec saved space."""
    return f"{stored / raw:.3f}" if raw and stored is not None else ABSENT


def speed(bytes_per_second: float | None) -> str:
    """`1.5GiB/s`; `-` for None."""
    return ABSENT if bytes_per_second is None else f"{size(round(bytes_per_second))}/s"


def duration(seconds: float | None) -> str:
    """`12ms`, `7.2s`, `95s`, `2m03s`, `1h04m`, `3d02h`; `-` for None."""
    if seconds is None:
        return ABSENT
    t = max(0.0, seconds)
    if t < 0.9995:
        return f"{t * 1000:.0f}ms"
    if t < 9.95:
        return f"{t:.1f}s"
    if t < 99.5:
        return f"{t:.0f}s"
    if t < 3600:
        return f"{int(t // 60)}m{int(t % 60):02d}s"
    if t < 86400:
        return f"{int(t // 3600)}h{int(t % 3600 // 60):02d}m"
    return f"{int(t // 86400)}d{int(t % 86400 // 3600):02d}h"


def moment(text: str | None) -> str:
    """A time of the store as UTC to the second; text that is not a time stays unchanged."""
    if not text:
        return ABSENT
    try:
        return utc(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return text


def number(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def metrics(values: Mapping[str, float]) -> str:
    """`accuracy=0.91 loss=2.31`, by name; `-` for none."""
    return " ".join(f"{name}={value:.6g}" for name, value in sorted(values.items())) or ABSENT


def count(value: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{value} {noun}" if value == 1 else f"{value} {noun}s"


def shape(sizes: tuple[int, ...]) -> str:
    """`64x48`; `scalar` for a 0-d tensor."""
    return "x".join(str(n) for n in sizes) or "scalar"


def runs(numbers: Iterable[int]) -> str:
    """The numbers as `0-3,7`."""
    return ",".join(map(run_text, phrases.runs(numbers))) or ABSENT


def printable(text: str) -> str:
    """`text` on one line, without control characters for the terminal: anybody may have chosen the names in a checkpoint."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shortened(text: str, most: int) -> str:
    """`text` cut to `most` characters, with a note of its full length."""
    if len(text) <= most:
        return text
    note = f"... ({len(text)} characters)"
    return text[: max(most - len(note), 0)] + note
