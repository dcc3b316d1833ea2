"""K1 and K2: every metric has a name with its unit, a help, a value that is true, and bounded series."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from checkpointd.config import ServeConfig
from checkpointd.daemon import metrics
from checkpointd.daemon.histogram import BOUNDS_S, Durations
from checkpointd.daemon.hub import Hub, Look
from checkpointd.daemon.status import DaemonStatus
from checkpointd.layout.manifest import ErrorReport
from tests.unit.daemon.standings import BUSY_ROOT, busy, failing

UNITS = {"bytes", "seconds", "bytes_per_second"}
WITHOUT_UNIT = {
    *("checkpointd_build", "checkpointd_leaving", "checkpointd_clients", "checkpointd_clients_max", "checkpointd_refused"),
    *("checkpointd_in_flight", "checkpointd_votes_missing", "checkpointd_newest_step", "checkpointd_ranks"),
    *(
        "checkpointd_ranks_connected",
        "checkpointd_held_snapshots",
        "checkpointd_root_unreadable",
        "checkpointd_checkpoints_damaged",
        "checkpointd_newest_read_back_step",
        "checkpointd_saves",
        "checkpointd_saves_stale",
    ),
}


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    config = ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),), bandwidth_bps=1e9)
    hub = Hub(config)
    for rank in range(2):
        record = hub.rank("/r", rank, world_size=2, pid=7)
        record.committed, record.failed, record.aborted, record.fenced, record.skipped = 9, 10, 2, 4, 1
        record.bytes_persisted, record.bytes_stored, record.stall_s = 1000, 600, 0.25
    for seconds in (0.05, 3.0, 3.0, 4000.0):
        hub.ranks_at("/r")[0].commits.add(seconds)
    hub.looks["/r"] = Look(latest="t", newest_step=70, newest_committed_at=hub.started_at - 100)
    hub.refused = 4
    return hub


def families(hub: Hub) -> dict[str, Metric]:
    """As a scraper that speaks OpenMetrics reads them."""
    text = metrics.exposition(metrics.registry(hub), "openmetrics").decode()
    return {family.name: family for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    samples = [s for family in found.values() for s in family.samples if s.name == name and s.labels == labels]
    [sample] = samples
    return float(sample.value)


def test_names_units_and_help(hub: Hub) -> None:
    found = families(hub)
    own = {name: family for name, family in found.items() if not name.startswith("process_")}
    assert len(own) > 20
    for name, family in own.items():
        assert re.fullmatch(r"checkpointd_[a-z][a-z_]*[a-z]", name)
        assert len(family.documentation) > 20, name
        assert family.documentation.endswith("."), name
        assert family.type != "unknown", name
        assert (family.unit in UNITS and name.endswith(f"_{family.unit}")) or name in WITHOUT_UNIT, name
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{name}_total"}
    assert set(own) >= WITHOUT_UNIT


def test_every_metric_is_described(hub: Hub) -> None:
    page = (Path(__file__).parents[3] / "docs" / "STATUS.md").read_text()
    described = set(re.findall(r"^\| `(checkpointd_\w+)`", page, re.MULTILINE))
    own = [f for f in families(hub).values() if f.name.startswith("checkpointd_")]
    assert described == {
        f"{f.name}_total" if f.type == "counter" else f"{f.name}_info" if f.type == "info" else f.name for f in own
    }


def test_both_forms_say_the_same(hub: Hub) -> None:
    text = metrics.exposition(metrics.registry(hub), "plain").decode()
    plain = {s.name for f in parse_plain(text) for s in f.samples if s.name.startswith("checkpointd_")}
    assert plain == {s.name for f in families(hub).values() for s in f.samples if s.name.startswith("checkpointd_")}
    assert metrics.form("text/html") == metrics.form("") == "plain"
    assert metrics.form("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2") == "openmetrics"


def test_the_counts_of_ranks(hub: Hub) -> None:
    found = families(hub)
    results = {
        r: value(found, "checkpointd_saves_total", root="/r", rank="1", result=r) for r in ("committed", "aborted", "failed")
    }
    assert results == {"committed": 9, "aborted": 2, "failed": 3}
    assert value(found, "checkpointd_saves_total", root="/r", rank="1", result="skipped") == 1
    assert value(found, "checkpointd_saves_total", root="/r", rank="1", result="fenced") == 4
    assert value(found, "checkpointd_persist_bytes_total", root="/r", rank="0") == 1000
    assert value(found, "checkpointd_stored_bytes_total", root="/r", rank="0") == 600
    assert value(found, "checkpointd_stall_seconds_total", root="/r", rank="0") == 0.25
    assert value(found, "checkpointd_refused_total") == 4


def test_commits_are_a_histogram(hub: Hub) -> None:
    found = families(hub)
    assert value(found, "checkpointd_commit_seconds_count", root="/r") == 4
    assert value(found, "checkpointd_commit_seconds_sum", root="/r") == pytest.approx(4006.05)
    below = {
        bound: value(found, "checkpointd_commit_seconds_bucket", root="/r", le=bound) for bound in ("0.1", "2.5", "5.0", "+Inf")
    }
    assert below == {"0.1": 1, "2.5": 1, "5.0": 3, "+Inf": 4}


def test_durations_count_on_the_bound_and_never_forget() -> None:
    durations = Durations()
    for _ in range(1000):
        durations.add(BOUNDS_S[0])
    durations.add(-1.0)
    assert next(iter(durations.cumulative())) == (BOUNDS_S[0], 1001)
    assert list(durations.cumulative())[-1] == (float("inf"), 1001)
    assert durations.total_s == pytest.approx(100.0)


def test_the_root_as_it_was_last_looked_at(hub: Hub) -> None:
    found = families(hub)
    assert value(found, "checkpointd_newest_step", root="/r") == 70
    assert value(found, "checkpointd_newest_commit_age_seconds", root="/r") >= 100
    hub.looks["/r"] = Look(problem=ErrorReport(code="StoreError", message="gone"))
    found = families(hub)
    assert found["checkpointd_newest_step"].samples == []
    assert value(found, "checkpointd_root_unreadable", root="/r") == 1


def test_what_is_in_flight(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_status(hub, monkeypatch, busy(8))
    phases = {p: value(found, "checkpointd_in_flight", root=BUSY_ROOT, phase=p) for p in ("persisting", "prepared", "staging")}
    assert phases == {"persisting": 6, "prepared": 2, "staging": 0}
    assert value(found, "checkpointd_votes_missing", root=BUSY_ROOT) == 6
    assert value(found, "checkpointd_oldest_in_flight_seconds", root=BUSY_ROOT) == pytest.approx(3.4)
    assert value(found, "checkpointd_memory_held_bytes") == 16 << 30
    assert value(found, "checkpointd_ranks_connected", root=BUSY_ROOT) == 8


def test_what_went_wrong(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_status(hub, monkeypatch, failing())
    assert value(found, "checkpointd_leaving") == 1
    assert value(found, "checkpointd_ranks_connected", root=BUSY_ROOT) == 3
    assert value(found, "checkpointd_votes_missing", root=BUSY_ROOT) == 0
    assert value(found, "checkpointd_root_unreadable", root="/mnt/scratch/run2") == 1


def with_status(hub: Hub, monkeypatch: pytest.MonkeyPatch, status: DaemonStatus) -> dict[str, Metric]:
    monkeypatch.setattr(metrics, "standing", lambda _: status)
    return families(hub)


def test_labels_are_of_a_fixed_list(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.rank(BUSY_ROOT, 0, world_size=256, pid=1)
    found = with_status(hub, monkeypatch, busy(256))
    labels = {label for family in found.values() for sample in family.samples for label in sample.labels}
    assert labels == {"root", "rank", "result", "phase", "le", "version", "protocol"}
    per_root = [s for f in found.values() for s in f.samples if s.labels.get("root") == BUSY_ROOT]
    assert len(per_root) < 50  # the ranks' own series come from the hub, and are as many as it keeps


def test_nothing_reaches_the_global_registry(hub: Hub) -> None:
    import prometheus_client

    metrics.registry(hub)
    metrics.registry(hub)
    assert "checkpointd" not in prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
