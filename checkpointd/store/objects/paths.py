"""The names of objects in a bucket. They are the store's keys, but for a few characters that clients or servers refuse."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

# Control characters are refused by clients, and some servers take a backslash for a slash.
_REFUSED: Final = re.compile(r"[\x00-\x1f\x7f\\%]")


def path_of(prefix: str, key: str) -> str:
    """The name of the object `key` in the bucket, below `prefix`; either may be empty."""
    return _REFUSED.sub(lambda found: f"%{ord(found[0]):02X}", f"{prefix}/{key}" if prefix and key else prefix or key)


def name_of(path: str) -> str:
    """The last part of the key of the object, or of the prefix, that is called `path` in the bucket."""
    return unquote(path.rstrip("/").rpartition("/")[2])


def key_of(prefix: str, path: str) -> str:
    """The key of the object that is called `path` in the bucket, below `prefix`."""
    return unquote(path.removeprefix(f"{path_of(prefix, '')}/") if prefix else path)
