"""METRIC-1 and METRIC-2: every metric has a name with its unit, a help, a value that is true, and bounded series."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from checkpointd.config import ServeConfig, ServedExport, ServedMirror
from checkpointd.daemon.http import metrics
from checkpointd.daemon.hub import FORGET_S, Hub, RootScan
from checkpointd.daemon.spool.places import Room
from checkpointd.daemon.status.model import DaemonStatus, SpaceStatus
from checkpointd.daemon.status.tally import BOUNDS_S, RESULTS, Durations
from checkpointd.daemon.tiers.node_spool import NodeSpool
from checkpointd.errors import UsageError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.store.requests import Requests
from tests.unit.daemon.example_statuses import BUSY_ROOT, busy, checkpoints, failing

SERIES_A_ROOT = 65
UNITS = {"bytes", "seconds", "bytes_per_second"}
WITHOUT_UNIT = {
    *("checkpointd_build", "checkpointd_leaving", "checkpointd_clients", "checkpointd_clients_max", "checkpointd_refused"),
    *("checkpointd_in_flight", "checkpointd_votes_missing", "checkpointd_newest_step", "checkpointd_ranks"),
    *(
        "checkpointd_ranks_connected",
        "checkpointd_held_snapshots",
        "checkpointd_requests",
        "checkpointd_root_unreadable",
        "checkpointd_checkpoints_damaged",
        "checkpointd_newest_read_back_step",
        "checkpointd_starts_since_commit",
        "checkpointd_saves",
        "checkpointd_saves_no_progress",
        "checkpointd_saves_inline",
        "checkpointd_mirror_behind",
        "checkpointd_mirror_failing",
        "checkpointd_mirror_newest_step",
        "checkpointd_mirror_checkpoints",
        "checkpointd_export_due",
        "checkpointd_export_failing",
        "checkpointd_export_newest_step",
        "checkpointd_export_checkpoints",
        "checkpointd_spool_shards",
        "checkpointd_spool_waiting",
    ),
}


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    mirrors = (ServedMirror(origin="/r", mirror="/m"),)
    spool = str(tmp_path / "spool")
    config = ServeConfig(
        socket=str(tmp_path / "s"),
        roots=(str(tmp_path),),
        bandwidth_bps=1e9,
        mirrors=mirrors,
        exports=(ServedExport(root="/r", to="/x"),),
        spool=spool,
    )
    hub = Hub(config)
    assert config.spool_config is not None
    hub.spool = node_spool = NodeSpool(hub, config.spool_config)
    node_spool.directory.room = Room(used=1 << 30, free=1 << 32, total=1 << 33)
    node_spool.directory.counts.direct_full = 3
    for rank in range(2):
        record = hub.rank("/r", rank, world_size=2, pid=7)
        for tally in (record.tally, hub.tallies["/r"]):
            for result, count in {"committed": 9, "failed": 3, "aborted": 2, "fenced": 4, "skipped": 1}.items():
                tally.results[result] += count
            tally.persisted(1000, 600)
            tally.spent["disk"].total_s, tally.spent["disk"].saves = 12.5, 5
        hub.held_up(record, 0.25 + rank)
    for seconds in (0.05, 3.0, 3.0, 4000.0):
        hub.tallies["/r"].commits.add(seconds)
    hub.root_scans["/r"] = RootScan(latest="t", newest_step=70, newest_committed_at=hub.started_at - 100)
    hub.refuse(UsageError("no"))
    hub.roots.requests = lambda _: Requests(puts=7, lists=3)  # type: ignore[method-assign]  # as if the root were in a bucket
    return hub


def families(hub: Hub) -> dict[str, Metric]:
    """As a scraper that speaks OpenMetrics reads them."""
    text = metrics.exposition(metrics.registry(hub), "openmetrics").decode()
    return {family.name: family for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]


def value(found: dict[str, Metric], name: str, /, **labels: str) -> float:
    if "root" in labels:
        labels.setdefault("name", "")
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


def test_requests_are_counted_by_kind(hub: Hub) -> None:
    found = families(hub)
    assert value(found, "checkpointd_requests_total", root="/r", kind="puts") == 7
    assert value(found, "checkpointd_requests_total", root="/r", kind="lists") == 3
    assert value(found, "checkpointd_requests_total", root="/r", kind="gets") == 0


def test_every_metric_is_described(hub: Hub) -> None:
    page = (Path(__file__).parents[4] / "docs" / "STATUS.md").read_text()
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
    results = {r: value(found, "checkpointd_saves_total", root="/r", result=r) for r in RESULTS}
    assert results == {"committed": 18, "aborted": 4, "fenced": 8, "superseded": 0, "failed": 6, "skipped": 2}
    assert value(found, "checkpointd_persist_bytes_total", root="/r") == 2000
    assert value(found, "checkpointd_stored_bytes_total", root="/r") == 1200
    assert value(found, "checkpointd_stall_seconds_total", root="/r") == 1.25  # on the rank that was held longest
    assert value(found, "checkpointd_phase_seconds_sum", root="/r", phase="disk") == 12.5
    assert value(found, "checkpointd_phase_seconds_count", root="/r", phase="disk") == 5
    refused = {
        r: value(found, "checkpointd_refused_total", reason=r) for r in ("full", "request", "protocol", "leaving", "other")
    }
    assert refused == {"full": 0, "request": 1, "protocol": 0, "leaving": 0, "other": 0}


def test_the_counts_of_ranks_one_by_one(tmp_path: Path) -> None:
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=("/",), metrics_per_rank=True))
    for rank in range(2):
        hub.held_up(hub.rank("/r", rank, world_size=2, pid=7), 0.25 + rank)
    found = families(hub)
    assert value(found, "checkpointd_saves_total", root="/r", rank="1", result="committed") == 0
    assert value(found, "checkpointd_stall_seconds_total", root="/r", rank="0") == 0.25


def test_what_may_fail_is_there_with_nought_before_it_does(tmp_path: Path) -> None:
    """Or increase() would never see the first one (METRIC-3)."""
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=("/",)))
    hub.rank("/r", 0, world_size=1, pid=7)
    found = families(hub)
    assert {value(found, "checkpointd_saves_total", root="/r", result=r) for r in RESULTS} == {0}
    assert {value(found, "checkpointd_saves_inline_total", root="/r", reason=r) for r in ("refused", "lost")} == {0}
    assert value(found, "checkpointd_saves_no_progress_total", root="/r") == 0


def test_a_root_leaves_an_hour_after_its_last_trainer_and_is_forgotten_after_a_day(hub: Hub) -> None:
    now = time.time()
    for record in hub.ranks_at("/r"):
        record.gone_at = now - metrics.LEFT_S + 600
    assert value(families(hub), "checkpointd_ranks", root="/r") == 2
    for record in hub.ranks_at("/r"):
        record.gone_at = now - metrics.LEFT_S - 1
    assert not [s for family in families(hub).values() for s in family.samples if "root" in s.labels]
    hub.forget_old(now)
    assert len(hub.ranks_at("/r")) == 2
    hub.forget_old(now + FORGET_S)
    assert (hub.ranks_at("/r"), hub.tallies) == ([], {})


@pytest.mark.nightly
def test_however_many_ranks_and_roots_there_are_the_series_are_bounded(tmp_path: Path) -> None:
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=("/",)))
    for root in range(100):
        for rank in range(40):
            hub.rank(f"/r{root}", rank, world_size=40, pid=7).connected(0)
    series = [s for family in families(hub).values() for s in family.samples if "root" in s.labels]
    assert len({s.labels["root"] for s in series}) == metrics.ROOTS_MAX
    assert len(series) <= 64 * SERIES_A_ROOT
    page = (Path(__file__).parents[4] / "docs" / "STATUS.md").read_text()
    assert f"at most {SERIES_A_ROOT} series" in page


def test_a_root_can_have_a_name(tmp_path: Path) -> None:
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=("/",), names={"/r": "llama"}))
    hub.rank("/r", 0, world_size=1, pid=7)
    assert value(families(hub), "checkpointd_ranks", root="/r", name="llama") == 1


def test_what_a_failure_now_would_cost(hub: Hub) -> None:
    """A resume does not inherit the age of the checkpoint that it loaded."""
    assert families(hub)["checkpointd_unsaved_seconds"].samples == []
    for record in hub.ranks_at("/r"):
        record.connected(0)
    hub.root_scans["/r"] = RootScan(latest="t", newest_step=70, newest_committed_at=hub.started_at - 7200)
    assert value(families(hub), "checkpointd_unsaved_seconds", root="/r") < 3600
    for record in hub.ranks_at("/r"):
        record.since = hub.started_at - 9000
    assert value(families(hub), "checkpointd_unsaved_seconds", root="/r") >= 7200
    hub.root_scans["/r"] = RootScan()
    assert value(families(hub), "checkpointd_unsaved_seconds", root="/r") >= 9000


def test_a_resume_is_seen_where_its_process_has_the_number_of_the_one_before(hub: Hub) -> None:
    """Processes of another pid namespace are all 0 to this daemon."""
    record = hub.rank("/r", 0, world_size=2, pid=0)
    record.connected(0)
    hub.begun(record, 4, "n1")
    record.since = hub.started_at - 9000
    hub.begun(record, 4, "n1")  # the same trainer, connected anew
    assert record.since == hub.started_at - 9000
    record.disconnected(0)
    hub.root_scans["/r"] = RootScan(newest_committed_at=hub.started_at - 7200)
    hub.rank("/r", 0, world_size=2, pid=0).connected(0)
    hub.begun(record, 5, "n2")
    assert value(families(hub), "checkpointd_unsaved_seconds", root="/r") < 3600


def test_starts_without_a_commit_are_counted_however_often_the_job_begins_anew(hub: Hub) -> None:
    """A crash loop grows; a resume after any pause is one, and nothing once it has committed."""
    name, [record, *_] = "checkpointd_starts_since_commit", hub.ranks_at("/r")
    space = SpaceStatus(free_bytes=1, total_bytes=2)
    assert families(hub)[name].samples == [], "nobody looked at the root yet"
    [saved] = checkpoints(100, 1, 1)
    hub.root_scans["/r"] = RootScan(checkpoints=(msgspec.structs.replace(saved, order=(7, 3)),), newest_committed_at=1.0)
    for start in (7, 8, 9, 10, 11):
        record.connected(0)
        hub.begun(record, start, f"n{start}")
        record.disconnected(0)
        assert value(families(hub), name, root="/r") == start - 7
    hub.root_scans["/r"] = RootScan(checkpoints=(msgspec.structs.replace(saved, order=(11, 0)), saved), newest_committed_at=2.0)
    assert value(families(hub), name, root="/r") == 0
    hub.root_scans["/r"] = RootScan(space=space)
    assert value(families(hub), name, root="/r") == 11, "it never committed"
    for one in hub.ranks_at("/r"):
        one.left_well = True
    assert families(hub)[name].samples == []


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
    hub.root_scans["/r"] = RootScan(problem=ErrorReport(code="StoreError", message="gone"))
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
    assert labels == {"root", "name", "result", "reason", "phase", "le", "version", "protocol"}
    per_root = [s for f in found.values() for s in f.samples if s.labels.get("root") == BUSY_ROOT]
    assert len(per_root) <= SERIES_A_ROOT


def test_nothing_reaches_the_global_registry(hub: Hub) -> None:
    import prometheus_client

    metrics.registry(hub)
    metrics.registry(hub)
    assert "checkpointd" not in prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()


def test_the_spool_shows_what_became_of_its_shards(hub: Hub) -> None:
    found = families(hub)
    assert value(found, "checkpointd_spool_shards_total", what="direct_full") == 3
    assert value(found, "checkpointd_spool_shards_total", what="superseded") == 0
    assert value(found, "checkpointd_spool_waiting") == 0
    assert value(found, "checkpointd_spool_used_bytes") == 1 << 30
    hub.spool = None
    assert not [name for name in families(hub) if "spool" in name]
