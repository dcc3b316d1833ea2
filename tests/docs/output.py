"""Whether a command printed what a page shows.

Words and whole numbers must agree. A line `...` stands for any lines, and `...` in a line for any text. What differs from
machine to machine may differ: a decimal number by 2 %, and one with a unit of time or size (`0.84 s`, `2.2GiB`) by anything.
Runs of spaces count as one.
"""

from __future__ import annotations

import re

_UNIT = r"(?:[munµ]?s|min|h|[KMGT]?i?B)(?:/s)?"
_PIECE = re.compile(rf"(?P<any>\.\.\.)|(?P<measured>\d+(?:\.\d+)?\s?{_UNIT}\b)|(?P<decimal>\d+\.\d+(?:e[+-]\d+)?)")
_MEASURED = rf"\d+(?:\.\d+)?\s?{_UNIT}"
_DECIMAL = r"(\d+(?:\.\d+)?(?:e[+-]\d+)?)"
_TOLERANCE = 0.02


def agrees(shown: str, printed: str) -> bool:
    """Whether `printed` is what `shown` says, by the rules above."""
    return _lines_agree(_lines(shown), _lines(printed))


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _lines_agree(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == "...":
        return any(_lines_agree(shown[1:], printed[skip:]) for skip in range(len(printed) + 1))
    return bool(printed) and _line_agrees(shown[0], printed[0]) and _lines_agree(shown[1:], printed[1:])


def _line_agrees(shown: str, printed: str) -> bool:
    pattern, numbers, end = "", list[float](), 0
    for piece in _PIECE.finditer(shown):
        pattern += re.escape(shown[end : piece.start()])
        end = piece.end()
        if piece["any"]:
            pattern += ".*"
        elif piece["measured"]:
            pattern += _MEASURED
        else:
            numbers.append(float(piece["decimal"]))
            pattern += _DECIMAL
    found = re.fullmatch(pattern + re.escape(shown[end:]), printed)
    return found is not None and all(
        abs(float(number) - expected) <= _TOLERANCE * abs(expected)
        for number, expected in zip(found.groups(), numbers, strict=True)
    )
