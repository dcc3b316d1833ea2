"""The goals: how they are computed from what was measured, their verdicts, and the page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

pytest.importorskip("torch")

from benchmarks import costs, document, figures, goals, measures, report
from benchmarks.costs import Reading, Work
from benchmarks.figures import Figures
from benchmarks.goals import Goal, Of
from benchmarks.limits import Limits
from benchmarks.measures import LoadTimes, LoopTimes, RankReport, SaveTimes, Trial

RUNS = {"a": {0: 2.0, 1: 20.0, 2: 6.0}, "b": {0: 1.0, 1: 40.0}, "zero": {0: 0.0}}


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (goals.value("a"), [2.0, 20.0, 6.0]),
        (goals.value("b", 1e3), [1000.0, 40_000.0]),
        (goals.value("missing"), []),
        (goals.ratio("a", "b"), [2.0, 0.5]),
        (goals.ratio("a", "missing"), []),
        (goals.ratio("a", "zero"), []),
        (goals.largest(goals.value("a"), goals.value("b")), [20.5]),
        (goals.smallest(goals.value("a"), goals.value("b")), [6.0]),
        (goals.largest(goals.value("a"), goals.value("missing")), []),
        (goals.smallest(goals.value("a"), goals.value("missing")), []),
    ],
)
def test_a_goal_is_computed_within_each_run(of: Of, expected: list[float]) -> None:
    assert of(RUNS) == expected


def test_a_limit_of_the_machine_is_for_the_whole_state() -> None:
    known: Figures = {"load": {0: 3.0}, "limit": {0: 0.5}, "gib": {0: 2.0}}
    assert goals.over_limit("load", "limit", "gib")(known) == [3.0]
    assert goals.over_limit("load", "limit", "missing")(known) == []


def test_the_best_peer_is_that_with_the_smallest_median() -> None:
    known: Figures = {
        "1/checkpointd/durable": {0: 1.0, 1: 1.0},
        "1/torch.save/durable": {0: 1.0, 1: 9.0},
        "1/dcp-thread/durable": {0: 2.0, 1: 2.0},
        "1/checkpointd-raw/durable": {0: 0.1, 1: 0.1},
    }
    assert goals.over_best("checkpointd", report.DURABLE)(known) == [0.5, 0.5]
    assert goals.over_best("checkpointd", report.DURABLE)({}) == []


def test_a_blocking_save_is_no_peer_for_steps() -> None:
    known: Figures = {f"1/{system}/step p99": {0: p99} for system, p99 in [("checkpointd", 2.0), ("torch.save", 1.0)]}
    assert goals.over_best("checkpointd", report.P99)(known) == []
    assert goals.over_best("checkpointd", report.P99)(known | {"1/dcp-thread/step p99": {0: 4.0}}) == [0.5]


@pytest.mark.parametrize(
    ("measured", "at_least", "met", "words"),
    [
        (0.4, False, True, "met"),
        (0.5, False, True, "met"),
        (0.55, False, False, "missed by 10.0%"),
        (1.6, False, False, "missed: 3.2 times the limit"),
        (0.5, True, True, "met"),
        (0.4, True, False, "missed: 20% too little"),
        (None, False, None, "not measured: make bench"),
    ],
)
def test_a_verdict_says_by_how_much(measured: float | None, at_least: bool, met: bool | None, words: str) -> None:
    known: Figures = {} if measured is None else {"x": {0: measured}}
    goal = Goal(name="name", words="what", of=goals.value("x"), limit=0.5, unit=" s", at_least=at_least)
    verdict = goals.verdicts(known, [goal])[0]
    assert (verdict.met, verdict.words) == (met, words)
    lines = goals.lines([verdict])
    assert lines[0].startswith("name  ")
    assert lines[0].endswith(f"goal at {'least' if at_least else 'most'} 0.5 s: {words}")
    assert lines[1] == f"{int(met is True)} of 1 goals met, {int(met is False)} missed, {int(met is None)} not measured"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """The trials and the scripts that `compare.measure` starts, with their runs; the fourth trial is cut off."""
    from benchmarks import compare

    started: list[tuple[int, str]] = []
    cut_off = [4]

    def of_trial(_setting: object, _options: object, run: int, _place: int, system: str, _ranks: int) -> Trial:
        started.append((run, system))
        if [len(started)] == cut_off:
            cut_off.clear()
            raise RuntimeError("the machine was needed for something else")
        return trial(system, 1.0, load_s=1.0, run=run)

    def of_script(_options: object, _out: Path, part: str, run: document.Run) -> bool:
        started.append((0, part))
        run.others[part] = {0: 1.0}
        return True

    limits = one_run().limits[0]
    monkeypatch.setattr(compare, "_trial", of_trial)
    monkeypatch.setattr(compare, "_script", of_script)
    monkeypatch.setattr(compare, "_limits", lambda _: limits)
    monkeypatch.setattr(compare, "_known", lambda systems: systems)
    monkeypatch.setattr(compare.environment, "code", lambda: "this code")
    return started


def test_a_run_that_was_stopped_goes_on(measured: list[tuple[int, str]], tmp_path: Path) -> None:
    from benchmarks import compare

    kept = tmp_path / "deeper" / "bench.json"
    given = ["--parts", "peers,calls", "--systems", "checkpointd,dcp-thread", "--ranks", "1", "--runs", "3", "--gib", "0.01"]
    options = compare.arguments([*given, "--json", str(kept), "--dir", str(tmp_path)])
    with pytest.raises(RuntimeError):
        compare.measure(options)
    lost = measured.pop()
    run = compare.measure(options)
    assert len(measured) == len(set(measured)) == 7
    assert lost in measured
    assert {(one.run, one.system) for one in run.trials} == {(n, s) for n in range(3) for s in ("checkpointd", "dcp-thread")}
    assert (len(run.limits), run.others, run.parts) == (3, {"calls": {0: 1.0}}, ["calls"])
    assert document.read(kept) == run
    compare.measure(options)
    assert len(measured) == 7


def test_measurements_of_other_code_are_no_run_with_new_ones(measured: list[tuple[int, str]], tmp_path: Path) -> None:
    from benchmarks import compare

    kept = tmp_path / "bench.json"
    document.write(replace(one_run(), code="older code"), kept)
    with pytest.raises(SystemExit, match=r"keeps measurements of other code or of other sizes.*--render"):
        compare.measure(compare.arguments(["--json", str(kept), "--dir", str(tmp_path), "--gib", "0.01", "--big-gib", "0.01"]))
    assert not measured


def test_every_goal_has_a_name_of_its_own_and_can_go_unmeasured() -> None:
    assert len({goal.name for goal in goals.GOALS}) == len(goals.GOALS)
    found = goals.verdicts({})
    assert [verdict.met for verdict in found] == [None] * len(goals.GOALS)
    assert all(verdict.words.startswith("not measured: ") for verdict in found)


def test_every_script_that_measures_a_goal_is_asked_for_its_figures() -> None:
    from benchmarks import compare

    named = {goal.command for goal in goals.GOALS} - {goals.ALL}
    assert named == {goals.SOME.format(script) for script in compare._SCRIPTS}


# --- a whole run ---------------------------------------------------------------------------------------------


def trial(system: str, durable_s: float, *, load_s: float, run: int = 0) -> Trial:
    saved = SaveTimes(call_s=0.01, safe_s=0.1, done_s=durable_s, durable_s=durable_s, cpu_s=0.1, stored_bytes=1, reported={})
    loop = LoopTimes(
        lost_s=durable_s, window_s=1.0, steps=5, undisturbed_ms=1.0, undisturbed_p99_ms=1.0,
        mean_ms=2.0, p50_ms=1.0, p99_ms=durable_s, max_ms=9.0,
    )  # fmt: skip
    load = LoadTimes(
        cold_s=load_s, cached_s=load_s, first_s=1.2 * load_s, first_cold_s=load_s, plain_s=load_s / 1.1,
        first_plain_s=load_s / 1.3, resident=0.0, wrong=[],
    )  # fmt: skip
    ranks = RankReport(
        rank=0, tensors=1, state_bytes=1, setup_s=0.1, cold=saved, warm=[saved], loop=loop, python=loop, load=load,
        base_bytes=0, load_base_bytes=0,
    )  # fmt: skip
    return Trial(
        system=system, ranks=1, run=run, order=0, other_cores=0.0, reports=[ranks], save_peak_bytes=1, load_peak_bytes=1,
        load_private_bytes=200 << 20,
    )  # fmt: skip


def one_run() -> document.Run:
    limits = Limits(
        memcpy_reused=0.1, memcpy_fresh=0.2, write_buffered=1.0, write_buffered_fsync=1.0, write_direct_fsync=1.0,
        read_cached=0.2, read_dropped=0.6, read_direct=0.5,
    )  # fmt: skip
    sizes = [costs.summed_up("list", size, [Reading(seconds=size / 1000, cpu_s=1.0, work=Work())]) for size in (100, 10_000)]
    looks = costs.summed_up("look at the checkpoint before", 64, [Reading(seconds=0.1, cpu_s=0.1, work=Work(stats=64))])
    return document.Run(
        command="compare.py",
        machine={"cores": "2"},
        gib=2.0,
        gate_s=0.2,
        limits=[limits],
        trials=[trial("checkpointd", 1.0, load_s=0.3), trial("dcp-thread", 2.0, load_s=0.5)],
        big_gib=4.0,
        big_limits=[replace(limits, memcpy_reused=0.5)],
        big=[trial("torch.save", 2.0, load_s=2.0), trial("checkpointd", 1.0, load_s=2.6)],
        costs={"history": sizes, "dedup": [looks]},
        others={"codec/bf16/ratio": {0: 1.4}},
    )


def test_goals_are_computed_from_a_run() -> None:
    found = {verdict.goal.name: verdict for verdict in goals.verdicts(document.figures_of(one_run()))}
    measured = {
        "load-cached-dcp": 0.6,
        "load-cached-memcpy": 1.5,  # 0.3 s for 2 GiB at 0.1 s/GiB
        "load-first": 1.2,
        "load-dropped-disk": 1.1,
        "load-big-dropped": 1.3,
        "load-big-cached": 1.3,  # 2.6 s for 4 GiB at 0.5 s/GiB
        "load-memory": 200.0,
        "lost-in-process": 0.5,
        "history-list": 10.0,
        "codec-bf16-ratio": 1.4,
    }
    for name, expected in measured.items():
        spread = found[name].measured
        assert spread is not None, name
        assert spread.median == pytest.approx(expected), name
    assert found["lost-in-process"].met
    assert found["history-list"].met is False
    assert found["history-list"].words == "missed: 33 times the limit"
    assert found["dedup-look"].met is None  # one size has no exponent
    assert found["step-p99"].met is None  # the sidecar was not measured


def test_a_run_survives_json(tmp_path: Path) -> None:
    document.write(one_run(), tmp_path / "run.json")
    assert document.read(tmp_path / "run.json") == one_run()


def test_the_page_has_the_overhead_of_each_way_to_save() -> None:
    ways = ("checkpointd, full speed", "checkpointd, governed", "checkpointd-sidecar, governed")
    ratios = {f"overhead/{way}/step over undisturbed": {0: 1.01 + n / 10} for n, way in enumerate(ways)}
    run = replace(one_run(), others={**ratios, "overhead/checkpointd, governed/worker: wake-ups": {0: 83.0}})
    text = document.text(run)
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    assert rows["one save"] == list(ways)
    assert rows["worker: wake-ups"] == ["-", "83.0", "-"]
    found = {verdict.goal.name: verdict for verdict in goals.verdicts(document.figures_of(run))}["overhead-governed"]
    assert found.measured is not None
    assert found.measured.median == pytest.approx(1.21)
    assert found.met is False
    assert "training while it runs" not in document.text(one_run())


def test_the_page_has_the_verdicts_and_the_pictures() -> None:
    text = document.text(one_run())
    assert "| load-first " in text
    assert "**missed: 33 times the limit**" in text
    assert "not measured: python benchmarks/calls.py --figures OUT" in text
    assert "(history.svg)" in text
    assert "[HISTORY](HISTORY.md)" in text
    assert "## 4 GiB on one rank" in text
    assert "| one thread           | 2 GiB, s/GiB | 4 GiB, s/GiB |" in text
    assert text.index("## Goals") < text.index("(speed.svg)") < text.index("(history.svg)") < text.index("## Limits")
    alone = document.text(replace(one_run(), costs={}, big=[], others={}))
    assert "history.svg" not in alone
    assert "GiB on one rank" not in alone


@pytest.mark.parametrize("left", ["trials", "big", "costs", "others"])
def test_the_page_can_be_of_one_part_alone(left: str) -> None:
    parts = {"trials": [], "big": [], "costs": {}, "others": {}, "limits": []}
    text = document.text(replace(one_run(), **{name: none for name, none in parts.items() if name != left}))
    assert "## Goals" in text
    assert "## Notes" in text


def test_figures_of_a_script_are_read_by_run_or_as_a_list(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    figures.write(path, {"a": {0: 1.0, 2: 3.0}})
    assert figures.read(path) == {"a": {0: 1.0, 2: 3.0}}
    path.write_text(json.dumps({"b": [1.0, 2.0]}))
    assert figures.read(path) == {"b": {0: 1.0, 1: 2.0}}


def test_a_failed_trial_has_no_figures_and_a_failed_load_none() -> None:
    failed = replace(trial("checkpointd", 1.0, load_s=1.0), error="it broke")
    assert figures.of_trials([failed]) == {}
    load = measures.WorldLoad(ranks=3, times=[LoadTimes(cold_s=2.0, cached_s=1.0, resident=0.0, wrong=[])])
    bad = measures.WorldLoad(ranks=1, times=[], error="it cannot")
    shards = measures.ShardTrial(
        system="dcp-thread", run=1, order=0, other_cores=0.0, reports=[], loads=[load, bad], save_peak_bytes=0
    )  # fmt: skip
    assert figures.of_shards([shards]) == {
        "fsdp2/3/dcp-thread/load, dropped": {1: 2.0},
        "fsdp2/3/dcp-thread/load, cached": {1: 1.0},
    }


def test_the_fsdp2_goal_compares_systems_that_there_are() -> None:
    from benchmarks.sharded_systems import SYSTEMS

    ways = {ranks: {f"fsdp2/{ranks}/{system}/load, dropped": {0: 2.0} for system in SYSTEMS} for ranks in (2, 1, 3)}
    goal = next(goal for goal in goals.GOALS if goal.name == "load-fsdp2")
    assert goal.of(figures.joined(ways.values())) == [1.0]
    assert goal.of(figures.joined([ways[2], ways[1]])) == []
