"""Scrape configuration, alerts and dashboard: checked by promtool where it is, and always against the daemon's own metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
from tests.deploy.exposed_metrics import ADDED, exposed, read

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOLDER = DEPLOY / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "checkpointd.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
COLUMNS = 24
DURATION = re.compile(r"\d+[smhd]")
SEVERITIES = {"critical", "warning", "info"}
# The Debian build leaves this out, and would read nothing else of the file.
DISCOVERY = re.compile(r"(?m)^    kubernetes_sd_configs:\n      - role: pod\n")


def yaml_of(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which pre-commit brings in")
    return yaml.safe_load((FOLDER / name).read_text())


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml_of("alerts.yml")["groups"]
    return list(group["rules"])


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    return subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=False)


# --- promtool ------------------------------------------------------------------------------------------------


def test_promtool_takes_the_rules() -> None:
    done = promtool(FOLDER, "check", "rules", "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly  # promtool takes ten seconds of processor time
def test_the_rules_fire_when_they_should_and_only_then() -> None:
    done = promtool(FOLDER, "test", "rules", "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire() -> None:
    """In the file that promtool runs, apart from the first case, in which none may."""
    cases = yaml_of("alerts_test.yml")["tests"][1:]
    fired = set(re.findall(r"Checkpointd\w+", json.dumps(cases)))
    assert fired == {rule["alert"] for rule in alerts()}


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    text = (FOLDER / "prometheus.yml").read_text()
    assert DISCOVERY.search(text)
    (tmp_path / "prometheus.yml").write_text(text)
    done = promtool(tmp_path, "check", "config", "prometheus.yml")
    if "field kubernetes_sd_configs not found" in done.stdout + done.stderr:
        (tmp_path / "prometheus.yml").write_text(DISCOVERY.sub("", text))
        done = promtool(tmp_path, "check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


# --- without promtool ----------------------------------------------------------------------------------------


def test_the_daemon_gives_what_is_asked_for() -> None:
    """The other tests here stand on this: names with their labels, as scraped."""
    known = exposed()
    assert known["checkpointd_saves_total"] == {"root", "name", "result"}
    assert known["checkpointd_commit_seconds_bucket"] == {"root", "name", "le"}
    assert known["checkpointd_newest_commit_age_seconds"] == {"root", "name"}
    assert "process_start_time_seconds" in known


def test_an_expression_is_taken_apart() -> None:
    found = read('sum by (root, le) (rate(a_total{x=~"b{c", y!="d"}[5m])) > 1 and on (z) b or vector(0)')
    assert dict(found.selected) == {"a_total": {"x", "y"}, "b": set()}
    assert found.grouped == {"root", "le", "z"}
    assert found.by is not None
    assert set(found.by) == {"root", "le"}


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("checkpointd_save_total", ["checkpointd_save_total"]),
        ('checkpointd_saves_total{phase="x"}', ["checkpointd_saves_total{phase}"]),
        ("sum by (tag) (checkpointd_saves_total)", ["tag"]),
        ('sum by (instance) (checkpointd_saves_total{result="failed"})', []),
    ],
)
def test_what_no_daemon_gives_is_seen(expression: str, unknown: list[str]) -> None:
    assert read(expression).unknown() == unknown


def test_rules_are_whole() -> None:
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["alert"].startswith("Checkpointd")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in SEVERITIES
        assert DURATION.fullmatch(rule.get("for", "0s"))
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)


def test_rules_ask_for_what_there_is() -> None:
    assert {rule["alert"]: read(rule["expr"]).unknown() for rule in alerts()} == {rule["alert"]: [] for rule in alerts()}


def test_annotations_name_labels_that_are_left() -> None:
    for rule in alerts():
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert named <= read(rule["expr"]).left(), rule["alert"]


def test_results_that_count_as_failures_are_results() -> None:
    from checkpointd.daemon.status.tally import RESULTS

    (rule,) = [rule for rule in alerts() if rule["alert"] == "CheckpointdSavesFail"]
    for asked in re.findall(r'result=~"([\w|]+)"', rule["expr"]):
        assert set(asked.split("|")) <= set(RESULTS)


APART = {"cluster", "namespace", "job", "root", "name"}


def test_every_alert_has_its_row_in_the_runbook() -> None:
    page = (DEPLOY.parent / "docs" / "OPERATING.md").read_text()
    assert [rule["alert"] for rule in alerts() if f"`{rule['alert']}`" not in page] == []


def test_no_rule_and_no_panel_merges_what_belongs_to_different_jobs() -> None:
    """Two teams may have the same path as their root."""
    for where, expression in [(r["alert"], r["expr"]) for r in alerts()] + [(title, t["expr"]) for title, t in TARGETS]:
        by_root = [group for group in re.findall(r"\bby \(([^)]*)\)", expression) if re.search(r"\broot\b", group)]
        assert all(set(re.findall(r"\w+", group)) >= APART for group in by_root), where


def test_the_configuration_names_the_rules_and_the_port() -> None:
    found = yaml_of("prometheus.yml")
    assert found["rule_files"] == ["alerts.yml"]
    jobs = {job["job_name"]: job for job in found["scrape_configs"]}
    assert all(name.startswith("checkpointd") for name in jobs), "the alerts look for jobs of that name"
    targets = [target for group in jobs["checkpointd"]["static_configs"] for target in group["targets"]]
    port = re.findall(r'(?m)^http = "127\.0\.0\.1:(\d+)"$', (DEPLOY / "systemd" / "checkpointd.toml").read_text())
    assert {target.rpartition(":")[2] for target in targets} == set(port)


def test_pods_are_found_by_the_labels_that_they_have() -> None:
    jobs = {job["job_name"]: job for job in yaml_of("prometheus.yml")["scrape_configs"]}
    (keep,) = [rule for rule in jobs["checkpointd-pods"]["relabel_configs"] if rule.get("action") == "keep"]
    label, port = keep["regex"].split(";")
    assert "pod_label_app_kubernetes_io_part_of" in keep["source_labels"][0]
    for name in ("job.yaml", "jobset.yaml", "daemonset.yaml"):
        text = (DEPLOY / "kubernetes" / name).read_text()
        assert f"app.kubernetes.io/part-of: {label}" in text
        assert f"- name: {port}\n" in text


# --- Grafana -------------------------------------------------------------------------------------------------


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) > 10
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & cells, panel["title"]
        assert at["x"] + at["w"] <= COLUMNS
        cells |= covered


def test_every_panel_asks_the_chosen_data_source() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    asked = [panel["datasource"] for panel in PANELS] + [target["datasource"] for _, target in TARGETS]
    assert asked
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in asked)


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}-{target['refId']}" for title, target in TARGETS])
def test_panels_ask_for_what_there_is(title: str, target: dict[str, Any]) -> None:
    found = read(target["expr"])
    assert found.unknown() == []
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= found.left()
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}


def test_variables_are_labels_that_there_are() -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert label in exposed()[name] | ADDED


NOT_SHOWN = {
    # Of the daemon itself: for alerts, and for who looks more closely.
    "checkpointd_build_info",
    "checkpointd_start_time_seconds",
    "checkpointd_leaving",
    "checkpointd_clients",
    "checkpointd_clients_max",
    "checkpointd_bandwidth_limit_bytes_per_second",
    "checkpointd_root_unreadable",
    # A small whole number that has its alert.
    "checkpointd_starts_since_commit",
    # Rare, and said by `list` with the tag.
    "checkpointd_checkpoints_damaged",
    # What others imply: the ranks that are connected, the bytes that are held.
    "checkpointd_ranks",
    "checkpointd_held_snapshots",
    # Of the pace that a trainer asks for: the status of the save says more.
    "checkpointd_rested_seconds_total",
    # Of a mirror: how many it lacks is shown, and `status` says the rest.
    "checkpointd_mirror_newest_step",
    "checkpointd_mirror_checkpoints_total",
    # The same of an export.
    "checkpointd_export_newest_step",
    "checkpointd_export_last_seconds",
    "checkpointd_export_checkpoints_total",
    # Of a histogram, its buckets are shown.
    "checkpointd_commit_seconds_count",
    "checkpointd_commit_seconds_sum",
}


def test_all_that_matters_is_shown() -> None:
    """A metric that is new is either on the dashboard, or named above with the reason."""
    shown = {name for _, target in TARGETS for name, _ in read(target["expr"]).selected}
    given = {name for name in exposed() if name.startswith("checkpointd_")}
    assert given - shown == NOT_SHOWN


def test_units_are_those_of_the_metrics() -> None:
    units = {"_seconds": {"s"}, "_bytes": {"bytes"}}
    for panel in PANELS:
        for target in panel["targets"]:
            (name, _), *_ = read(target["expr"]).selected
            expected = next((unit for ending, unit in units.items() if name.endswith(ending)), None)
            assert expected is None or panel["fieldConfig"]["defaults"]["unit"] in expected, panel["title"]
