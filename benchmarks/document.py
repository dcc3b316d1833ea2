"""A whole run of the benchmark as JSON, and as the page that benchmarks/RESULTS.md is."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks import figures, goals, report
from benchmarks.costs import Cost
from benchmarks.figures import OVERHEAD, Figures
from benchmarks.limits import Limits
from benchmarks.measures import Trial, trial
from benchmarks.report import Results


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that one run of the benchmark measured."""

    command: str
    machine: dict[str, str]
    gib: float
    gate_s: float
    code: str = ""
    """The digest of the code that was measured."""
    limits: list[Limits] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    big_gib: float = 0.0
    big: list[Trial] = field(default_factory=list)
    """Trials with a state of `big_gib` GiB: the first save and the first load of a process."""
    big_limits: list[Limits] = field(default_factory=list)
    """The limits at that size."""
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    """What `history.py` and `ranks.py` measured, by the part of the page."""
    others: dict[str, dict[int, float]] = field(default_factory=dict)
    """The figures of other scripts."""
    parts: list[str] = field(default_factory=list)
    """The scripts that have ended."""


def write(run: Run, path: Path) -> None:
    """Keep a run as JSON; `path` always holds a whole one."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(asdict(run), indent=1) + "\n")
    beside.replace(path)


def read(path: Path) -> Run:
    """A run that `write` kept."""
    data: dict[str, Any] = json.loads(path.read_text())
    data["limits"] = [Limits(**limits) for limits in data["limits"]]
    data["big_limits"] = [Limits(**limits) for limits in data.get("big_limits", ())]
    data["trials"] = [trial(one) for one in data["trials"]]
    data["big"] = [trial(one) for one in data.get("big", ())]
    data["costs"] = costs_of(data.get("costs", {}))
    data["others"] = {name: {int(run): value for run, value in one.items()} for name, one in data.get("others", {}).items()}
    return Run(**data)


def costs_of(data: Mapping[str, Any]) -> dict[str, list[Cost]]:
    """The lists of costs in what `history.py` or `ranks.py` wrote with --json."""
    return {part: [Cost(**one) for one in found] for part, found in data.items() if isinstance(found, list)}


def figures_of(run: Run) -> Figures:
    """All that was measured, by name and run."""
    sizes = {goals.GIB: {0: run.gib}, goals.BIG_GIB: {0: run.big_gib}}
    parts = [figures.of_costs(part, found) for part, found in run.costs.items()]
    trials = [figures.of_trials(run.trials), figures.of_trials(run.big, goals.OF_BIG)]
    limits = [figures.of_limits(run.limits), figures.of_limits(run.big_limits, goals.OF_BIG)]
    return figures.joined([sizes, *limits, *trials, *parts, run.others])


def machine(directory: Path) -> dict[str, str]:
    """What the figures depend on, without naming a particular machine."""
    import torch

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / report.GIB
    return {
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "GPU": "yes, not used" if torch.cuda.is_available() else "none",
        "file system": _file_system(directory),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _file_system(directory: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    resolved = directory.resolve()
    around = [(point, kind) for point, kind in mounts if resolved.is_relative_to(point)]
    return max(around, key=lambda mount: len(mount[0]))[1]


def flaws(run: Run) -> list[str]:
    """One line for each trial that failed or gave back other bytes than it saved."""
    lines = [
        f"{one.system}, {one.ranks} rank(s), run {one.run + 1} failed: {one.error}"
        for one in (*run.trials, *run.big)
        if one.error
    ]
    for results in (*_by_ranks(run), report.results(run.big, 1)):
        for system in results.systems:
            lines += _wrong_bytes(results, system)
    return lines


def _wrong_bytes(results: Results, system: str) -> list[str]:
    paths = report.wrong(results, system)
    return [f"{system}, {results.ranks} rank(s): wrong bytes in {', '.join(paths[:3])} ..."] if paths else []


def _by_ranks(run: Run) -> list[Results]:
    return [report.results(run.trials, ranks) for ranks in sorted({one.ranks for one in run.trials})]


def text(run: Run) -> str:
    """The page."""
    all_results = _by_ranks(run)
    tables = [_tables(results) for results in all_results]
    ratios = ["## Ratios", _RATIO_WORDS, report.ratio_table(all_results)] if all_results else []
    parts = [
        _opening(run),
        *_goals(run),
        *_pictures(run),
        _limits(run),
        *tables,
        *_big(run),
        *ratios,
        *_overhead(run),
        _notes(run),
    ]
    return "\n\n".join(parts) + "\n"


def _opening(run: Run) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in run.machine.items())
    first = next((one.reports[0] for one in (*run.trials, *run.big) if one.reports), None)
    tensors = first.tensors if first else 0
    runs = len({one.run for one in (*run.trials, *run.big)})
    return f"""# Results

This page compares checkpointd with `torch.save`, PyTorch's DCP and torch-checkpointing: saving, training meanwhile, and
loading. `{run.command}` writes it; do not edit it by hand. [README.md](README.md) has the words and the method.

Machine: {facts}.

State: {run.gib:g} GiB over all ranks in {tensors} tensors: bf16 weights, fp32 master weights, `exp_avg`,
`exp_avg_sq` and AdamW's step, moved on by a real optimizer step between any two saves. {runs} run(s), systems
interleaved in shuffled order, each in fresh processes. Seconds, unless a heading says otherwise: the median, and
in brackets the smallest and the largest."""


def _goals(run: Run) -> list[str]:
    found = goals.verdicts(figures_of(run))
    words = (
        "Each goal is computed within every run, as a ratio where it compares; the table shows the median, and in brackets the"
        "\nsmallest and the largest. *x*: times what the goal compares with."
    )
    return ["## Goals", words, goals.table(found), f"{goals.summary(found)}."]


PARTS = {
    "tags": "history",
    "wide": "wide",
    "coordinator": "coordinator",
    "load": "load",
    "dedup": "dedup",
}
"""The lists in what `history.py` and `ranks.py` write, and how the names of their figures begin."""
PAGES = {
    "HISTORY": ("history", "history.svg", "seconds of one operation against the number of checkpoints at a root"),
    "RANKS": ("coordinator", "ranks.svg", "processor seconds of one rank against the number of ranks"),
}
"""The pages of these scripts: a part that they measure, their picture, and what it shows."""


def _pictures(run: Run) -> list[str]:
    shown = ["![time that one save takes from training, time until it is durable, and time of a load](speed.svg)"]
    for page, (part, picture, words) in PAGES.items():
        if part in run.costs:
            shown.append(f"![{words}]({picture})\n\n[{page}]({page}.md) has the measurements of this picture.")
    return shown


def _big(run: Run) -> list[str]:
    results = report.results(run.big, 1)
    if not results.trials:
        return []
    exact = report.exactness(results)
    return [
        f"## {run.big_gib:g} GiB on one rank",
        "The first save and the first load of a process.",
        report.metric_table(results, (report.COLD_CALL, report.CALL, *report.LOADS), exact, "bit-exact"),
    ]


def _overhead(run: Run) -> list[str]:
    """What `overhead.py` measured: a column for each way to save."""
    found = {name.removeprefix(OVERHEAD): values for name, values in run.others.items() if name.startswith(OVERHEAD)}
    ways = sorted({name.partition("/")[0] for name in found})
    if not ways:
        return []
    rows = []
    for measured in dict.fromkeys(name.partition("/")[2] for name in found):
        of_ways = [found.get(f"{way}/{measured}", {}) for way in ways]
        rows.append([measured, *(str(report.spread(values.values())) if values else "-" for values in of_ways)])
    return ["## What a save costs training while it runs", _OVERHEAD_WORDS, report.table(["one save", *ways], rows)]


_OVERHEAD_WORDS = """Steps beside a save that has time, with `max_overhead=0.03` (*governed*) and without.
The rows from *waits for the lock* on are of a save beside a loop of pure Python: how long that loop waited for the
interpreter lock, and for each kind of our threads the processor time in Python, where it holds the lock, and how often
it gave up its core by itself."""


def _limits(run: Run) -> str:
    sizes = {run.gib: run.limits, run.big_gib: run.big_limits}
    measured = {gib: limits for gib, limits in sizes.items() if limits}

    def cell(limits: list[Limits], name: str) -> str:
        return str(report.spread(getattr(one, name) for one in limits))

    names = [field.name for field in fields(Limits)]
    rows = [[name.replace("_", " "), *(cell(limits, name) for limits in measured.values())] for name in names]
    heads = ["one thread", *(f"{gib:g} GiB, s/GiB" for gib in measured)]
    return "## Limits of the machine, measured in the same runs\n\n" + report.table(heads, rows if measured else [])


def _tables(results: Results) -> str:
    exact = report.exactness(results)
    return "\n\n".join(
        [
            f"## {results.ranks} rank{'s' if results.ranks > 1 else ''}",
            "A save while nothing else runs. *call* blocks; *safe* until tensors may change; *done* when the system"
            "\nsays so; *durable* when a power cut loses nothing, including the fsync that the last column names.",
            report.metric_table(results, report.SAVES, _synced(results), "our fsync"),
            "The first save of a fresh process, once what the system starts in the background has come to rest.",
            report.metric_table(results, report.COLD, _synced(results), "our fsync"),
            "Training while a warm save runs: what it lost, and the steps of that time in milliseconds. The last two"
            "\nfigures are of a loop of pure Python, which holds the interpreter lock all the time.",
            report.metric_table(results, report.TRAINING, exact, "bit-exact"),
            "Loading the last save into the existing tensors, in fresh processes: later loads, then the first one of a process."
            "\nThe last column of memory leaves out what processes share, such as the snapshot buffer.",
            report.metric_table(results, report.LOADS, exact, "bit-exact"),
        ]
    )


def _synced(results: Results) -> dict[str, str]:
    from benchmarks.systems import SYSTEMS

    return {system: SYSTEMS[system].ours_to_sync for system in results.systems}


_RATIO_WORDS = """Each system over the best peer (**1**, the smallest median) of that column: below 1 is better than every peer.
Ratios are taken within one run; `-` where a figure is not above zero, or where no training step ran beside a blocking save."""


def _notes(run: Run) -> str:
    trials = [*run.trials, *run.big]
    others = report.spread(one.other_cores for one in trials) if trials else "unknown"
    resident = max((r.load.resident for one in trials for r in one.reports), default=0.0)
    lines = [
        "*durable* of torch.save and torch-checkpointing includes an fsync of files and directories by the benchmark, since"
        " they do not sync; that of DCP includes an fsync of the directory. checkpointd needs none, and its *done* is the"
        " commit that all ranks agree on; torch.save has no commit across ranks at all.",
        "With several ranks, each saves its own plain tensors. DCP gets them under other names on each rank, since it"
        " takes tensors of one name for replicas and would keep only one rank's. As DTensors sharded by rows, they took"
        " DCP longer to save and less time to load.",
        "torch-checkpointing runs with direct I/O switched off: by default its first save fails on this file"
        " system with EINVAL, because its O_DIRECT writes are not aligned.",
        "*cold* measures each system with its defaults. `prewarm_staging` was called before for"
        " torch-checkpointing-prewarmed, and checkpointd was asked for the newest checkpoint, as a starting job does.",
        "dcp-thread and dcp-process are async_save with its defaults; -reused keeps one stager with its buffers, and"
        " -background lets that stager copy in a thread. checkpointd chooses compression by itself"
        ' (`compression="auto"`); checkpointd-raw stores every byte as it is; checkpointd-sidecar hands its snapshots to'
        " one `checkpointd serve` beside the ranks, whose CPU and memory count as rank 0's.",
        f"The training loop holds an optimizer step every {run.gate_s:g} s, which waits until the state is safe; then"
        " every tensor is overwritten, so that bit-exact also means not torn.",
        "A *plain read* reads the same files on one thread just after the load, with the page cache dropped again. Where it"
        " differs from one system to the next, the disk gave more or less at that moment, and so do loads.",
        "Peak memory counts private pages of all ranks and their children, and shared pages once; page cache is not"
        " in it. checkpointd's load peak holds its snapshot buffer, which a load prepares for the next save. The sidecar's"
        " daemon is a new one when its trainers load, so they load from the store.",
        f"Other work on the machine during the trials, kernel threads included: {others} cores. Of dropped files at"
        f" most {resident:.1%} stayed in the page cache.",
        *flaws(run),
    ]
    return "## Notes\n\n" + "\n".join(f"- {line}" for line in lines)
