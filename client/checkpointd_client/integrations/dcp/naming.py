"""What a tag tells of the step."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(\d+)\D*\Z", re.ASCII)
_DIGITS_MAX = 15


def step_of(tag: str) -> int:
    """The last number in a tag; 0 where there is none."""
    match = _NUMBER.search(tag)
    return int(match[1]) if match and len(match[1]) <= _DIGITS_MAX else 0
