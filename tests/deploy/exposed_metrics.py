"""The metrics that a daemon really gives, and the names and labels that a PromQL expression asks for."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

from checkpointd.config import ServeConfig, ServedExport, ServedMirror
from checkpointd.daemon.http import metrics
from checkpointd.daemon.hub import Hub, RootScan
from checkpointd.daemon.spool.places import Room
from checkpointd.daemon.status.model import SpaceStatus
from checkpointd.daemon.tiers.node_spool import NodeSpool
from checkpointd.store.requests import Requests

ROOT = "/scratch/run-1"
MIRROR = ServedMirror(origin=ROOT, mirror="/archive/run-1")
EXPORT = ServedExport(root=ROOT, to="/models/run-1")
# What Prometheus itself gives, and node_exporter beside it.
FOREIGN = {"up": set[str](), "node_filesystem_avail_bytes": {"mountpoint"}}
# What Prometheus adds to every series of a target, or its configuration does.
ADDED = {"job", "instance", "cluster", "namespace"}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|on|without|ignoring)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\b\s*(?:\{([^}]*)\})?(?!\s*\()")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_WORDS = {"and", "or", "unless", "bool", "offset"}


@cache
def exposed() -> dict[str, set[str]]:
    """The names of all series with their labels: scraped from a daemon with one rank at one root, as if that were in a bucket,
    with a spool, a mirror and an export; and parsed.
    """
    with tempfile.TemporaryDirectory() as folder:
        return scraped(folder)


def scraped(spool: str) -> dict[str, set[str]]:
    config = ServeConfig(
        socket="/run/checkpointd/checkpointd.sock",
        roots=(ROOT,),
        bandwidth_bps=float(1 << 30),
        mirrors=(MIRROR,),
        exports=(EXPORT,),
        spool=spool,
    )
    hub = Hub(config)
    record = hub.rank(ROOT, 0, world_size=1, pid=1)
    record.connected(0)
    hub.begun(record, 2, "nonce")
    hub.root_scans[ROOT] = RootScan(
        latest="global_step10",
        newest_step=10,
        newest_committed_at=hub.started_at,
        space=SpaceStatus(free_bytes=1, total_bytes=2),
    )
    hub.roots.requests = lambda _: Requests(puts=1)  # type: ignore[method-assign]
    assert config.spool_config is not None
    hub.spool = NodeSpool(hub, config.spool_config)
    hub.spool.directory.room = Room(used=1, free=1, total=2)
    mirror = hub.mirrors.progress[0]
    mirror.newest_step, mirror.in_step_at = 10, hub.started_at
    export = hub.exports.progress[0]
    export.newest_step, export.up_to_date_at, export.last_s = 10, hub.started_at, 1.0
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(metrics.exposition(metrics.registry(hub), "plain").decode()):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return {**found, **FOREIGN}


@dataclass(frozen=True)
class Expression:
    """What an expression asks for: labels by metric, and the labels of all its `by (...)` and `on (...)`."""

    selected: tuple[tuple[str, frozenset[str]], ...]
    grouped: frozenset[str]
    by: frozenset[str] | None
    """What is left of the labels: those of the first `by`; None where nothing is summed up."""

    def unknown(self) -> list[str]:
        """Names of metrics and labels that no daemon gives."""
        names = [name for name, _ in self.selected if name not in exposed()]
        given: dict[str, set[str]] = {name: exposed().get(name, set()) | ADDED for name, _ in self.selected}
        labels = [f"{name}{{{label}}}" for name, asked in self.selected for label in asked - given[name]]
        return names + labels + sorted(self.grouped - set[str]().union(*given.values()))

    def left(self) -> set[str]:
        """Labels of the result."""
        if self.by is not None:
            return set(self.by)
        return exposed()[self.selected[0][0]] | ADDED


def read(expression: str) -> Expression:
    """Take `expression` apart; enough of PromQL for what deploy/ has."""
    plain = _RANGE.sub("", _STRING.sub('""', expression))
    groups = [(kind, frozenset(re.findall(r"\w+", inside))) for kind, inside in _GROUPING.findall(plain)]
    selectors = _SELECTOR.findall(_GROUPING.sub(" ", plain))
    return Expression(
        selected=tuple((name, frozenset(_MATCHED.findall(inside))) for name, inside in selectors if name not in _WORDS),
        grouped=frozenset[str]().union(*(labels for _, labels in groups)),
        by=next((labels for kind, labels in groups if kind == "by"), None),
    )
