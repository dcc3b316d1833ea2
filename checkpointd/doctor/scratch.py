"""A directory below the root in which the checks write, removed afterwards.

Invariants
  SCRATCH-1  The checks never touch files that were there before: they write only in a new directory below `.checkpointd`.
  SCRATCH-2  The doctor removes that directory at the end, with every directory above it that it had to make, also after Ctrl-C,
      SIGTERM and SIGHUP. After SIGKILL, the next doctor on this machine removes it, but only once the killed process is gone.
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
    """A new empty directory below `root`, which is made if it is missing. OSError if it cannot be made."""
    place = f"{root}/{PLACE}"
    made: list[str] = []
    with signals_unwind():
        try:
            own = _made_in(place, made)
            try:
                _clear_leftovers(place)
                yield own
            finally:
                shutil.rmtree(own, ignore_errors=True)
        finally:
            for path in [place, *reversed(made)]:
                with contextlib.suppress(OSError):  # it is gone, or another doctor uses it
                    os.rmdir(path)


def _made_in(place: str, made: list[str]) -> str:
    """A new directory in `place`. Another doctor that ends may remove `place` at any time while it is empty."""
    own = f"{place}/{writers.new_writer()}"
    for _ in range(_RACES_MAX):
        _make(place, made)
        with contextlib.suppress(FileNotFoundError):
            os.mkdir(own)
            return own
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)


def _make(path: str, made: list[str]) -> None:
    """Make `path` and the missing directories above it; append each new one to `made`, the uppermost first."""
    if os.path.isdir(path):
        return
    _make(os.path.dirname(path), made)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        made.append(path)


def _clear_leftovers(place: str) -> None:
    """Remove what killed doctors of this machine left. Nobody here can tell whether a doctor on another machine still runs."""
    for name in os.listdir(place):
        if writers.has_ended(name):
            shutil.rmtree(f"{place}/{name}", ignore_errors=True)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
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
