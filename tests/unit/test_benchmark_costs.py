"""Costs by size: what a disk is asked, the exponent that fits, and its drawing."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import costs, curves, roots
from benchmarks.costs import Reading, Work


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(10, 5.0), (100, 5.0), (1000, 5.0)], 0.0),
        ([(10, 2.0), (100, 20.0)], 1.0),
        ([(64, 1.0), (256, 16.0), (1024, 256.0)], 2.0),
        ([(1, 1.0), (4, 2.0)], 0.5),
        ([(10, 0.0), (100, 3.0), (1000, 30.0)], 1.0),
    ],
)
def test_the_exponent_is_that_of_the_power_law(points: list[tuple[float, float]], expected: float) -> None:
    found = curves.exponent(points)
    assert found is not None
    assert math.isclose(found, expected, abs_tol=1e-9)


@pytest.mark.parametrize("points", [[], [(10, 1.0)], [(10, 1.0), (10, 2.0)], [(10, 0.0), (100, 0.0)]])
def test_one_size_alone_has_no_exponent(points: list[tuple[float, float]]) -> None:
    assert curves.exponent(points) is None
    assert curves.exponent_words(points) == "-"


def test_an_exponent_just_below_zero_has_no_sign() -> None:
    assert curves.exponent_words([(10, 1.0), (1000, 0.999)]) == "0.00"


def test_the_drawing_has_each_curve_with_its_exponent_and_each_goal() -> None:
    drawn = curves.drawing("seconds", "tags", {"list": [(100, 0.1), (1000, 1.0)], "never": [(100, 0.0)]}, {"goal 0.3 s": 0.3})
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    assert "list: exponent 1.00" in texts
    assert "goal 0.3 s" in texts
    assert not any("never" in text for text in texts)
    assert drawn.count("<circle") == 3  # two points and one in the legend
    assert "prefers-color-scheme: dark" in drawn
    assert {"0.1", "1", "100", "1,000"} <= set(texts)


def reading(seconds: float, fsyncs: int = 0) -> Reading:
    return Reading(seconds=seconds, cpu_s=seconds, work=Work(fsyncs=fsyncs, stats=10))


def test_a_cost_is_the_median_time_and_the_last_count() -> None:
    found = iter([reading(5.0, 1), reading(1.0, 2), reading(2.0, 3)])
    cost = costs.gathered("list", 100, lambda: next(found), 3, 1e9)
    assert (cost.seconds, cost.cpu_s, cost.fsyncs, cost.runs) == (2.0, 2.0, 3, 3)


def test_an_operation_that_takes_its_whole_budget_is_run_once() -> None:
    assert costs.gathered("list", 100, lambda: reading(1.0), 7, 0.0).runs == 1


def test_a_difference_is_never_below_zero() -> None:
    less = reading(1.0, 5).less(Reading(seconds=3.0, cpu_s=0.25, work=Work(fsyncs=2, stats=11)))
    assert less == Reading(seconds=0.0, cpu_s=0.75, work=Work(fsyncs=3))


def test_tables_say_sizes_calls_and_exponents() -> None:
    known = [costs.summed_up("list", size, [reading(size / 100, size)]) for size in (100, 1000)]
    table = costs.table(known, "tags")
    assert "1,000" in table
    assert "| list      |" in costs.exponents(known)
    assert costs.points(known, "list", "fsyncs") == [(100.0, 100.0), (1000.0, 1000.0)]
    assert costs.names(known) == ["list"]


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_counts_what_a_store_asks_of_it(tmp_path: Path, durable: bool) -> None:
    async def use() -> Work:
        async with roots.counted(tmp_path, durable=durable) as (store, work):
            await store.put_if_absent("tag/object", b"12345")
            with costs.Meter(work) as meter:
                assert await store.get("tag/object") == b"12345"
                await store.list("tag")
                await store.stat("tag/object")
            assert work.fsyncs > 0
            return meter.reading.work

    assert asyncio.run(use()) == Work(fsyncs=0, stats=2, listings=1, opened=1, read_bytes=5)
