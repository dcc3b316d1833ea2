"""The benchmark of the history at its smallest size, so that it goes on working when the code changes that it measures."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import costs, history


@pytest.mark.nightly
def test_every_operation_is_measured_at_every_size(tmp_path: Path) -> None:
    found = history.measure(tmp_path, (3, 6), (2, 3), 1)
    assert {(cost.name, cost.size) for cost in found.tags} == {
        (name, size) for name in (*history.OPERATIONS, history.COMMAND) for size in (3, 6)
    }
    assert [(cost.name, cost.size) for cost in found.wide] == [(name, 2) for name in history.ON_WIDE]
    assert found.wide_ranks == 3
    assert found.saves == 3
    assert 0 <= found.pending <= 3
    counts = {cost.name: cost for cost in found.tags if cost.size == 6}
    assert counts["start"].fsyncs > 0
    assert counts["list"].read_bytes > 0
    assert counts["one removal"].stats > 0
    page = history.page(found, "history.py")
    assert all(f"| {name} " in page for name in costs.names(found.tags))
    assert "list: exponent" in history.picture(found)
    ElementTree.fromstring(history.picture(found))
    assert not list(tmp_path.iterdir())


def test_the_summary_of_strace_is_read() -> None:
    printed = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000060           1        60           newfstatat
 40.00    0.000040           2        20         5 openat
------ ----------- ----------- --------- --------- ----------------
100.00    0.000100           1        80         5 total
"""
    assert history.counts_of(printed) == {"newfstatat": 60, "openat": 20}
