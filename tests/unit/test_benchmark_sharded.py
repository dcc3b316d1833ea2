"""The page of the FSDP2 benchmark: loads on several numbers of ranks, of which some may have failed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

pytest.importorskip("torch")

from benchmarks import measures, sharded_page


def load(ranks: int, cold_s: float = 1.0, *, error: str = "", wrong: tuple[str, ...] = ()) -> measures.WorldLoad:
    one = measures.LoadTimes(cold_s=cold_s, cached_s=cold_s / 2, resident=0.0, wrong=list(wrong))
    times = [] if error else [one, *([replace(one, cold_s=cold_s / 4)] * (ranks - 1))]
    return measures.WorldLoad(ranks=ranks, times=times, error=error)


def trial(system: str, *loads: measures.WorldLoad, run: int = 0) -> measures.ShardTrial:
    saving = measures.SaveTimes(call_s=0.1, safe_s=0.2, done_s=1.0, durable_s=1.0, cpu_s=0.5, stored_bytes=100, reported={})
    loop = measures.LoopTimes(
        lost_s=0.2, window_s=1.0, steps=500, undisturbed_ms=1.4, undisturbed_p99_ms=1.5,
        mean_ms=2.1, p50_ms=1.4, p99_ms=3.0, max_ms=9.0,
    )  # fmt: skip
    rank = measures.ShardReport(rank=0, tensors=560, state_bytes=9, cold=saving, warm=[saving], loop=loop, base_bytes=1)
    return measures.ShardTrial(
        system=system, run=run, order=0, other_cores=0.1, reports=[rank], loads=list(loads), save_peak_bytes=1 << 20
    )


def run_of(*trials: measures.ShardTrial) -> sharded_page.ShardRun:
    return sharded_page.ShardRun(command="python x", machine={"cores": "2"}, gib=0.5, minutes=3.0, trials=list(trials))


def rows(page: str, system: str) -> list[list[str]]:
    """The cells of this system's line in every table."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {system} ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_shows_each_number_of_ranks_and_the_ratios_to_the_best_peer() -> None:
    run = run_of(trial("dcp-thread", load(2, 4.0), load(3, 2.0)), trial("checkpointd", load(2, 1.0), load(3, 1.0)))
    page = sharded_page.text(run)
    assert sharded_page.flaws(run) == []
    assert rows(page, "checkpointd")[2] == ["checkpointd", "1.00", "0.500", "1.00", "0.500", "yes"]
    assert rows(page, "checkpointd")[3][-4:] == ["0.250", "0.250", "0.500", "0.500"]
    assert rows(page, "dcp-thread")[3][-4:] == ["**1**"] * 4


def test_a_load_that_failed_or_gave_other_bytes_is_said_so_and_is_nobodys_best() -> None:
    broken = trial("dcp-thread", load(2, 4.0), load(3, error="it cannot"))
    torn = trial("dcp-process", load(2, 8.0), load(3, 8.0, wrong=("model/w",)))
    run = run_of(broken, torn, trial("checkpointd", load(2), load(3)))
    page = sharded_page.text(run)
    assert sharded_page.flaws(run) == [
        "dcp-thread, run 1, loading on 3 rank(s): it cannot",
        "dcp-process, run 1, loading on 3 rank(s): WRONG BYTES in 1 tensors",
    ]
    assert rows(page, "dcp-thread")[2] == ["dcp-thread", "4.00", "2.00", "cannot", "cannot", "yes, fails on 3"]
    assert rows(page, "dcp-process")[2][-1] == "NO: 1 tensors"
    assert rows(page, "dcp-thread")[3][-2:] == ["-", "-"]
    assert rows(page, "checkpointd")[3][-2:] == ["0.125", "0.125"]


def test_a_run_survives_json(tmp_path: Path) -> None:
    run = run_of(trial("dcp-thread", load(2), load(1, error="no")), trial("checkpointd", load(2), load(1)))
    (tmp_path / "run.json").write_text(json.dumps(asdict(run)))
    assert sharded_page.read(tmp_path / "run.json") == run


def test_a_system_that_cannot_load_on_another_number_of_ranks_says_so_and_is_no_flaw() -> None:
    run = run_of(trial("torch-checkpointing", load(2, 0.5)), trial("dcp-thread", load(2), load(3)))
    page = sharded_page.text(run)
    assert sharded_page.flaws(run) == []
    assert rows(page, "torch-checkpointing")[2] == ["torch-checkpointing", "0.500", "0.250", "cannot", "cannot", "yes"]
    assert rows(page, "dcp-thread")[3][-2:] == ["**1**", "**1**"]
