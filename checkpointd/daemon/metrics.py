"""The daemon's state for Prometheus: a registry of its own, filled from the hub when it is scraped.

Invariants
  K1  Names end in their base unit, counters in `_total`; every one has its help.
  K2  Series are bounded: by the ranks and roots that the hub keeps, and by words of a fixed list. No tag and no path of a
      store's object is a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from checkpointd.daemon.histogram import Durations
from checkpointd.daemon.hub import Hub, RankRecord
from checkpointd.daemon.standing import standing
from checkpointd.daemon.status import DaemonStatus, RootStatus
from checkpointd.daemon.wire import PROTOCOLS

PHASES = ("staging", "staged", "persisting", "prepared", "failed", "skipped")
"""Those that a save in flight can be in; the last two while its no vote is being put."""


class HubCollector(Collector):
    """All metrics of one daemon, made at each scrape from memory alone."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        found = standing(self._hub)
        yield from _daemon(found)
        yield from _memory(found)
        yield from _roots(found)
        yield _commits({root.root: self._coordinator(root.root) for root in found.roots})
        yield from _ranks(list(self._hub))

    def _coordinator(self, root: str) -> Durations | None:
        return next((record.commits for record in self._hub.ranks_at(root) if record.rank == 0), None)


def registry(hub: Hub) -> CollectorRegistry:
    """The daemon's metrics, with CPU, memory and descriptors of its process under their usual names."""
    made = CollectorRegistry(auto_describe=False)
    made.register(HubCollector(hub))
    ProcessCollector(registry=made)
    return made


FORMS = {"plain": CONTENT_TYPE_PLAIN_0_0_4, "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
"""The forms in which metrics are given, and their content types."""


def form(accept: str) -> str:
    """The one of FORMS for a scraper with this Accept header."""
    return "openmetrics" if "application/openmetrics-text" in accept else "plain"


def exposition(metrics: CollectorRegistry, form: str) -> bytes:
    """The metrics in one of FORMS."""
    if form == "plain":
        return generate_latest(metrics)
    made: bytes = openmetrics.generate_latest(metrics, version="1.0.0")  # type: ignore[no-untyped-call]  # it has no types
    return made


# --- of the daemon -------------------------------------------------------------------------------------------


def _daemon(found: DaemonStatus) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "checkpointd_build",
        "The release of this daemon, and the newest protocol that it speaks on its socket.",
        {"version": found.release, "protocol": str(PROTOCOLS[1])},
    )
    yield _gauge("checkpointd_start_time_seconds", "When the daemon began, in seconds since 1970.", found.started_at)
    yield _gauge("checkpointd_leaving", "1 while the daemon finishes what is in flight after SIGTERM, else 0.", found.leaving)
    yield _gauge("checkpointd_clients", "Connections to the socket: trainers, and who asks for status.", found.clients)
    yield _gauge("checkpointd_clients_max", "Connections that the socket takes at once.", found.clients_max)
    refused = "Connections and requests that were refused: wrong user, wrong root, no room, or not the protocol."
    yield _counter("checkpointd_refused", refused, [((), found.refused)])
    if found.bandwidth_bps is not None:
        yield _gauge(
            "checkpointd_bandwidth_limit_bytes_per_second",
            "Bytes per second that persisting may write, over all clients.",
            found.bandwidth_bps,
        )


def _memory(found: DaemonStatus) -> Iterator[Metric]:
    memory = found.memory
    yield _gauge("checkpointd_memory_mapped_bytes", "Snapshot memory of trainers that is mapped here.", memory.mapped)
    yield _gauge("checkpointd_memory_mapped_max_bytes", "Snapshot memory that may be mapped.", memory.mapped_max)
    yield _gauge("checkpointd_memory_held_bytes", "Snapshots that are held for trainers that start again.", memory.held)
    yield _gauge("checkpointd_memory_held_max_bytes", "Snapshots that may be held.", memory.held_max)


# --- of each root --------------------------------------------------------------------------------------------


def _roots(found: DaemonStatus) -> Iterator[Metric]:
    yield _phases(found.roots)

    def by_root(name: str, text: str, value: Callable[[RootStatus], float | None]) -> Metric:
        rows = [((root.root,), value(root)) for root in found.roots]
        return _gauges(name, text, ("root",), [(labels, number) for labels, number in rows if number is not None])

    yield by_root(
        "checkpointd_votes_missing",
        "Votes that the saves in flight still wait for; known on the node of rank 0 alone.",
        _votes_missing,
    )
    yield by_root(
        "checkpointd_oldest_in_flight_seconds",
        "Age of the oldest save in flight; 0 where there is none.",
        lambda root: max((found.now - save.began_at for save in root.in_flight), default=0.0),
    )
    yield by_root(
        "checkpointd_newest_commit_age_seconds",
        "Time since the newest checkpoint was committed, when the root was last looked at.",
        lambda root: None if root.newest_committed_at is None else max(0.0, found.now - root.newest_committed_at),
    )
    yield by_root("checkpointd_newest_step", "Training step of the newest checkpoint.", lambda root: root.newest_step)
    yield by_root(
        "checkpointd_newest_read_back_step",
        "Training step of the newest checkpoint that was read back whole; none where that is not among the newest at the root.",
        lambda root: next((c.step for c in root.checkpoints if c.read_back == "whole"), None),
    )
    yield by_root(
        "checkpointd_checkpoints_damaged",
        "Checkpoints among the newest at the root that were read and are damaged.",
        lambda root: sum(c.read_back == "damaged" for c in root.checkpoints),
    )
    yield by_root("checkpointd_ranks", "Ranks of this node that were ever here.", lambda root: len(root.ranks))
    yield by_root(
        "checkpointd_ranks_connected",
        "Ranks of this node whose trainer is connected.",
        lambda root: sum(rank.connected for rank in root.ranks),
    )
    yield by_root("checkpointd_held_snapshots", "Snapshots of this root held in memory.", lambda root: len(root.held))
    yield by_root(
        "checkpointd_root_unreadable", "1 where the root cannot be looked at, else 0.", lambda root: root.problem is not None
    )


def _phases(roots: Iterable[RootStatus]) -> Metric:
    family = GaugeMetricFamily(
        "checkpointd_in_flight", "Saves of ranks of this node that have not ended, by phase.", labels=("root", "phase")
    )
    for root in roots:
        for phase in PHASES:
            family.add_metric((root.root, phase), sum(save.phase == phase for save in root.in_flight))
    return family


def _votes_missing(root: RootStatus) -> float | None:
    if not any(rank.rank == 0 for rank in root.ranks):
        return None
    return sum(len(save.votes_missing or ()) for save in root.in_flight)


def _commits(by_root: dict[str, Durations | None]) -> Metric:
    family = HistogramMetricFamily(
        "checkpointd_commit_seconds",
        "Time from save() to the commit by all ranks; counted on the node of rank 0 alone.",
        labels=("root",),
        unit="seconds",
    )
    for root, commits in by_root.items():
        if commits is not None:
            family.add_metric((root,), [(_bound(bound), count) for bound, count in commits.cumulative()], commits.total_s)
    return family


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


# --- of each rank --------------------------------------------------------------------------------------------


def _ranks(records: list[RankRecord]) -> Iterator[Metric]:
    labels = ("root", "rank")
    saves = (
        "Saves that ended: committed by all ranks, aborted by others or the deadline, fenced by a newer job, failed here, or "
        "skipped."
    )
    yield _counter("checkpointd_saves", saves, list(_results(records)), (*labels, "result"))

    def by_rank(name: str, text: str, value: Callable[[RankRecord], float]) -> Metric:
        return _counter(name, text, [((record.root, str(record.rank)), value(record)) for record in records], labels)

    yield by_rank(
        "checkpointd_saves_stale",
        "Saves that were committed although the step had moved on and nothing that is trained had changed.",
        lambda record: record.stale,
    )
    yield by_rank("checkpointd_stall_seconds", "Time for which saves held training.", lambda record: record.stall_s)
    yield by_rank(
        "checkpointd_persist_bytes",
        "Bytes of tensors that were made durable, before compression; counted with the vote.",
        lambda record: record.bytes_persisted,
    )
    yield by_rank(
        "checkpointd_stored_bytes",
        "Bytes written to the store for them, after compression.",
        lambda record: record.bytes_stored,
    )


def _results(records: Iterable[RankRecord]) -> Iterator[tuple[tuple[str, ...], float]]:
    for record in records:
        apart = {"aborted": record.aborted, "fenced": record.fenced, "skipped": record.skipped}
        counts = {"committed": record.committed, "failed": record.failed - sum(apart.values()), **apart}
        for result, count in counts.items():
            yield (record.root, str(record.rank), result), count


# --- families ------------------------------------------------------------------------------------------------


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, (), [((), value)])


def _gauges(name: str, text: str, labels: tuple[str, ...], rows: list[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels, unit=_unit(name))
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(
    name: str, text: str, rows: list[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> CounterMetricFamily:
    """A counter, to whose name `_total` is added."""
    family = CounterMetricFamily(name, text, labels=labels, unit=_unit(name))
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _unit(name: str) -> str:
    return next((unit for unit in ("bytes_per_second", "bytes", "seconds") if name.endswith(f"_{unit}")), "")
