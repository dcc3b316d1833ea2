"""A directory at the root for the tests, which is always removed afterwards.

Invariants
  SCRATCH-1  What lies at the root is never touched; everything tried happens in a new directory below `.checkpointd`.
  SCRATCH-2  That directory, and what had to be made to hold it, is removed at the end: also after Ctrl-C, SIGTERM and SIGHUP.
      What SIGKILL left is removed by the next doctor on this machine, and only once its maker is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from checkpointd.store import writers
from checkpointd.store.names import SERVICE

PLACE = f"{SERVICE}/doctor"
_RACES_MAX = 10
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def scratch(root: str) -> Iterator[str]:
    """A new empty directory below `root`, which is made where it is missing. OSError where that cannot be."""
    place = f"{root}/{PLACE}"
    made: list[str] = []
    with _signals_unwind():
        try:
            own = _made_in(place, made)
            try:
                _clear_leftovers(place)
                yield own
            finally:
                shutil.rmtree(own, ignore_errors=True)
        finally:
            for path in [place, *reversed(made)]:
                with contextlib.suppress(OSError):  # gone, or another one is in it
                    os.rmdir(path)


def _made_in(place: str, made: list[str]) -> str:
    """A new directory in `place`, which another doctor that ends may remove at any time until this one is in it."""
    own = f"{place}/{writers.new_writer()}"
    for _ in range(_RACES_MAX):
        _make(place, made)
        with contextlib.suppress(FileNotFoundError):
            os.mkdir(own)
            return own
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)


def _make(path: str, made: list[str]) -> None:
    """`path` and what is missing above it; `made` gets what was made, the uppermost first."""
    if os.path.isdir(path):
        return
    _make(os.path.dirname(path), made)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        made.append(path)


def _clear_leftovers(place: str) -> None:
    """Of this machine alone: whether a doctor on another one still runs cannot be told from here."""
    for name in os.listdir(place):
        if writers.has_ended(name):
            shutil.rmtree(f"{place}/{name}", ignore_errors=True)


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Within the block, signals that would end the process at once raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
