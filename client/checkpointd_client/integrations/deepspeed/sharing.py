"""Engines of one process that save to or load from the same directory share its Checkpointer: there can be only one.

A script that saves with one engine and loads with the next, without closing the first, is such a process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

from checkpointd.errors import UsageError
from checkpointd_client.checkpointer import Checkpointer


@dataclass(slots=True)
class _Shared:
    checkpointer: Checkpointer
    options: dict[str, Any]
    holders: int


_lock = threading.Lock()
_open: dict[tuple[int, str], _Shared] = {}


def borrow(root: str, options: dict[str, Any]) -> Checkpointer:
    """The Checkpointer of `root`; made where there is none. UsageError where another engine's has other options."""
    key = _key(root)
    with _lock:
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = _Shared(Checkpointer(root, **options), dict(options), 0)
        elif shared.options != options:
            raise UsageError(
                f"another engine of this process uses {root} with {shared.options}, and this one asks for {options}: "
                "attach both alike, or detach the other first"
            )
        shared.holders += 1
        return shared.checkpointer


def give_back(root: str) -> None:
    """Close the Checkpointer of `root` once nobody else has it; raises what close() does."""
    key = _key(root)
    with _lock:
        shared = _open[key]
        shared.holders -= 1
        if shared.holders == 0:
            del _open[key]
            shared.checkpointer.close()  # still alone: who comes next makes one of its own


def _key(root: str) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(root)
