"""What one trial yields: plain records that travel from the measured processes to the report as JSON.

A trial is one system, once, in fresh processes. All times are wall seconds by `time.perf_counter`, counted
from the moment the save call was made, unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """One save of one rank."""

    call_s: float
    """How long the call blocked."""
    safe_s: float
    """Until the caller may change the tensors."""
    done_s: float
    """Until the system itself says that it is done."""
    durable_s: float
    """Until a power cut loses nothing of it: `done_s`, plus our fsync where the system leaves one out."""
    cpu_s: float
    """CPU seconds of this rank and its child processes from the call until it was durable."""
    stored_bytes: int
    """What lies on disk for this save, all ranks together."""
    reported: dict[str, float]
    """What the system says of itself, by its own names; empty for those that say nothing."""


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """Training while one warm save runs."""

    lost_s: float
    """From the call until durable, less what the steps done in that time take undisturbed."""
    window_s: float
    steps: int
    undisturbed_ms: float
    """Mean step, averaged over the stretch before and the stretch after the save."""
    undisturbed_p99_ms: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, kw_only=True)
class LoadTimes:
    """Loads of the last save into the existing tensors."""

    cold_s: float
    """With the page cache dropped."""
    cached_s: float
    """With every file read once just before."""
    first_s: float | None = None
    """As `cached_s`, but the first load of its process, where that was measured by itself."""
    first_cold_s: float | None = None
    """As `cold_s`, but the first load of its process, where that was measured by itself."""
    plain_s: float | None = None
    """A plain read of the same files, on one thread, just after the load of `cold_s`, with the page cache dropped again."""
    first_plain_s: float | None = None
    """The same just after the load of `first_cold_s`."""
    resident: float
    """Share of the files' pages still in memory after they were dropped, 0 to 1."""
    wrong: list[str]
    """Names of tensors whose bytes differ from the saved ones, after either load."""


@dataclass(frozen=True, kw_only=True)
class TwoLoads:
    """What one rank measured in a process that only loads: its first load, and a later one."""

    first_s: float
    later_s: float
    plain_s: float
    """A plain read of the files just after the load that had the page cache dropped, and dropped again."""
    resident: float
    wrong: list[str]
    base_bytes: int
    """Memory of this rank and its children, with the system open, before the first load."""
    base_private_bytes: int
    """The part of it that no process shares."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """All that one rank measured in one trial."""

    rank: int
    tensors: int
    state_bytes: int
    setup_s: float
    """Making the system's objects; what it goes on to start in the background is not in it."""
    cold: SaveTimes
    warm: list[SaveTimes]
    loop: LoopTimes
    python: LoopTimes
    """The same beside a loop that holds the interpreter lock all the time."""
    load: LoadTimes
    base_bytes: int
    """Memory of this rank before the system was set up."""
    load_base_bytes: int
    """Memory of this rank and its children, with the system open again, before the first load."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """All that one rank measured of its saves in one trial with FSDP2."""

    rank: int
    tensors: int
    """Of all ranks together."""
    state_bytes: int
    """Of this rank's part."""
    cold: SaveTimes
    warm: list[SaveTimes]
    loop: LoopTimes
    base_bytes: int


@dataclass(frozen=True, kw_only=True)
class WorldLoad:
    """The last save of a trial, loaded on `ranks` ranks; `error` says why there are no times."""

    ranks: int
    times: list[LoadTimes]
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardTrial:
    """One system, once, with FSDP2; `error` says why there are neither reports nor loads."""

    system: str
    run: int
    order: int
    other_cores: float
    reports: list[ShardReport]
    loads: list[WorldLoad]
    save_peak_bytes: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One system, once; `error` says why there are no reports."""

    system: str
    ranks: int
    run: int
    order: int
    other_cores: float
    """Cores that were busy with something else than this trial while it ran, kernel threads included."""
    reports: list[RankReport]
    save_peak_bytes: int
    """Largest memory seen of all ranks and their children together, from set-up to the last save."""
    load_peak_bytes: int
    load_private_bytes: int = 0
    """The most memory while loading that no process shares, beyond what was held before: without the snapshot buffer."""
    error: str = ""


def rank_report(data: dict[str, Any]) -> RankReport:
    """A `RankReport` from the dictionary that `dataclasses.asdict` made of one."""
    return RankReport(
        **{
            **data,
            "cold": SaveTimes(**data["cold"]),
            "warm": [SaveTimes(**times) for times in data["warm"]],
            "loop": LoopTimes(**data["loop"]),
            "python": LoopTimes(**data["python"]),
            "load": LoadTimes(**data["load"]),
        }
    )


def shard_report(data: dict[str, Any]) -> ShardReport:
    """A `ShardReport` from its dictionary."""
    cold, warm = SaveTimes(**data["cold"]), [SaveTimes(**times) for times in data["warm"]]
    return ShardReport(**{**data, "cold": cold, "warm": warm, "loop": LoopTimes(**data["loop"])})


def world_load(data: dict[str, Any]) -> WorldLoad:
    """A `WorldLoad` from its dictionary."""
    return WorldLoad(**{**data, "times": [LoadTimes(**times) for times in data["times"]]})


def shard_trial(data: dict[str, Any]) -> ShardTrial:
    """A `ShardTrial` from its dictionary."""
    reports, loads = map(shard_report, data["reports"]), map(world_load, data["loads"])
    return ShardTrial(**{**data, "reports": list(reports), "loads": list(loads)})


def trial(data: dict[str, Any]) -> Trial:
    """A `Trial` from the dictionary that `dataclasses.asdict` made of one."""
    return Trial(**{**data, "reports": [rank_report(report) for report in data["reports"]]})
