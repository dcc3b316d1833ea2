"""The writer of an object: host, process and wall-clock time. They are for people; no decision uses them."""

from __future__ import annotations

import os
import pwd
import socket
from contextvars import ContextVar
from datetime import UTC, datetime

from checkpointd.layout.manifest import WriterIdentity


def seconds_of(time: str) -> float | None:
    """An ISO 8601 time as seconds since 1970; None for any other text."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None


_ACTS_FOR: ContextVar[int | None] = ContextVar("acts_for", default=None)


def acts_for(uid: int) -> None:
    """Let this task, and the tasks that it starts, act for the user `uid`, as a daemon does for its client's user."""
    _ACTS_FOR.set(uid)


def user() -> str:
    """The user for whom this task acts: `alice (1000)`, or `1000` if this machine has no name for the number."""
    uid = _ACTS_FOR.get()
    uid = os.geteuid() if uid is None else uid
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def writer() -> WriterIdentity:
    """This process, now."""
    now = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    return WriterIdentity(host=socket.gethostname(), pid=os.getpid(), time=f"{now}Z")
