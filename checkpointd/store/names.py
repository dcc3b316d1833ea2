"""The keys that a store accepts, and the names below `.checkpointd` that belong to the store itself."""

from __future__ import annotations

import re
from typing import Final

from checkpointd.errors import UsageError

SERVICE = ".checkpointd"
LOG = "log"
TEMPORARY = f"{SERVICE}/tmp"
UNFINISHED = f"{SERVICE}/unfinished"
LOCK = f"{SERVICE}/lock"
CONDITIONS = f"{SERVICE}/conditions"
SHOWN = f"{SERVICE}/shown"
"""Below it lies a directory for each directory of plain files, which goes with its record."""
PASSING = (SHOWN, UNFINISHED)
"""Below these, directories come and go."""
_OWN: Final = (TEMPORARY, UNFINISHED, LOCK)
_BELOW_OWN: Final = tuple(f"{name}/" for name in _OWN)
_PLAIN: Final = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII)
"""Nearly all keys: ASCII, and no part begins with a dot, so none belongs to the store. They are looked up by the thousand."""


def check_key(key: str) -> str:
    """Return `key` if it can name an object, else raise UsageError saying why."""
    why = _fault(key)
    if why:
        raise UsageError(f"{key!r} is not a key: {why}; a key is relative and '/'-separated, such as 'global_step100/outcome'")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty (the root) or could be a key, else raise UsageError."""
    return check_key(prefix) if prefix else prefix


def is_key(text: str) -> bool:
    """Whether `text` could be a key; listings leave out other names."""
    return _PLAIN.fullmatch(text) is not None or _fault(text) is None


def _is_internal(key: str) -> bool:
    """Whether `key` belongs to the store: a temporary file, the lock, or something in an unfinished directory."""
    return key in _OWN or key.startswith(_BELOW_OWN)


def is_text(name: str) -> bool:
    """Whether UTF-8 can encode `name`. Python decodes other bytes of a file name to surrogates."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def _fault(key: str) -> str | None:
    if _PLAIN.fullmatch(key):
        return None
    if not key:
        return "it is empty"
    if "\0" in key:
        return "it contains a NUL"
    if key.startswith("/"):
        return "it is absolute"
    parts = key.split("/")
    if "" in parts:
        return "it has an empty part"
    if "." in parts or ".." in parts:
        return "it has a part '.' or '..'"
    if not is_text(key):
        return "it cannot be encoded as UTF-8"
    if _is_internal(key):
        return "that name belongs to the store"
    return None
