"""The page of the neighbour benchmark: ratios to the undisturbed step, medians over runs, ratios within one run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import neighbour_page as page
from benchmarks.measures import LoopTimes
from benchmarks.report import Spread


def save(mean_ms: float = 6.0, *, durable_s: float = 1.0, lost_s: float = 0.2) -> page.BesideSave:
    loop = LoopTimes(
        lost_s=lost_s, window_s=1.0, steps=100, undisturbed_ms=4.0, undisturbed_p99_ms=5.0,
        mean_ms=mean_ms, p50_ms=5.0, p99_ms=10.0, max_ms=20.0,
    )  # fmt: skip
    return page.BesideSave(call_s=0.01, durable_s=durable_s, stored_bytes=100, sidecar_cpu_s=0.5, loop=loop)


def trial(mode: str, *saves: page.BesideSave, run: int = 0, error: str = "") -> page.NeighbourTrial:
    return page.NeighbourTrial(mode=mode, run=run, order=0, saves=list(saves), other_cores=0.1, error=error)


MODES = page.modes(cores=2, limit_mib=100)
SIDECAR = next(mode.name for mode in MODES if mode.sidecar)


def run_of(*trials: page.NeighbourTrial) -> page.NeighbourRun:
    return page.NeighbourRun(
        command="benchmarks/neighbour.py", machine={"cores": "2"}, gib=0.25, compression="planes", scheduler="none",
        modes=[mode.name for mode in MODES], trials=list(trials),
    )  # fmt: skip


def test_every_way_has_a_name_of_its_own_and_the_first_two_have_no_sidecar() -> None:
    assert len({mode.name for mode in MODES}) == len(MODES)
    assert [mode.sidecar for mode in MODES[:2]] == [False, False]
    assert all(mode.sidecar for mode in MODES[2:])
    assert [mode.saves for mode in MODES] == [False, *[True] * (len(MODES) - 1)]


def test_steps_are_compared_with_the_undisturbed_ones_of_their_process() -> None:
    assert page.mean_ratio(save(6.0)) == 1.5
    assert page.p99_ratio(save()) == 2.0


def test_a_trial_counts_by_the_median_of_its_saves() -> None:
    assert page.of_trial(trial(SIDECAR, save(4.0), save(6.0), save(40.0)), page.mean_ratio) == 1.5


def test_a_ratio_is_taken_within_each_run() -> None:
    trials = [
        trial(page.IN_PROCESS.name, save(8.0), run=0),
        trial(SIDECAR, save(4.0), run=0),
        trial(page.IN_PROCESS.name, save(80.0), run=1),
        trial(SIDECAR, save(60.0), run=1),
        trial(SIDECAR, save(1.0), run=2),
    ]
    assert page.ratio(trials, SIDECAR, page.IN_PROCESS.name, page.mean_ratio) == Spread(0.625, 0.5, 0.75)


def test_what_was_not_lost_has_no_ratio() -> None:
    trials = [trial(page.IN_PROCESS.name, save(lost_s=-0.1)), trial(SIDECAR, save(lost_s=0.1))]
    lost = dict(page.RATIOS)["lost"]
    assert page.ratio(trials, SIDECAR, page.IN_PROCESS.name, lost) is None


def test_the_page_has_a_line_for_each_way_in_order_and_names_what_failed() -> None:
    run = run_of(
        trial(SIDECAR, save()),
        trial(page.NO_SAVE.name, save(4.0)),
        trial(page.IN_PROCESS.name, save()),
        trial(MODES[-1].name, error="the sidecar did not start"),
    )
    lines = page.text(run).splitlines()
    first = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and ":--" not in line]
    assert first == ["way", page.NO_SAVE.name, page.IN_PROCESS.name, SIDECAR, "way", SIDECAR]
    assert f"- {MODES[-1].name}, run 1 failed: the sidecar did not start" in lines


@pytest.mark.parametrize(("others", "said"), [(0.1, False), (1.5, True)])
def test_a_machine_that_was_not_quiet_is_said_at_the_top(others: float, said: bool) -> None:
    text = page.text(run_of(replace(trial(SIDECAR, save()), other_cores=others)))
    assert ("not quiet" in text) == said


@pytest.mark.parametrize("failed", [True, False])
def test_a_page_can_be_made_where_little_was_measured(failed: bool) -> None:
    only = trial(page.NO_SAVE.name, *([] if failed else [save()]), error="x" if failed else "")
    assert page.text(run_of(only)).startswith("# Being a good neighbour")


def test_a_run_survives_json() -> None:
    run = run_of(trial(SIDECAR, save(), save(7.0)), replace(trial(SIDECAR, run=1), error="no"))
    assert page.run_of(json.loads(json.dumps(asdict(run)))) == run
