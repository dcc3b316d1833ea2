"""The goals, and whether what was measured meets them. Pure. The terminal and RESULTS.md take them from here.

A goal is computed from figures by name (`figures.py`). One whose figures are missing was not measured; its line then names the
command that measures it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import report
from benchmarks.figures import MEMCPY, OVERHEAD, Figures
from benchmarks.report import Metric, Spread

Of = Callable[[Figures], list[float]]
"""The values of a goal, one for each run that has all it needs; none if it was not measured."""

ALL, SOME = "make bench", "python benchmarks/{}.py --figures OUT"
"""The command for what `compare.py` runs, and that for one script."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal: `of` must be at most `limit`, or at least that with `at_least`. `unit` follows every number."""

    name: str
    words: str
    of: Of
    limit: float
    unit: str = ""
    at_least: bool = False
    command: str = ALL

    @property
    def limit_words(self) -> str:
        """The limit in words."""
        return f"at {'least' if self.at_least else 'most'} {number(self.limit)}{self.unit}"


@dataclass(frozen=True)
class Verdict:
    """A goal, and what was measured: None if nothing was."""

    goal: Goal
    measured: Spread | None

    @property
    def met(self) -> bool | None:
        """None if it was not measured."""
        if self.measured is None:
            return None
        value, limit = self.measured.median, self.goal.limit
        return value >= limit if self.goal.at_least else value <= limit

    @property
    def words(self) -> str:
        """Met, or missed by how much, or not measured."""
        if self.measured is None or self.met is None:
            return f"not measured: {self.goal.command}"
        value, limit = self.measured.median, self.goal.limit
        if self.met:
            return "met"
        if self.goal.at_least:
            return f"missed: {(limit - value) / limit:.0%} too little"
        return f"missed: {value / limit:.2g} times the limit" if value >= 2 * limit else f"missed by {value / limit - 1:.1%}"

    @property
    def figure(self) -> str:
        """What was measured."""
        return "-" if self.measured is None else f"{self.measured}{self.goal.unit}"


# --- how a goal is computed ----------------------------------------------------------------------------------


def value(name: str, scale: float = 1.0) -> Of:
    """The figure itself, times `scale`."""
    return lambda figures: [one * scale for one in figures.get(name, {}).values()]


def ratio(own: str, other: str, scale: float = 1.0) -> Of:
    """`own` over `scale` times `other`, within each run."""

    def of(figures: Figures) -> list[float]:
        others = figures.get(other, {})
        return [one / (others[run] * scale) for run, one in figures.get(own, {}).items() if others.get(run, 0.0) > 0]

    return of


def over_limit(own: str, limit: str, gib: str) -> Of:
    """`own` over the time that the machine's `limit` allows for the state, whose GiB the figure `gib` has."""

    def of(figures: Figures) -> list[float]:
        size = next(iter(figures.get(gib, {}).values()), 0.0)
        return ratio(own, limit, size)(figures) if size else []

    return of


def over_best(own: str, metric: Metric, ranks: int = 1) -> Of:
    """`own` over the peer with the smallest median, within each run."""

    def of(figures: Figures) -> list[float]:
        peers = [peer for peer in report.PEERS if not (metric.of_steps and peer in report.BLOCKING)]
        names = [name for peer in peers if figures.get(name := f"{ranks}/{peer}/{metric.title}")]
        if not names:
            return []
        best = min(names, key=lambda name: statistics.median(figures[name].values()))
        return ratio(f"{ranks}/{own}/{metric.title}", best)(figures)

    return of


def over_fastest(own: str, column: str, peers: Sequence[str]) -> Of:
    """`own` of `objects.py` over the peer with the largest median, within each run."""

    def of(figures: Figures) -> list[float]:
        names = [name for peer in peers if figures.get(name := f"{FROM_OBJECTS}{peer}/{column}")]
        if not names:
            return []
        best = max(names, key=lambda name: statistics.median(figures[name].values()))
        return ratio(f"{FROM_OBJECTS}{own}/{column}", best)(figures)

    return of


def largest(*parts: Of) -> Of:
    """The largest median of `parts`; nothing unless all were measured."""

    def of(figures: Figures) -> list[float]:
        found = [part(figures) for part in parts]
        return [max(statistics.median(values) for values in found)] if all(found) else []

    return of


def smallest(*parts: Of) -> Of:
    """The smallest median of `parts`; nothing unless all were measured."""

    def of(figures: Figures) -> list[float]:
        found = [part(figures) for part in parts]
        return [min(statistics.median(values) for values in found)] if all(found) else []

    return of


# --- the goals -----------------------------------------------------------------------------------------------

OURS, SIDECAR = "checkpointd", "checkpointd-sidecar"
GIB, OF_BIG, BIG_GIB = "gib", "big/", "big/gib"
TAGS, WIDE_TAGS, VOTES, LOADING = 10_000, 50, 16_384, 800
"""Sizes at which goals are set: checkpoints at a root, those of many ranks, votes, and ranks that have saved."""
MIB = 1 / (1 << 20)


def _best_of_both(metric: Metric) -> Of:
    return largest(over_best(OURS, metric), over_best(SIDECAR, metric))


def _history(operation: str, count: str = "seconds", size: int = TAGS) -> Of:
    return value(f"history/{operation}/{size}/{count}")


def _big(system: str, metric: Metric) -> str:
    return f"{OF_BIG}1/{system}/{metric.title}"


def _resharded(count: str, scale: float) -> Of:
    """The larger cost of loading on half and on twice as many ranks as saved."""
    parts = ("half", "twice")
    return largest(*(value(f"load/whole load on {part} as many ranks/{LOADING}/{count}", scale) for part in parts))


def _shards(ranks: int) -> Of:
    return ratio(f"fsdp2/{ranks}/checkpointd/load, dropped", f"fsdp2/{ranks}/dcp-thread/load, dropped")


def _zero(stage: int) -> Of:
    return ratio(f"deepspeed/{stage}/checkpointd, DeepSpeed's files/load", f"deepspeed/{stage}/stock/load")


_X = " x"
LOAD_GOALS = (
    Goal(
        name="load-cached-dcp",
        words="load, cached, over dcp.load",
        limit=0.5,
        unit=_X,
        of=ratio(f"1/{OURS}/{report.LOAD_CACHED.title}", f"1/dcp-thread/{report.LOAD_CACHED.title}"),
    ),
    Goal(
        name="load-cached-memcpy",
        words="load, cached, over memcpy",
        limit=2.0,
        unit=_X,
        of=over_limit(f"1/{OURS}/{report.LOAD_CACHED.title}", MEMCPY, GIB),
    ),
    Goal(
        name="load-first",
        words="first load of a process over later ones, cached",
        limit=1.3,
        unit=_X,
        of=ratio(f"1/{OURS}/{report.LOAD_FIRST.title}", f"1/{OURS}/{report.LOAD_CACHED.title}"),
    ),
    Goal(
        name="load-dropped-disk",
        words="load, cache dropped, over a plain read of the same files just after it",
        limit=1.2,
        unit=_X,
        of=ratio(f"1/{OURS}/{report.LOAD_COLD.title}", f"1/{OURS}/{report.PLAIN_READ.title}"),
    ),
    Goal(
        name="load-dropped-peers",
        words="load, cache dropped, over the best peer",
        limit=1.0,
        unit=_X,
        of=over_best(OURS, report.LOAD_COLD),
    ),
    Goal(
        name="load-fsdp2",
        words="FSDP2 load of 2 ranks' state on 2, 1 and 3 ranks over dcp.load, the worst",
        limit=0.6,
        unit=_X,
        of=largest(_shards(2), _shards(1), _shards(3)),
        command=SOME.format("sharded"),
    ),
    Goal(
        name="load-deepspeed",
        words="DeepSpeed load over stock, ZeRO 1 and 3, the worse",
        limit=1.2,
        unit=_X,
        of=largest(_zero(1), _zero(3)),
        command=SOME.format("zero"),
    ),
    Goal(
        name="load-big-dropped",
        words="4 GiB, first load of a process, cache dropped, over a plain read of the same files just after it",
        limit=1.2,
        unit=_X,
        of=ratio(_big(OURS, report.LOAD_FIRST_COLD), _big(OURS, report.FIRST_PLAIN_READ)),
    ),
    Goal(
        name="load-big-cached",
        words="4 GiB, load, cached, over memcpy",
        limit=2.0,
        unit=_X,
        of=over_limit(_big(OURS, report.LOAD_CACHED), f"{OF_BIG}{MEMCPY}", BIG_GIB),
    ),
    Goal(
        name="load-sidecar-memory",
        words="load from the sidecar's memory over memcpy",
        limit=1.3,
        unit=_X,
        of=ratio("recovery/memory/load", "recovery/memory/memcpy"),
        command=SOME.format("recovery"),
    ),
    Goal(
        name="load-memory",
        words="memory beside the tensors and the snapshot buffer while loading",
        limit=128.0,
        unit=" MiB",
        of=value(f"1/{OURS}/{report.LOAD_PRIVATE.title}"),
    ),
)
SAVE_GOALS = (
    Goal(
        name="first-save-prepared",
        words="4 GiB, eager: first call after prepare() over a warm one",
        limit=2.0,
        unit=_X,
        of=ratio(_big("checkpointd-prepared", report.COLD_CALL), _big("checkpointd-prepared", report.CALL)),
    ),
    Goal(
        name="first-save",
        words="4 GiB, eager: first call without prepare() over torch.save",
        limit=1.0,
        unit=_X,
        of=ratio(_big("checkpointd-eager", report.COLD_CALL), _big("torch.save", report.COLD_CALL)),
    ),
    Goal(
        name="call-700",
        words="700 tensors with an optimizer: the call beyond the copy that must be made at once",
        limit=1.0,
        unit=" ms",
        of=value("calls/700/beyond the copy, ms"),
        command=SOME.format("calls"),
    ),
    Goal(
        name="call-10000-eager",
        words="10,000 small tensors, eager: the call over a loop of memcpy",
        limit=1.15,
        unit=_X,
        of=value("calls/10000/eager over memcpy"),
        command=SOME.format("calls"),
    ),
    Goal(
        name="call-10000-lazy",
        words="10,000 small tensors, lazily: the call",
        limit=10.0,
        unit=" ms",
        of=value("calls/10000/lazy, ms"),
        command=SOME.format("calls"),
    ),
    *(
        Goal(
            name=f"tensors-100000-{part}",
            words=f"100,000 tensors: {part}",
            limit=limit,
            unit=" s",
            of=value(f"calls/100000/{part}, s"),
            command=SOME.format("calls"),
        )
        for part, limit in (("call", 0.1), ("commit", 2.0), ("load", 3.0))
    ),
    *(
        Goal(
            name=f"{metric.title}-peers",
            words=f"{metric.title} over the best peer, in process and with a sidecar, the worse",
            limit=1.0,
            unit=_X,
            of=_best_of_both(metric),
        )
        for metric in (report.SAFE, report.DURABLE)
    ),
    Goal(
        name="lost-in-process",
        words="lost to training over the best peer, in process",
        limit=0.5,
        unit=_X,
        of=over_best(OURS, report.LOST),
    ),
    Goal(
        name="lost-sidecar",
        words="lost to training over the best peer, with a sidecar",
        limit=1 / 3,
        unit=_X,
        of=over_best(SIDECAR, report.LOST),
    ),
    Goal(
        name="overhead-governed",
        words="mean step while a save with max_overhead=0.03 runs over undisturbed, in process and with a sidecar, the worse",
        limit=1.03,
        unit=_X,
        of=largest(*(value(f"{OVERHEAD}{system}, governed/step over undisturbed") for system in (OURS, SIDECAR))),
        command=SOME.format("overhead"),
    ),
    Goal(
        name="step-p99",
        words="step P99 while a save runs over the best peer, in process and with a sidecar, the worse",
        limit=1.0,
        unit=_X,
        of=_best_of_both(report.P99),
    ),
)
HISTORY_GOALS = (
    *(
        Goal(name=f"history-{name}", words=f"10,000 tags: {name}", limit=limit, unit=" s", of=_history(name))
        for name, limit in (("list", 0.3), ("choose at load", 0.1), ("start", 0.5), ("one removal", 0.1))
    ),
    Goal(name="history-start-fsyncs", words="10,000 tags: fsyncs of a start", limit=100.0, of=_history("start", "fsyncs")),
    Goal(
        name="history-monitor",
        words="10,000 tags: the first look of the root monitor, which must end within its 30 s",
        limit=30.0,
        unit=" s",
        of=_history("monitor, first look"),
    ),
    Goal(
        name="wide-list",
        words="50 tags x 1,000 ranks: list",
        limit=0.1,
        unit=" s",
        of=value(f"wide/list/{WIDE_TAGS}/seconds"),
    ),
    Goal(
        name="wide-removal",
        words="50 tags x 1,000 ranks: one removal",
        limit=0.3,
        unit=" s",
        of=value(f"wide/one removal/{WIDE_TAGS}/seconds"),
    ),
    Goal(
        name="retention-pending",
        words="saves back to back: attempts that wait for retention, the most",
        limit=1.0,
        of=value("history/pending"),
    ),
)
RANK_GOALS = (
    Goal(
        name="dedup-look",
        words="stats of dedup's look at the checkpoint before: exponent by the ranks",
        limit=0.1,
        of=value("dedup/look at the checkpoint before/exponent/stats"),
    ),
    Goal(
        name="coordinator-fsyncs",
        words="coordinator's fsyncs: exponent by the ranks, first and later commits, the worse",
        limit=0.1,
        of=largest(*(value(f"coordinator/{name}/exponent/fsyncs") for name in ("first commit", "later commit"))),
    ),
    Goal(
        name="coordinator-cpu",
        words="coordinator of 16,384 ranks, processor time of a commit, the worse",
        limit=3.0,
        unit=" s",
        of=largest(*(value(f"coordinator/{name}/{VOTES}/cpu_s") for name in ("first commit", "later commit"))),
    ),
    Goal(
        name="coordinator-linear",
        words="coordinator's processor time: exponent by the ranks, the worse",
        limit=1.1,
        of=largest(*(value(f"coordinator/{name}/exponent/cpu_s") for name in ("first commit", "later commit"))),
    ),
    Goal(
        name="sharded-load-time",
        words="800 ranks x 300 tensors: a rank loads its part, a few KiB",
        limit=50.0,
        unit=" ms",
        of=value(f"load/whole load/{LOADING}/seconds", 1e3),
    ),
    Goal(
        name="sharded-load-bytes",
        words="800 ranks x 300 tensors: bytes that a rank reads, and memory that this takes, the larger",
        limit=10.0,
        unit=" MiB",
        of=largest(*(value(f"load/whole load/{LOADING}/{count}", MIB) for count in ("read_bytes", "peak_bytes"))),
    ),
    Goal(
        name="resharded-load-time",
        words="800 ranks x 300 tensors: processor time of a rank that loads its part on 400 or 1,600 ranks, the longer",
        limit=50.0,
        unit=" ms",
        of=_resharded("cpu_s", 1e3),
    ),
    Goal(
        name="resharded-load-bytes",
        words="800 ranks x 300 tensors: bytes that a rank of 400 or 1,600 reads",
        limit=10.0,
        unit=" MiB",
        of=_resharded("read_bytes", MIB),
    ),
)
SAME = 0.995
"""Ratios that differ by no more than this count as the same."""
CODEC_GOALS = (
    *(
        Goal(
            name=f"codec-{dtype}-ratio",
            words=f"trained {dtype} weights: raw over stored",
            limit=limit,
            at_least=True,
            unit=_X,
            of=value(f"codec/{dtype}/ratio"),
            command=SOME.format("codec"),
        )
        for dtype, limit in (("bf16", 1.50), ("fp32", 1.19))
    ),
    Goal(
        name="codec-speed",
        words="encoding trained weights on one core, bf16 and fp32, the slower",
        limit=1.0,
        at_least=True,
        unit=" GB/s",
        of=smallest(*(value(f"codec/{dtype}/GB/s") for dtype in ("bf16", "fp32"))),
        command=SOME.format("codec"),
    ),
    *(
        Goal(
            name=f"codec-{peer.replace(' ', '-')}-{kind}",
            words=f"{kind} of trained weights over {peer}'s, bf16 and fp32, the smaller",
            limit=SAME if kind == "ratio" else 1.0,
            at_least=True,
            unit=_X,
            of=smallest(*(ratio(f"codec/{dtype}/{name}", f"codec/{dtype}/{peer} {name}") for dtype in ("bf16", "fp32"))),
            command=SOME.format("codec"),
        )
        for peer in ("zstd 1", "zstd 3", "zipnn")
        for kind, name in (("ratio", "ratio"), ("speed", "GB/s"))
    ),
    Goal(
        name="codec-delta",
        words="delta of bf16 weights after 10 steps at a learning rate of 3e-4: stored over raw",
        limit=35.0,
        unit=" %",
        of=value("codec/bf16/delta", 100.0),
        command=SOME.format("codec"),
    ),
)
FROM_OBJECTS, LIMIT = "objects/", "obstore"
"""How figures of `objects.py` begin, and the system that is the limit of the others."""
OBJECT_PEERS = ("s3torchconnector", "s3torchconnector-async", "s3fs")


def _in_bucket(own: str, column: str) -> Of:
    return ratio(f"{FROM_OBJECTS}{own}/{column}", f"{FROM_OBJECTS}{LIMIT}/{column}")


OBJECT_GOALS = tuple(
    goal
    for phase in ("save", "load")
    for goal in (
        Goal(
            name=f"objects-{phase}-limit",
            words=f"{phase} in a bucket, bytes per second over obstore alone",
            limit=0.9,
            at_least=True,
            unit=_X,
            of=smallest(*(_in_bucket(system, f"{phase} MiB/s") for system in (OURS, SIDECAR))),
            command=SOME.format("objects"),
        ),
        Goal(
            name=f"objects-{phase}-peers",
            words=f"{phase} in a bucket, bytes per second over the best peer",
            limit=1.5,
            at_least=True,
            unit=_X,
            of=smallest(*(over_fastest(system, f"{phase} MiB/s", OBJECT_PEERS) for system in (OURS, SIDECAR))),
            command=SOME.format("objects"),
        ),
        Goal(
            name=f"objects-{phase}-cpu",
            words=f"{phase} in a bucket, processor time per GiB",
            limit=1.2,
            unit=" CPU s/GiB",
            of=largest(*(value(f"{FROM_OBJECTS}{system}/{phase} CPU s/GiB") for system in (OURS, SIDECAR))),
            command=SOME.format("objects"),
        ),
    )
)
GOALS: tuple[Goal, ...] = (*LOAD_GOALS, *SAVE_GOALS, *HISTORY_GOALS, *RANK_GOALS, *CODEC_GOALS, *OBJECT_GOALS)


# --- verdicts ------------------------------------------------------------------------------------------------


def verdicts(figures: Figures, goals: Iterable[Goal] = GOALS) -> list[Verdict]:
    """A verdict for every goal."""
    found = [(goal, goal.of(figures)) for goal in goals]
    return [Verdict(goal, report.spread(values) if values else None) for goal, values in found]


def lines(found: Sequence[Verdict]) -> list[str]:
    """A line for each verdict, and their sum."""
    width = max(len(one.goal.name) for one in found)
    told = [f"{one.goal.name:<{width}}  {one.figure}, goal {one.goal.limit_words}: {one.words}" for one in found]
    return [*told, summary(found)]


def table(found: Sequence[Verdict]) -> str:
    """The verdicts as the table of RESULTS.md."""
    rows = [
        [one.goal.name, one.goal.words, one.figure, one.goal.limit_words, f"**{one.words}**" if one.met is False else one.words]
        for one in found
    ]
    return report.table(["goal", "what", "measured", "limit", "verdict"], rows, left=2)


def summary(found: Sequence[Verdict]) -> str:
    """How many goals were met."""
    met, missed = sum(one.met is True for one in found), sum(one.met is False for one in found)
    return f"{met} of {len(found)} goals met, {missed} missed, {len(found) - met - missed} not measured"


def number(limit: float) -> str:
    """A limit as people write it."""
    return f"{limit:.3g}"
