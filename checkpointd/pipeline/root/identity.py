"""The writer of an object: host, process and wall-clock time, for people. No decision uses them."""

from __future__ import annotations

import os
import pwd
import socket
from contextvars import ContextVar
from datetime import UTC, datetime

from checkpointd.layout.manifest import WriterIdentity


def seconds_of(time: str) -> float | None:
    """An ISO 8601 time as seconds since 1970; None where somebody wrote something else."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None


_ACTS_FOR: ContextVar[int | None] = ContextVar("acts_for", default=None)


def acts_for(uid: int) -> None:
    """From here on, this task and those that it starts work for the user `uid`, as a daemon does for a client's."""
    _ACTS_FOR.set(uid)


def user() -> str:
    """The user on whose behalf this is done: `alice (1000)`, or `1000` where that one has no name here."""
    uid = _ACTS_FOR.get()
    uid = os.geteuid() if uid is None else uid
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def writer() -> WriterIdentity:
    """This process, now."""
    return WriterIdentity(host=socket.gethostname(), pid=os.getpid(), time=datetime.now(UTC).isoformat(timespec="milliseconds"))
