"""benchmarks/gpu.py on the simulated device: its logic and its counts. Times mean nothing here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))  # the benchmark is not installed

from benchmarks import gpu

ONE = gpu.Run(
    state_bytes=4 << 30, tensors=144, arena_copy_bps=20 * (1 << 30), pinned_copy_bps=22 * (1 << 30), call_s=0.002,
    staging_s=0.4, stall_s=0.001, load_s=2.0, steps=100, saves=4, undisturbed_s=10.0, with_saves_s=10.2, counted=None,
)  # fmt: skip


def test_ratios_are_those_of_one_run() -> None:
    fast = replace(ONE, arena_copy_bps=40 * (1 << 30), staging_s=0.1, undisturbed_s=1.0, with_saves_s=3.0)
    page = gpu.page([ONE, fast, ONE], {"device": "a device"})
    rows = {name.strip(): value.strip() for _, name, value, _ in (line.split("|") for line in page.splitlines() if "|" in line)}
    assert rows["staging / pinned copy"] == "0.500 (0.500–1.00)"
    assert rows["steps with saves / without"] == "1.02 (1.02–3.00)"
    assert rows["lost to one save, ms"] == "50.0 (50.0–500)"
    assert rows["load, GiB/s"] == "2.00"
    assert page.startswith("device: a device\nstate: 4096 MiB in 144 tensors; 3 run(s)\n")
    assert "Counts" not in page


def test_it_measures_and_counts(sim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--mib", "8", "--layers", "4", "--batch", "8", "--steps", "3", "--every", "2", "--runs", "2", "--simulated"]
    where = ["--dir", str(tmp_path), "--json", str(tmp_path / "out.json")]
    assert gpu.main([*given, *where]) == 0
    page = capsys.readouterr().out
    assert all(f"| {name}" in page for name, _ in gpu.ROWS + gpu.COUNTS)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["machine"]["times by"] == "the host's clock"
    for run in kept["runs"]:
        assert (run["tensors"], run["saves"], run["steps"]) == (12, 2, 3)
        assert run["state_bytes"] <= run["counted"]["copied_bytes"] < run["state_bytes"] * 1.1
        assert run["state_bytes"] <= run["counted"]["read_bytes"]
        assert 0 < run["counted"]["call_launches"] <= run["counted"]["launches"]
    assert kept["runs"][0]["counted"] == kept["runs"][1]["counted"]


def test_launches_of_the_call_do_not_grow_with_the_tensors(sim: ModuleType, tmp_path: Path) -> None:
    def launches(layers: int) -> int:
        out = tmp_path / f"{layers}.json"
        given = ["--mib", "1", "--layers", str(layers), "--batch", "2", "--steps", "1", "--runs", "1", "--simulated"]
        assert gpu.main([*given, "--dir", str(tmp_path), "--json", str(out)]) == 0
        return int(json.loads(out.read_text())["runs"][0]["counted"]["call_launches"])

    assert 0 < launches(32) <= launches(4)
