"""What the neighbour benchmark yields, and its page. Pure: nothing is read or measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measures import LoopTimes
from benchmarks.report import Spread, spread, table


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to save beside the loop. `serve`: what `checkpointd serve` is given beyond its socket and root."""

    name: str
    saves: bool = True
    sidecar: bool = False
    serve: tuple[str, ...] = ()


QUIET_CORES_MAX = 0.2
NO_SAVE = Mode(name="no save", saves=False)
IN_PROCESS = Mode(name="in-process writer")


def modes(*, cores: int, limit_mib: int) -> tuple[Mode, ...]:
    """The ways that are measured: one setting moves at a time."""
    one = ("--encoders", "1")
    return (
        NO_SAVE,
        IN_PROCESS,
        Mode(name="sidecar, 1 encoder", sidecar=True, serve=one),
        Mode(name=f"sidecar, {cores} encoders", sidecar=True, serve=("--encoders", str(cores))),
        Mode(name="sidecar, nice 10", sidecar=True, serve=(*one, "--nice", "10")),
        Mode(name="sidecar, idle I/O", sidecar=True, serve=(*one, "--io-class", "idle")),
        Mode(name="sidecar, nice 10, idle I/O", sidecar=True, serve=(*one, "--nice", "10", "--io-class", "idle")),
        Mode(name=f"sidecar, {limit_mib} MiB/s", sidecar=True, serve=(*one, "--bandwidth-mib", str(limit_mib))),
    )


@dataclass(frozen=True, kw_only=True)
class BesideSave:
    """One save under the loop, or as long a stretch without one: `durable_s` is then the stretch's length."""

    call_s: float
    durable_s: float
    stored_bytes: int
    sidecar_cpu_s: float
    loop: LoopTimes


@dataclass(frozen=True, kw_only=True)
class NeighbourTrial:
    """One mode, once, in fresh processes; `error` says why there are no saves."""

    mode: str
    run: int
    order: int
    saves: list[BesideSave]
    other_cores: float
    """Cores that were busy with something else than this trial while it ran, kernel threads included."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class NeighbourRun:
    """All trials, the machine, and how it was asked."""

    command: str
    machine: dict[str, str]
    gib: float
    compression: str
    scheduler: str
    modes: list[str]
    """In the order of the tables."""
    trials: list[NeighbourTrial]


def run_of(data: dict[str, Any]) -> NeighbourRun:
    """A run from the dictionary that `dataclasses.asdict` made of one."""
    return NeighbourRun(**{**data, "trials": [trial_of(trial) for trial in data["trials"]]})


def trial_of(data: dict[str, Any]) -> NeighbourTrial:
    """A trial from the dictionary that `dataclasses.asdict` made of one."""
    return NeighbourTrial(**{**data, "saves": saves_of(data["saves"])})


def saves_of(data: list[dict[str, Any]]) -> list[BesideSave]:
    """The saves of one trial, of which `dataclasses.asdict` made dictionaries."""
    return [BesideSave(**{**save, "loop": LoopTimes(**save["loop"])}) for save in data]


# --- figures -----------------------------------------------------------------------------------------------------

Figure = Callable[[BesideSave], float]


def mean_ratio(save: BesideSave) -> float:
    """The mean step beside the save over the undisturbed one of the same process."""
    return save.loop.mean_ms / save.loop.undisturbed_ms


def p99_ratio(save: BesideSave) -> float:
    """The same of the 99th percentile."""
    return save.loop.p99_ms / save.loop.undisturbed_p99_ms


COLUMNS: tuple[tuple[str, Figure], ...] = (
    ("mean step / undisturbed", mean_ratio),
    ("p99 step / undisturbed p99", p99_ratio),
    ("step p99, ms", lambda save: save.loop.p99_ms),
    ("step max, ms", lambda save: save.loop.max_ms),
    ("lost, s", lambda save: save.loop.lost_s),
    ("call, s", lambda save: save.call_s),
    ("durable, s", lambda save: save.durable_s),
    ("sidecar CPU, s", lambda save: save.sidecar_cpu_s),
)
RATIOS: tuple[tuple[str, Figure], ...] = (
    ("mean step / undisturbed", mean_ratio),
    ("step p99", lambda save: save.loop.p99_ms),
    ("lost", lambda save: save.loop.lost_s),
    ("durable", lambda save: save.durable_s),
)


def of_trial(trial: NeighbourTrial, figure: Figure) -> float:
    """The median over the saves of one trial."""
    return statistics.median(figure(save) for save in trial.saves)


def over_runs(trials: Sequence[NeighbourTrial], mode: str, figure: Figure) -> Spread:
    """The median and the range over the runs."""
    return spread(of_trial(trial, figure) for trial in trials if trial.mode == mode)


def ratio(trials: Sequence[NeighbourTrial], mode: str, base: str, figure: Figure) -> Spread | None:
    """`mode` over `base` within each run; None without a run of both, or where one is not above 0."""
    bases = {trial.run: of_trial(trial, figure) for trial in trials if trial.mode == base}
    pairs = [(of_trial(trial, figure), bases[trial.run]) for trial in trials if trial.mode == mode and trial.run in bases]
    if not pairs or any(own <= 0 or other <= 0 for own, other in pairs):
        return None
    return spread(own / other for own, other in pairs)


# --- the page ----------------------------------------------------------------------------------------------------


def text(run: NeighbourRun) -> str:
    """The page that benchmarks/NEIGHBOUR.md is."""
    good = [trial for trial in run.trials if not trial.error]
    measured = {trial.mode for trial in good}
    names = [mode for mode in run.modes if mode in measured]
    parts = [_opening(run), _unrest(run), _figures(good, names), _ratios(good, names), _notes(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _opening(run: NeighbourRun) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    runs = len({trial.run for trial in run.trials})
    steps = statistics.median([save.loop.undisturbed_ms for trial in run.trials for save in trial.saves] or [0.0])
    return f"""# Being a good neighbour

This page shows how much a save slows a training loop that uses every core, and how far the sidecar's settings reduce that.
`{run.command}` writes it; do not edit it by hand. [README.md](README.md) has the words and the method.

Machine: {facts}, I/O scheduler {run.scheduler}.

One rank trains with as many threads as there are cores (matrix products, {steps:.1f} ms a step undisturbed) and saves
{run.gib:g} GiB with compression `{run.compression}`, so persisting needs a core as well. {runs} run(s), ways interleaved in
shuffled order, each in fresh processes. The median, and in brackets the smallest and the largest."""


def _unrest(run: NeighbourRun) -> str:
    """A warning where the machine was not the benchmark's own: a loop on every core feels whatever else runs."""
    others = statistics.median(trial.other_cores for trial in run.trials)
    if others <= QUIET_CORES_MAX:
        return ""
    return (
        f"**The machine was not quiet**: {others:.1f} cores were busy with something else. Steps beside a save then differ\n"
        "from undisturbed ones by chance more than by the save; ratios of steps and *lost* say nothing. Take *durable* and\n"
        "*sidecar CPU* as rough figures, and run it again on a quiet machine."
    )


def _figures(trials: Sequence[NeighbourTrial], names: Sequence[str]) -> str:
    rows = [[name, *(_cell(trials, name, title, figure) for title, figure in COLUMNS)] for name in names]
    words = (
        "Steps are those from the save call until durable; in *no save* a stretch without one. *lost* is training time that one"
        "\nsave costs; *durable* counts from the call."
    )
    return "\n\n".join(["## Steps beside a save", words, table(["way", *(title for title, _ in COLUMNS)], rows)])


def _cell(trials: Sequence[NeighbourTrial], name: str, title: str, figure: Figure) -> str:
    if name == NO_SAVE.name and title in ("call, s", "durable, s", "sidecar CPU, s"):
        return "-"
    return str(over_runs(trials, name, figure))


def _ratios(trials: Sequence[NeighbourTrial], names: Sequence[str]) -> str:
    if IN_PROCESS.name not in names:
        return ""
    rows = [
        [name, *(_ratio_cell(ratio(trials, name, IN_PROCESS.name, figure)) for _, figure in RATIOS)]
        for name in names
        if name not in (NO_SAVE.name, IN_PROCESS.name)
    ]
    head = table(["way", *(title for title, _ in RATIOS)], rows)
    return "\n\n".join(["## Over the in-process writer, within each run", head])


def _ratio_cell(found: Spread | None) -> str:
    return "-" if found is None else str(found)


def _notes(run: NeighbourRun) -> str:
    failed = [f"- {trial.mode}, run {trial.run + 1} failed: {trial.error}" for trial in run.trials if trial.error]
    idle = (
        "- An I/O class has an effect only if the scheduler of the disk supports it: bfq does, mq-deadline in part, "
        "none and kyber do not."
    )
    others = spread(trial.other_cores for trial in run.trials)
    busy = f"- Other work on the machine during the trials: {others} of {run.machine.get('cores', '?')} cores."
    return "\n".join(["## Notes", "", busy, idle, *failed])
