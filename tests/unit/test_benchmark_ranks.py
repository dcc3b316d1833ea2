"""The benchmark of the number of ranks at its smallest size, so that it goes on working when the code changes."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmark is not installed

from benchmarks import ranks


@pytest.mark.nightly
def test_every_cost_is_measured_at_every_number_of_ranks(tmp_path: Path) -> None:
    found = ranks.measure(tmp_path, votes=(2, 4), load=(2, 3), tensors=5, looks=(2, 3), runs=1)
    assert [(cost.name, cost.size) for cost in found.coordinator] == [
        (name, count) for count in (2, 4) for name in (ranks.FIRST, ranks.KNOWN)
    ]
    assert [(cost.name, cost.size) for cost in found.load] == [
        (name, count) for count in (2, 3) for name in (ranks.METADATA, ranks.LOAD, ranks.HALF, ranks.TWICE)
    ]
    assert [cost.size for cost in found.dedup] == [2, 3]
    assert all(cost.fsyncs > 0 for cost in found.coordinator)
    assert all(cost.read_bytes > 0 for cost in found.load)
    page = ranks.page(found, "ranks.py")
    assert all(f"| {name} " in page for name in (ranks.FIRST, ranks.KNOWN, ranks.METADATA, ranks.LOAD, ranks.LOOK))
    ElementTree.fromstring(ranks.picture(found))
    assert not list(tmp_path.iterdir())
