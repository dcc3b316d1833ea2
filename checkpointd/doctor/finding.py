"""The result of a check: what was seen, how bad it is, and what to do."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Level: TypeAlias = Literal["ok", "note", "warn", "fail"]
"""`note`: it works, with a remark. `warn`: it works, but not as promised. `fail`: saves or commits will not work."""
Topic: TypeAlias = Literal["root", "space", "memory", "machine", "software", "sidecar", "device"]


class Finding(msgspec.Struct, frozen=True):
    """`check` is the stable name of the check; `fix` is empty if nothing needs to be done."""

    topic: Topic
    check: str
    level: Level
    seen: str
    fix: str = ""


class StateSize(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of the state on all ranks together and on one node; `source` says where the figure comes from."""

    total_bytes: int
    node_bytes: int
    source: str
    share_known: bool
    """Whether the user gave the number of nodes. Otherwise `node_bytes` equals `total_bytes`."""


class Fact(msgspec.Struct, frozen=True):
    """What a report names, such as a version."""

    name: str
    value: str


class Figure(msgspec.Struct, frozen=True):
    """A measurement. `unit`: "s" or "B/s"."""

    name: str
    value: float
    unit: Literal["s", "B/s"]


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was tested on an accelerator: which one it is, how fast it was, and what the checks found."""

    facts: tuple[Fact, ...]
    figures: tuple[Figure, ...]
    findings: tuple[Finding, ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order of the checks. `state_bytes` is None if the size of the state is not known."""

    release: str
    root: str | None
    socket: str | None
    state_bytes: int | None
    state_source: str
    fit: bool
    """Nothing failed."""
    findings: tuple[Finding, ...]
    device_facts: tuple[Fact, ...] = ()
    """The accelerator, if it was tested."""
    device_figures: tuple[Figure, ...] = ()
