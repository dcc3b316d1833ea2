"""What `objects.py` yields: its records, its figures for the goals, and its page. Pure: nothing is read or measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import goals
from benchmarks.figures import Figures
from benchmarks.goals import FROM_OBJECTS, LIMIT, OBJECT_GOALS, OBJECT_PEERS
from benchmarks.report import GIB, MIB, spread, table


@dataclass(frozen=True, kw_only=True)
class SavedObjects:
    """One save. `requests` is what the server has counted by kind, `own_requests` what the system itself has."""

    call_s: float
    safe_s: float
    """Until the tensors may change: how long the save holds training, if the call returns before."""
    durable_s: float
    """Until the system says that the save is done; the server has acknowledged every byte then."""
    cpu_s: float
    """Of the trainer and its children, the sidecar among them."""
    server_cpu_s: float
    base_bytes: int
    """Memory of the process and its children with the state and without the system."""
    requests: dict[str, int]
    own_requests: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class LoadedObjects:
    """One load, the first of its process; `wrong` names the tensors that differ from those that were saved."""

    load_s: float
    cpu_s: float
    server_cpu_s: float
    base_bytes: int
    wrong: list[str]
    requests: dict[str, int]
    own_requests: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ObjectTrial:
    """One system, once; `error` says why there are no measurements. Peaks are bytes of the process and its children."""

    system: str
    run: int
    nbytes: int
    saved: list[SavedObjects]
    loaded: LoadedObjects | None
    save_peak_bytes: int = 0
    load_peak_bytes: int = 0
    other_cores: float = 0.0
    """Cores that other programs used meanwhile."""
    error: str = ""


Of = Callable[[ObjectTrial], float]


def _save(pick: Callable[[SavedObjects], float]) -> Of:
    return lambda trial: float(statistics.median(pick(one) for one in trial.saved))


def _load(pick: Callable[[LoadedObjects], float]) -> Of:
    def of(trial: ObjectTrial) -> float:
        assert trial.loaded is not None
        return pick(trial.loaded)

    return of


def _gib(trial: ObjectTrial) -> float:
    return trial.nbytes / GIB


SAVE_COLUMNS: dict[str, Of] = {
    "call, s": _save(lambda one: one.call_s),
    "safe, s": _save(lambda one: one.safe_s),
    "durable, s": _save(lambda one: one.durable_s),
    "save MiB/s": lambda trial: trial.nbytes / MIB / _save(lambda one: one.durable_s)(trial),
    "save CPU s/GiB": lambda trial: _save(lambda one: one.cpu_s)(trial) / _gib(trial),
    "server, save CPU s/GiB": lambda trial: _save(lambda one: one.server_cpu_s)(trial) / _gib(trial),
    "save memory, MiB": lambda trial: (trial.save_peak_bytes - trial.saved[0].base_bytes) / MIB,
    "save requests": _save(lambda one: sum(one.requests.values())),
}
"""The columns of the page, whose names are also those of the figures."""
LOAD_COLUMNS: dict[str, Of] = {
    "load, s": _load(lambda one: one.load_s),
    "load MiB/s": lambda trial: trial.nbytes / MIB / _load(lambda one: one.load_s)(trial),
    "load CPU s/GiB": lambda trial: _load(lambda one: one.cpu_s)(trial) / _gib(trial),
    "server, load CPU s/GiB": lambda trial: _load(lambda one: one.server_cpu_s)(trial) / _gib(trial),
    "load memory, MiB": lambda trial: max(0, trial.load_peak_bytes - _load(lambda one: one.base_bytes)(trial)) / MIB,
    "load requests": _load(lambda one: sum(one.requests.values())),
}


def figures_of(found: Sequence[ObjectTrial]) -> Figures:
    """Every column of every trial that did not fail: `objects/<system>/<column>`."""
    named: Figures = {}
    for trial in found:
        for column, of in {} if trial.error else {**SAVE_COLUMNS, **LOAD_COLUMNS}.items():
            named.setdefault(f"{FROM_OBJECTS}{trial.system}/{column}", {})[trial.run] = of(trial)
    return named


def flaws(found: Sequence[ObjectTrial]) -> list[str]:
    """One line for each trial that failed, or that loaded other bytes than it had saved."""
    lines = [f"{one.system}, run {one.run + 1}, failed: {one.error}" for one in found if one.error]
    wrong = [(one, one.loaded.wrong) for one in found if one.loaded is not None and one.loaded.wrong]
    return [*lines, *(f"{one.system}, run {one.run + 1}: wrong bytes in {', '.join(names[:3])}" for one, names in wrong)]


def page(found: Sequence[ObjectTrial], systems: Sequence[str], *, command: str, machine: str, gib: float) -> str:
    """The measurement as a page."""
    good = [one for one in found if not one.error]
    measured = [name for name in systems if any(one.system == name for one in good)]
    figures = figures_of(good)
    verdicts = goals.verdicts(figures, OBJECT_GOALS)
    runs = len({one.run for one in found})
    notes = [
        f"Other programs used {spread(one.other_cores for one in found)} cores during the trials.",
        *flaws(found),
    ]
    return f"""# Object stores

This page compares checkpointd with other ways to save into a bucket and to load from it: s3torchconnector's writer for DCP, DCP
over s3fs, and `obstore` alone, the client that checkpointd uses, as the limit.
`{command}` writes it; do not edit it by hand.

Machine: {machine}.

One SeaweedFS on loopback, which shares the cores with its clients. One rank, {gib:g} GiB of state (`state.py`), {runs} run(s),
systems shuffled in each, every trial in fresh processes and in a bucket of its own, which is deleted after it. The median, and
in brackets the smallest and the largest.

## Goals

Ratios are taken within one run; in process and with a sidecar, the worse.

{goals.table(verdicts)}

{goals.summary(verdicts)}.

{_floors(figures)}

## Saving

{_table(good, measured, SAVE_COLUMNS)}

## Loading

{_table(good, measured, LOAD_COLUMNS, exact=True)}

## Requests

The server has counted them by the HTTP method, and checkpointd itself by their kind (`Checkpointer.status().requests`; with a
sidecar, the sidecar's requests are not among those of a save). POST begins and ends a multipart upload.

{_requests(good, measured)}

## How it was measured

- **Trial.** A process makes the state, lets the system come to rest, saves once, steps the optimizer, rests again, and saves.
  That save is measured. A second process loads it into a state of zeros. The SHA-256 of every tensor must be that of the saved
  one.
- **call**: until the save call returns. **safe**: until the tensors may change. **durable**: until the system reports the save
  as done, with every byte acknowledged by the server. For checkpointd that includes the two-phase commit. MiB/s is the state
  over that time.
- **CPU**: user and system time of the trainer and its child processes, such as the sidecar. The server's is beside it.
- **memory**: the peak of the trainer and its children beyond what they held before, sampled every 20 ms; shared memory counts
  once. checkpointd and `async_save` keep a copy of the state, so that training goes on while they write.
- **obstore** sends one buffer with as many bytes as the state, in the same parts and as many at once as checkpointd (8 MiB, 8).
  Its load keeps the answers in memory and copies them nowhere. It has no checkpoint logic: no copy of the state, no digests, no
  index, no commit.
- **checkpointd** and **checkpointd-sidecar** run with `compression="none"`, since the peers store every byte as it is, and with
  `read_back=False`. **checkpointd-defaults** compresses, and reads each checkpoint back once it is committed, which is after
  the clock has stopped.
- **The sidecar** holds no snapshot for restarts here (`--held-mib 0`), so that loads read the bucket.
- **The peers** run with their defaults, but `FsspecWriter` with `sync_files=False`: otherwise it syncs every file system of
  the machine.
- **The server** computes several MD5 digests of every byte that it stores, on the same cores. That bounds what any client
  reaches when it saves.
{chr(10).join(f"- {line}" for line in notes)}
"""


def _table(found: Sequence[ObjectTrial], systems: Sequence[str], columns: dict[str, Of], *, exact: bool = False) -> str:
    rows = []
    for system in systems:
        these = [one for one in found if one.system == system]
        right = ["NO" if any(one.loaded is None or one.loaded.wrong for one in these) else "yes"] if exact else []
        rows.append([system, *(str(spread(of(one) for one in these)) for of in columns.values()), *right])
    return table(["system", *columns, *(["bit-exact"] if exact else [])], rows)


def _requests(found: Sequence[ObjectTrial], systems: Sequence[str]) -> str:
    rows = []
    for system in systems:
        for own in (False, True):
            for phase in ("save", "load"):
                counts = [_counts(one, phase, own=own) for one in found if one.system == system]
                kinds = sorted({kind for count in counts for kind in count})
                if kinds:
                    words = ", ".join(f"{spread(count.get(kind, 0) for count in counts)} {kind}" for kind in kinds)
                    rows.append([system, phase, "the system" if own else "the server", words])
    return table(["system", "phase", "counted by", "requests"], rows, left=4)


def _counts(trial: ObjectTrial, phase: str, *, own: bool) -> dict[str, int]:
    one = trial.saved[-1] if phase == "save" else trial.loaded
    return {} if one is None else one.own_requests if own else one.requests


def _floors(figures: Figures) -> str:
    """What bounds the goals in these runs, as sentences."""
    lines = []
    for phase in ("save", "load"):
        above = goals.over_fastest(LIMIT, f"{phase} MiB/s", OBJECT_PEERS)(figures)
        if above:
            lines.append(f"`{LIMIT}` alone {phase}s at {spread(above)} x the best peer.")
        cpu = goals.value(f"{FROM_OBJECTS}{LIMIT}/{phase} CPU s/GiB")(figures)
        if cpu:
            lines.append(f"It needs {spread(cpu)} CPU s/GiB to {phase}.")
    return " ".join(["The floor:", *lines]) if lines else ""
