"""The tables of the benchmark: medians, ratios within one run, who is the best peer, and how it is drawn."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import measures, picture, report


def saving(durable_s: float, *, call_s: float = 0.01, cpu_s: float = 0.1) -> measures.SaveTimes:
    return measures.SaveTimes(
        call_s=call_s, safe_s=0.1, done_s=durable_s, durable_s=durable_s, cpu_s=cpu_s, stored_bytes=100, reported={}
    )


def rank(number: int, warm: list[measures.SaveTimes], *, lost_s: float = 0.2, wrong: list[str]) -> measures.RankReport:
    loop = measures.LoopTimes(
        lost_s=lost_s, window_s=1.0, steps=500, undisturbed_ms=1.4, undisturbed_p99_ms=1.5,
        mean_ms=2.1, p50_ms=1.4, p99_ms=3.0 + number, max_ms=9.0,
    )  # fmt: skip
    return measures.RankReport(
        rank=number, tensors=700, state_bytes=100, setup_s=0.0, cold=saving(2.0), warm=warm, loop=loop, python=loop,
        load=measures.LoadTimes(cold_s=1.0, cached_s=0.5, resident=0.0, wrong=wrong),
        base_bytes=50 * report.MIB, load_base_bytes=60 * report.MIB,
    )  # fmt: skip


def trial(
    system: str,
    durable_s: float,
    *,
    run: int = 0,
    lost_s: float = 0.2,
    error: str = "",
    wrong: tuple[str, ...] = (),
) -> measures.Trial:
    reports = [] if error else [rank(0, [saving(durable_s)], lost_s=lost_s, wrong=list(wrong))]
    return measures.Trial(
        system=system, ranks=1, run=run, order=0, other_cores=0.0, reports=reports,
        save_peak_bytes=150 * report.MIB, load_peak_bytes=55 * report.MIB, error=error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [([3.0], 3.0, 3.0, 3.0), ([5.0, 1.0, 2.0], 2.0, 1.0, 5.0), ([4.0, 1.0, 2.0, 10.0], 3.0, 1.0, 10.0)],
)
def test_a_spread_is_the_median_and_the_range(values: list[float], median: float, low: float, high: float) -> None:
    assert report.spread(values) == report.Spread(median, low, high)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1137.4, "1137"), (99.94, "99.9"), (12.345, "12.3"), (1.0, "1.00"), (0.1234, "0.123"),
        (0.0321, "0.0321"), (0.000271, "0.000271"), (-0.16, "-0.160"), (0.9999, "1.00"),
    ],
)  # fmt: skip
def test_a_figure_has_three_significant_digits(value: float, text: str) -> None:
    assert report.figure(value) == text


def test_a_spread_without_a_visible_range_shows_none() -> None:
    assert str(report.Spread(1.0, 0.9999, 1.0001)) == "1.00"
    assert str(report.Spread(1.0, 0.5, 2.0)) == "1.00 (0.500–2.00)"


def test_a_figure_is_the_worst_rank_of_each_save_and_the_median_of_the_saves() -> None:
    # Saves: the worst ranks took 4, 3 and 9 s; neither rank's own median is 4.
    one = trial("dcp-thread", 1.0)
    ranks = [
        rank(0, [saving(4.0, cpu_s=1.0), saving(1.0, cpu_s=1.0), saving(2.0, cpu_s=1.0)], wrong=[]),
        rank(1, [saving(1.0, cpu_s=0.5), saving(3.0, cpu_s=0.5), saving(9.0, cpu_s=0.5)], wrong=[]),
    ]
    both = replace(one, reports=ranks)
    assert report.DURABLE.of(both) == 4.0
    assert report.CPU.of(both) == 1.5  # work adds up over the ranks, time does not
    assert report.P99.of(both) == 4.0
    assert report.MEMORY.of(both) == 50.0  # 150 seen, less 50 of each rank


def test_less_memory_at_the_peak_than_before_is_no_memory() -> None:
    assert report.LOAD_MEMORY.of(trial("torch.save", 1.0)) == 0.0


def test_a_ratio_is_taken_within_each_run() -> None:
    # The second run was slow for both: the ratio of medians would be 3 / 2.
    durable = {"torch.save": [1.0, 10.0, 2.0], "checkpointd": [3.0, 5.0, 1.0]}
    trials = [trial(name, value, run=run) for name, values in durable.items() for run, value in enumerate(values)]
    got = report.results(trials, 1).ratio("checkpointd", "torch.save", report.DURABLE)
    assert got == report.Spread(0.5, 0.5, 3.0)


def test_a_run_that_one_side_lacks_is_in_no_ratio() -> None:
    trials = [
        trial("torch.save", 1.0, run=0),
        trial("checkpointd", 2.0, run=0),
        trial("torch.save", 1.0, run=1, error="disk full"),
        trial("checkpointd", 50.0, run=1),
    ]
    results = report.results(trials, 1)
    assert results.ratio("checkpointd", "torch.save", report.DURABLE) == report.Spread(2.0, 2.0, 2.0)
    assert results.ratio("checkpointd", "dcp-thread", report.DURABLE) is None


def test_no_ratio_expresses_a_loss_that_is_not_above_zero() -> None:
    results = report.results([trial("torch.save", 1.0, lost_s=-0.1), trial("checkpointd", 1.0)], 1)
    assert results.ratio("checkpointd", "torch.save", report.LOST) is None
    assert results.ratio("torch.save", "checkpointd", report.LOST) is None


def test_the_best_peer_is_never_ours_nor_one_that_failed() -> None:
    trials = [
        trial("checkpointd", 0.1),
        trial("dcp-thread", 3.0),
        trial("torch-checkpointing", 2.0),
        trial("dcp-process", 0.2, error="it broke"),
    ]
    assert report.results(trials, 1).best_peer(report.DURABLE) == "torch-checkpointing"
    assert report.results([trial("checkpointd", 0.1)], 1).best_peer(report.DURABLE) is None


def test_a_blocking_save_is_not_compared_by_the_steps_beside_it() -> None:
    results = report.results([trial("torch.save", 1.0), trial("dcp-thread", 2.0), trial("checkpointd", 1.0)], 1)
    assert results.best_peer(report.DURABLE) == "torch.save"
    assert results.best_peer(report.P99) == "dcp-thread"
    row = report.ratio_table([results], [report.DURABLE, report.P99]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["1", "torch.save", "**1**", "-"]


def test_results_keep_to_their_number_of_ranks_and_put_ours_last() -> None:
    trials = [trial("checkpointd", 1.0), trial("torch.save", 1.0), replace(trial("dcp-thread", 1.0), ranks=2)]
    assert report.results(trials, 1).systems == ("torch.save", "checkpointd")
    assert report.results(trials, 2).systems == ("dcp-thread",)


def test_wrong_bytes_of_any_run_are_said() -> None:
    trials = [trial("dcp-thread", 1.0, run=0), trial("dcp-thread", 1.0, run=1, wrong=("model/a", "model/b"))]
    results = report.results([*trials, trial("torch.save", 1.0)], 1)
    assert report.wrong(results, "dcp-thread") == ["model/a", "model/b"]
    assert report.exactness(results) == {"torch.save": "yes", "dcp-thread": "NO: 2 tensors"}


def test_the_ratio_table_marks_the_best_peer_and_puts_ours_against_it() -> None:
    results = report.results([trial("torch.save", 2.0), trial("dcp-thread", 4.0), trial("checkpointd", 1.0)], 1)
    lines = report.ratio_table([results], [report.DURABLE]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["ranks", "system", "durable"]
    assert cells[2:] == [["1", "torch.save", "**1**"], ["1", "dcp-thread", "2.00"], ["1", "checkpointd", "0.500"]]


def test_a_table_lines_up_as_text() -> None:
    drawn = report.table(["system", "s"], [["a", "1.00 (0.90–1.10)"], ["much longer", "2"]])
    assert drawn.splitlines() == [
        "| system      |                s |",
        "| :---------- | ---------------: |",
        "| a           | 1.00 (0.90–1.10) |",
        "| much longer |                2 |",
    ]


def test_a_trial_survives_json() -> None:
    before = trial("dcp-thread", 1.0, wrong=("model/a",))
    assert measures.trial(json.loads(json.dumps(asdict(before)))) == before


def test_the_picture_is_that_of_the_results() -> None:
    assert (picture.HERE / "speed.svg").read_text() == picture.picture((picture.HERE / "RESULTS.md").read_text())


def test_the_picture_takes_the_medians_of_the_first_table_and_the_systems_that_there_are() -> None:
    page = """
| system | lost, s | durable, s |
| :--- | ---: | ---: |
| torch.save | 2.0 (1.0-3.0) | 1.00 |
| checkpointd | 0.5 (0.1-0.9) | 0.25 |

| system | load, cache dropped, s |
| :--- | ---: |
| torch.save | 4.0 |
| checkpointd | 3.0 |

| system | lost, s |
| :--- | ---: |
| torch.save | 9.0 |
"""
    assert picture.medians(page, "lost, s") == {"torch.save": 2.0, "checkpointd": 0.5}
    drawn = picture.picture(page)
    shown = [text in drawn for text in (">2 s<", ">0.5 s<", ">0.25 s<", ">4 s<", ">3 s<", ">9 s<", "dcp")]
    assert shown == [True, True, True, True, True, False, False]


def test_a_page_without_the_column_draws_nothing() -> None:
    with pytest.raises(ValueError, match="no column 'lost, s'"):
        picture.picture("| system | call, s |\n| :--- | ---: |\n| torch.save | 1.0 |\n")
