"""The daemon's metrics for Prometheus, in a registry of its own that reads the hub at each scrape.

Invariants
  METRIC-1  Names end in their base unit, counters in `_total`. Every metric has a help text.
  METRIC-2  Series are bounded: by ROOTS_MAX roots, by the ranks of this node if metrics are per rank, and by fixed lists of
      words. Labels contain neither tags nor paths of objects.
  METRIC-3  A series of a root exists, with 0, as soon as its first rank joins, and ends LEFT_S after its last trainer has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.protocol.wire import PROTOCOLS
from checkpointd.daemon.status.model import DaemonStatus, RootStatus
from checkpointd.daemon.status.tally import Tally
from checkpointd.mirror.news import MirrorProgress

PHASES = ("staging", "staged", "persisting", "spooled", "uploading", "prepared", "failed", "skipped")
"""The phases of a save in flight; the last two while its no vote is being put."""


class HubCollector(Collector):
    """All metrics of one daemon, made from memory at each scrape."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        found = standing(self._hub)
        told = used_lately(found)
        yield from _daemon(found)
        yield from _memory(found)
        yield from _spool(found)
        yield from _roots(told, found.now)
        if found.mirrors:
            yield from _mirrors(found)
        if found.exports:
            yield from _exports(found)
        at_roots = [((root.root, root.name), self._hub.tallies[root.root]) for root in told if root.root in self._hub.tallies]
        yield _commits(at_roots)
        yield _spent(at_roots)
        yield _requests(told)
        if self._hub.config.metrics_per_rank:
            names = {root.root: root.name for root in told}
            records = [record for record in self._hub if record.root in names]
            yield from _counts((*OF_ROOT, "rank"), [((r.root, names[r.root], str(r.rank)), r.tally) for r in records])
        else:
            yield from _counts(OF_ROOT, at_roots)


OF_ROOT = ("root", "name")
"""The labels of all metrics of a root. Prometheus leaves out labels without a value."""
ROOTS_MAX = 64
LEFT_S = 3600.0
"""How long a root stays in the metrics after its last trainer has left."""

Tallies = Sequence[tuple[tuple[str, ...], Tally]]
"""Label values, each with a tally."""
Rows = Sequence[tuple[tuple[str, ...], float]]
"""Label values, each with a number."""


def used_lately(found: DaemonStatus) -> list[RootStatus]:
    """The roots in the metrics, the most urgent first."""
    return [root for root in found.roots if _is_used(root, found.now)][:ROOTS_MAX]


def _is_used(root: RootStatus, now: float) -> bool:
    return bool(root.in_flight) or any(rank.gone_at is None or now - rank.gone_at < LEFT_S for rank in root.ranks)


def registry(hub: Hub) -> CollectorRegistry:
    """The daemon's metrics, with CPU, memory and descriptors of its process under their usual names."""
    made = CollectorRegistry(auto_describe=False)
    made.register(HubCollector(hub))
    ProcessCollector(registry=made)
    return made


FORMS = {"plain": CONTENT_TYPE_PLAIN_0_0_4, "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
"""The formats of the metrics, with their content types."""


def form(accept: str) -> str:
    """The format (one of FORMS) for a scraper with this Accept header."""
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
    yield _gauge("checkpointd_leaving", "1 while the daemon finishes its saves in flight after SIGTERM, else 0.", found.leaving)
    yield _gauge("checkpointd_clients", "Connections of ranks to the socket.", found.clients)
    yield _gauge("checkpointd_clients_max", "Connections of ranks that the socket takes at once.", found.clients_max)
    refused = (
        "Connections and requests that were refused: full (no room), request (not allowed, or not possible), protocol, "
        "leaving, other."
    )
    yield _counter("checkpointd_refused", refused, [((why,), count) for why, count in found.refusals.items()], ("reason",))
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


def _spool(found: DaemonStatus) -> Iterator[Metric]:
    spool = found.spool
    if spool is None:
        return
    if spool.used_bytes is not None and spool.free_bytes is not None:
        yield _gauge(
            "checkpointd_spool_used_bytes", "Bytes in the spool. Missing while its disk does not answer.", spool.used_bytes
        )
        yield _gauge("checkpointd_spool_free_bytes", "Free bytes of its disk.", spool.free_bytes)
    yield _gauge(
        "checkpointd_spool_waiting", "Shards in the spool that wait for their upload, or for other ranks.", spool.waiting
    )
    yield _gauge("checkpointd_spool_waiting_bytes", "Bytes of these shards.", spool.waiting_bytes)
    yield _counter("checkpointd_spool_uploaded_bytes", "Bytes sent from the spool to roots.", [((), spool.uploaded_bytes)], ())
    text = (
        "Shards by what became of them: spooled (durable in the spool), uploaded (their save committed), superseded (dropped "
        "for a newer save), direct_full and direct_failed (written straight to the root, since the spool was full or failed), "
        "resumed (left by an earlier daemon)."
    )
    words = ("spooled", "uploaded", "superseded", "direct_full", "direct_failed", "resumed")
    yield _counter("checkpointd_spool_shards", text, [((word,), getattr(spool, word)) for word in words], ("what",))


# --- of each root --------------------------------------------------------------------------------------------


def _roots(roots: Sequence[RootStatus], now: float) -> Iterator[Metric]:
    yield _phases(roots)

    def by_root(name: str, text: str, value: Callable[[RootStatus], float | None]) -> Metric:
        rows = [((root.root, root.name), value(root)) for root in roots]
        return _gauges(name, text, OF_ROOT, [(labels, number) for labels, number in rows if number is not None])

    yield by_root(
        "checkpointd_votes_missing",
        "Votes that the saves in flight still wait for; only on the node of rank 0.",
        _votes_missing,
    )
    yield by_root(
        "checkpointd_oldest_in_flight_seconds",
        "Age of the oldest save in flight; 0 without one.",
        lambda root: max((now - save.began_at for save in root.in_flight), default=0.0),
    )
    yield by_root(
        "checkpointd_newest_commit_age_seconds",
        "Time since the newest checkpoint was committed, as of the last look at the root.",
        lambda root: None if root.newest_committed_at is None else max(0.0, now - root.newest_committed_at),
    )
    yield by_root(
        "checkpointd_unsaved_seconds",
        "Training that a failure now would cost: the time since the newest commit, or since the trainers began if that was "
        "later. Missing while no trainer is connected.",
        lambda root: _unsaved_s(root, now),
    )
    yield by_root(
        "checkpointd_starts_since_commit",
        "Starts of the job since the run of the newest commit, or in all if there is no checkpoint. Missing when its trainers "
        "have closed it, and before the first look at the root.",
        _starts_since_commit,
    )
    yield by_root("checkpointd_newest_step", "Training step of the newest checkpoint.", lambda root: root.newest_step)
    yield by_root(
        "checkpointd_newest_read_back_step",
        "Training step of the newest checkpoint that was read back whole. Missing if none of the newest checkpoints was.",
        lambda root: next((c.step for c in root.checkpoints if c.read_back == "whole"), None),
    )
    yield by_root(
        "checkpointd_checkpoints_damaged",
        "Damaged checkpoints among the newest at the root.",
        lambda root: sum(c.read_back == "damaged" for c in root.checkpoints),
    )
    yield by_root("checkpointd_ranks", "Ranks of this node, of the run that is or was last here.", lambda root: len(root.ranks))
    yield by_root(
        "checkpointd_ranks_connected",
        "Ranks of this node whose trainer is connected.",
        lambda root: sum(rank.connected for rank in root.ranks),
    )
    yield by_root("checkpointd_held_snapshots", "Snapshots of this root held in memory.", lambda root: len(root.held))
    yield by_root(
        "checkpointd_root_unreadable", "1 while the root cannot be read, else 0.", lambda root: root.problem is not None
    )


def _phases(roots: Iterable[RootStatus]) -> Metric:
    text = "Saves of ranks of this node that have not ended, by phase."
    counts = [(root, phase, sum(save.phase == phase for save in root.in_flight)) for root in roots for phase in PHASES]
    rows = [((root.root, root.name, phase), count) for root, phase, count in counts]
    return _gauges("checkpointd_in_flight", text, (*OF_ROOT, "phase"), rows)


def _votes_missing(root: RootStatus) -> float | None:
    if not any(rank.rank == 0 for rank in root.ranks):
        return None
    return sum(len(save.votes_missing or ()) for save in root.in_flight)


def _unsaved_s(root: RootStatus, now: float) -> float | None:
    began = max((rank.since for rank in root.ranks if rank.connected), default=None)
    return None if began is None else max(0.0, now - max(began, root.newest_committed_at or 0.0))


def _starts_since_commit(root: RootStatus) -> float | None:
    """Counted by starts, not by times: each checkpoint names the start of its save."""
    if root.space is None and not root.checkpoints:
        return None  # the root was not scanned, so there may be a checkpoint
    begun = max((rank.start for rank in root.ranks if rank.start is not None and not rank.left_well), default=None)
    return None if begun is None else max(0, begun - max((c.order[0] for c in root.checkpoints), default=0))


def _commits(tallies: Tallies) -> Metric:
    family = HistogramMetricFamily(
        "checkpointd_commit_seconds",
        "Time from save() to the commit by all ranks; only on the node of rank 0.",
        labels=OF_ROOT,
        unit="seconds",
    )
    for labels, tally in tallies:
        buckets = [(_bound(bound), count) for bound, count in tally.commits.cumulative()]
        family.add_metric(labels, buckets, tally.commits.total_s)
    return family


def _spent(tallies: Tallies) -> Metric:
    family = SummaryMetricFamily(
        "checkpointd_phase_seconds",
        "How long the parts of saves took, each rank's save counted once. Hash, codec and disk are parts of persisting, and "
        "overlap.",
        labels=(*OF_ROOT, "phase"),
        unit="seconds",
    )
    for labels, tally in tallies:
        for part, spent in tally.spent.items():
            family.add_metric((*labels, part), spent.saves, spent.total_s)
    return family


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


def _requests(roots: Sequence[RootStatus]) -> Metric:
    counted = [((root.root, root.name), root.requests.by_kind()) for root in roots if root.requests is not None]
    rows = [((*labels, kind), float(count)) for labels, counts in counted for kind, count in counts.items()]
    text = "Requests to the bucket of a root, without repetitions, by kind: puts, parts, gets, heads, lists (pages), deletes."
    return _counter("checkpointd_requests", text, rows, (*OF_ROOT, "kind"))


# --- of each mirror --------------------------------------------------------------------------------------------

OF_MIRROR = ("origin", "mirror")


def _mirrors(found: DaemonStatus) -> Iterator[Metric]:
    labelled = [((one.origin, one.mirror), one) for one in found.mirrors]
    yield _gauges(
        "checkpointd_mirror_behind",
        "Checkpoints that are still to be copied to the mirror, as of the last look.",
        OF_MIRROR,
        [(labels, float(one.behind)) for labels, one in labelled],
    )
    yield _gauges(
        "checkpointd_mirror_failing",
        "1 while the mirror cannot be kept, else 0: its storage or that of its origin fails, or somebody must act.",
        OF_MIRROR,
        [(labels, float(one.state in ("failing", "over"))) for labels, one in labelled],
    )
    yield _gauges(
        "checkpointd_mirror_in_step_age_seconds",
        "Time since the mirror last had every checkpoint that it was to have. Missing before that.",
        OF_MIRROR,
        [(labels, max(0.0, found.now - one.in_step_at)) for labels, one in labelled if one.in_step_at is not None],
    )
    yield _gauges(
        "checkpointd_mirror_newest_step",
        "Training step of the newest checkpoint at the mirror.",
        OF_MIRROR,
        [(labels, float(one.newest_step)) for labels, one in labelled if one.newest_step is not None],
    )
    yield _counter(
        "checkpointd_mirror_checkpoints",
        "Checkpoints that were copied to the mirror (mirrored), and that were not, by reason.",
        [((*labels, kind), float(count)) for labels, one in labelled for kind, count in _results(one).items()],
        (*OF_MIRROR, "result"),
    )
    yield _counter(
        "checkpointd_mirror_copied_bytes",
        "Bytes of chunks that were copied to the mirror.",
        [(labels, float(one.copied_bytes)) for labels, one in labelled],
        OF_MIRROR,
    )


def _results(one: MirrorProgress) -> dict[str, int]:
    return {"mirrored": one.mirrored, **one.left}


# --- of each export --------------------------------------------------------------------------------------------

OF_EXPORT = ("origin", "to")


def _exports(found: DaemonStatus) -> Iterator[Metric]:
    labelled = [((one.root, one.to), one) for one in found.exports]
    yield _gauges(
        "checkpointd_export_due",
        "Checkpoints that are still to be exported, as of the last look.",
        OF_EXPORT,
        [(labels, float(one.due)) for labels, one in labelled],
    )
    yield _gauges(
        "checkpointd_export_failing",
        "1 while checkpoints cannot be exported, else 0: a storage fails, or somebody must act.",
        OF_EXPORT,
        [(labels, float(one.state in ("failing", "over"))) for labels, one in labelled],
    )
    yield _gauges(
        "checkpointd_export_up_to_date_age_seconds",
        "Time since every checkpoint that the rule names was last exported. Missing before that.",
        OF_EXPORT,
        [(labels, max(0.0, found.now - one.up_to_date_at)) for labels, one in labelled if one.up_to_date_at is not None],
    )
    yield _gauges(
        "checkpointd_export_newest_step",
        "Training step of the newest export.",
        OF_EXPORT,
        [(labels, float(one.newest_step)) for labels, one in labelled if one.newest_step is not None],
    )
    yield _gauges(
        "checkpointd_export_last_seconds",
        "How long the last export of this daemon took.",
        OF_EXPORT,
        [(labels, one.last_s) for labels, one in labelled if one.last_s is not None],
    )
    yield _counter(
        "checkpointd_export_checkpoints",
        "Checkpoints that were exported (exported), and that were not, by reason.",
        [((*labels, kind), float(n)) for labels, one in labelled for kind, n in {"exported": one.exported, **one.left}.items()],
        (*OF_EXPORT, "result"),
    )
    yield _counter(
        "checkpointd_exported_bytes",
        "Bytes of tensors that were exported.",
        [(labels, float(one.exported_bytes)) for labels, one in labelled],
        OF_EXPORT,
    )


# --- counters, by root or by rank ---------------------------------------------------------------------------


def _counts(labels: tuple[str, ...], tallies: Tallies) -> Iterator[Metric]:
    def split(name: str, text: str, label: str, counts: Callable[[Tally], dict[str, int]]) -> Metric:
        rows = [((*values, word), float(count)) for values, tally in tallies for word, count in counts(tally).items()]
        return _counter(name, text, rows, (*labels, label))

    def single(name: str, text: str, value: Callable[[Tally], float]) -> Metric:
        return _counter(name, text, [(values, value(tally)) for values, tally in tallies], labels)

    yield split(
        "checkpointd_saves",
        "Saves of ranks that ended: committed, aborted by others or the deadline, fenced by a newer job, "
        "superseded by a newer save in the spool, failed, skipped.",
        "result",
        lambda tally: tally.results,
    )
    yield split(
        "checkpointd_saves_inline",
        "Of those, saves that the trainers persisted themselves, because the sidecar refused them or its connection was lost.",
        "reason",
        lambda tally: tally.inline,
    )
    yield single(
        "checkpointd_saves_no_progress",
        "Saves that were committed although no trained tensor had changed since the checkpoint before.",
        lambda tally: tally.no_progress,
    )
    yield single(
        "checkpointd_stall_seconds",
        "Time for which saves held training; of a root, on the rank with the longest time.",
        lambda tally: tally.stall_s,
    )
    yield single(
        "checkpointd_rested_seconds",
        "Time for which the workers of saves rested so that training kept its speed, added up; counted when a save ends.",
        lambda tally: tally.rested_s,
    )
    yield single(
        "checkpointd_persist_bytes",
        "Bytes of tensors that were made durable, before compression; counted with the vote.",
        lambda tally: tally.bytes_persisted,
    )
    yield single(
        "checkpointd_stored_bytes",
        "Bytes written to the store for them, after compression.",
        lambda tally: tally.bytes_stored,
    )


# --- families ------------------------------------------------------------------------------------------------


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, (), [((), value)])


def _gauges(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels, unit=_unit(name)), rows)


def _counter(name: str, text: str, rows: Rows, labels: tuple[str, ...]) -> Metric:
    """A counter, to whose name `_total` is added."""
    return _filled(CounterMetricFamily(name, text, labels=labels, unit=_unit(name)), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _unit(name: str) -> str:
    return next((unit for unit in ("bytes_per_second", "bytes", "seconds") if name.endswith(f"_{unit}")), "")
