"""Turns DCP's `checkpoint_id` into the tag of a checkpoint at a root, and its step."""

from __future__ import annotations

import os
import re


class Tagged:
    """The part of DCP's interface that our reader and writer share."""

    _tag: str | None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003  # DCP's interface
        """False: DCP asks whether the storage can be chosen by a `checkpoint_id` alone, but our tag does not name a root."""
        return False

    @property
    def checkpoint_id(self) -> str | None:
        """The tag."""
        return self._tag


_NUMBER = re.compile(r"(\d+)\D*\Z", re.ASCII)
_DIGITS_MAX = 15


def step_of(tag: str) -> int:
    """The last number in a tag; 0 if there is none."""
    match = _NUMBER.search(tag)
    return int(match[1]) if match and len(match[1]) <= _DIGITS_MAX else 0
