"""The result of a check: what was seen, how bad it is, and what to do."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Level: TypeAlias = Literal["ok", "note", "warn", "fail"]
"""`note`: works, and is worth knowing. `warn`: works, but not as promised. `fail`: saves, or commits, will not work."""
Topic: TypeAlias = Literal["root", "space", "memory", "machine", "software", "sidecar"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`check` is the stable name of the check; `fix` is empty where nothing need be done."""

    topic: Topic
    check: str
    level: Level
    seen: str
    fix: str = ""


class StateSize(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of the state over all ranks, and on one node; `source` says where the figure is from."""

    total_bytes: int
    node_bytes: int
    source: str
    share_known: bool
    """Whether `node_bytes` was told; otherwise it is taken to be all of it."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order in which they were made. `state_bytes`: None where the size of the state is not known."""

    release: str
    root: str | None
    socket: str | None
    state_bytes: int | None
    state_source: str
    fit: bool
    """Nothing failed."""
    findings: tuple[Finding, ...]
