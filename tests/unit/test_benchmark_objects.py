"""The page of the benchmark in a bucket: its columns, its figures, its goals, and the requests that the server counts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import goals, seaweed
from benchmarks import objects_page as page
from benchmarks.goals import OBJECT_GOALS
from benchmarks.report import GIB, MIB

SYSTEMS = ("obstore", "checkpointd", "checkpointd-sidecar", "s3torchconnector", "s3fs")


def saved(durable_s: float, cpu_s: float = 1.0) -> page.SavedObjects:
    return page.SavedObjects(
        call_s=0.01, safe_s=0.1, durable_s=durable_s, cpu_s=cpu_s, server_cpu_s=4.0, base_bytes=100 * MIB,
        requests={"PUT": 130, "POST": 2}, own_requests={"parts": 128},
    )  # fmt: skip


def trial(
    system: str, save_s: float = 4.0, load_s: float = 2.0, *, run: int = 0, cpu_s: float = 1.0, wrong: tuple[str, ...] = ()
) -> page.ObjectTrial:
    loaded = page.LoadedObjects(
        load_s=load_s, cpu_s=cpu_s, server_cpu_s=1.0, base_bytes=200 * MIB, wrong=list(wrong),
        requests={"GET": 130}, own_requests={},
    )  # fmt: skip
    return page.ObjectTrial(
        system=system, run=run, nbytes=GIB // 2, saved=[saved(save_s, cpu_s)], loaded=loaded,
        save_peak_bytes=700 * MIB, load_peak_bytes=260 * MIB, other_cores=0.2,
    )  # fmt: skip


def test_columns_are_rates_of_the_state_that_was_saved() -> None:
    found = {**page.SAVE_COLUMNS, **page.LOAD_COLUMNS}
    values = {column: of(trial("checkpointd")) for column, of in found.items()}
    assert (values["save MiB/s"], values["load MiB/s"]) == (128.0, 256.0)
    assert (values["save CPU s/GiB"], values["load CPU s/GiB"]) == (2.0, 2.0)
    assert (values["server, save CPU s/GiB"], values["server, load CPU s/GiB"]) == (8.0, 2.0)
    assert (values["save memory, MiB"], values["load memory, MiB"]) == (600.0, 60.0)
    assert (values["save requests"], values["load requests"]) == (132.0, 130.0)


def test_several_saves_of_a_process_count_by_their_median() -> None:
    several = replace(trial("checkpointd"), saved=[saved(1.0), saved(4.0), saved(100.0)])
    assert page.SAVE_COLUMNS["durable, s"](several) == 4.0


def test_a_trial_that_failed_gives_no_figures_and_is_told() -> None:
    failed = page.ObjectTrial(system="s3fs", run=1, nbytes=GIB, saved=[], loaded=None, error="no bucket")
    wrong = trial("checkpointd", wrong=("model/a",))
    assert page.figures_of([failed]) == {}
    assert page.flaws([failed, wrong, trial("obstore")]) == [
        "s3fs, run 2, failed: no bucket",
        "checkpointd, run 1: wrong bytes in model/a",
    ]


def measured(**seconds: tuple[float, float]) -> dict[str, float]:
    """The goals' values, for one run in which systems took these seconds to save and to load."""
    given = {name.replace("_", "-"): of for name, of in seconds.items()}
    found = [trial(name, *of) for name, of in given.items()]
    verdicts = goals.verdicts(page.figures_of(found), OBJECT_GOALS)
    return {one.goal.name: one.measured.median for one in verdicts if one.measured is not None}


def test_goals_compare_the_slower_of_both_ways_with_the_limit_and_with_the_fastest_peer() -> None:
    ours = {"checkpointd": (2.5, 2.0), "checkpointd_sidecar": (4.0, 1.0)}
    found = measured(obstore=(2.0, 1.0), s3torchconnector=(8.0, 3.0), s3fs=(6.0, 10.0), **ours)
    assert found["objects-save-limit"] == pytest.approx(0.5)
    assert found["objects-load-limit"] == pytest.approx(0.5)
    assert found["objects-save-peers"] == pytest.approx(1.5)
    assert found["objects-load-peers"] == pytest.approx(1.5)
    assert (found["objects-save-cpu"], found["objects-load-cpu"]) == (2.0, 2.0)


def test_goals_are_not_measured_without_a_limit_a_peer_or_one_of_both_ways() -> None:
    assert set(measured(checkpointd=(1.0, 1.0), checkpointd_sidecar=(1.0, 1.0))) == {"objects-save-cpu", "objects-load-cpu"}
    assert measured(obstore=(1.0, 1.0), checkpointd=(1.0, 1.0), s3fs=(1.0, 1.0)) == {}


def test_ratios_are_taken_within_each_run() -> None:
    found = [trial("obstore", 1.0), trial("checkpointd", 2.0), trial("checkpointd-sidecar", 2.0)]
    found += [trial("obstore", 10.0, run=1), trial("checkpointd", 10.0, run=1), trial("checkpointd-sidecar", 10.0, run=1)]
    [limit] = [one for one in OBJECT_GOALS if one.name == "objects-save-limit"]
    assert limit.of(page.figures_of(found)) == [0.75]  # the median of 0.5 and 1


def test_the_page_has_a_row_for_each_system_and_says_what_went_wrong() -> None:
    found = [trial(name) for name in SYSTEMS[:-1]]
    found.append(page.ObjectTrial(system="s3fs", run=0, nbytes=GIB, saved=[], loaded=None, error="no bucket"))
    text = page.page(found, SYSTEMS, command="python benchmarks/objects.py", machine="cores 2", gib=0.5)
    saving = text.partition("## Saving")[2].partition("## Loading")[0]
    assert [line.split()[1] for line in saving.splitlines() if line.startswith("| ")][2:] == list(SYSTEMS[:-1])
    assert "s3fs, run 1, failed: no bucket" in text
    assert "The floor: `obstore` alone saves at 1.00 x the best peer. It needs 2.00 CPU s/GiB to save." in text
    assert "| obstore             | save  | the server | 2.00 POST, 130 PUT |" in text


def test_requests_are_those_of_the_bucket_whatever_the_answer() -> None:
    metrics = """# TYPE SeaweedFS_s3_request_total counter
SeaweedFS_s3_request_total{bucket="other",code="200",type="PUT"} 9
SeaweedFS_s3_request_total{bucket="mine",code="200",type="PUT"} 57
SeaweedFS_s3_request_total{bucket="mine",code="412",type="PUT"} 1
SeaweedFS_s3_request_total{bucket="mine",code="206",type="GET"} 1.2e+02
SeaweedFS_s3_request_seconds_count{bucket="mine",type="GET"} 5
"""
    assert seaweed.counted(metrics, "mine") == {"PUT": 58, "GET": 120}
    assert seaweed.counted(metrics, "third") == {}
