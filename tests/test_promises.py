"""CONTRIBUTING names a test of the gate for each row of the tables of failures, and for each invariant of the modules that keep
data safe.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from tests.accelerator.test_in_own_process import GATE as DEVICE_TESTS_OF_THE_GATE
from tests.test_words import invariants, product

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().partition("### Which test checks which promise?")[2].partition("\n## ")[0]
NODE = re.compile(r"`([\w/]+\.py)::(?:\w+\.)?(test_\w+)`")
HEADS = {"what we promise", "invariant"}
MORE = {
    "when `handle.wait()` returns, the checkpoint is durable on every rank",
    "a checkpoint of N ranks loads on M ranks",
    "a DeepSpeed engine saves and loads at ZeRO 0 to 3",
    "what DCP saves, DCP loads",
}
"""Promises that stand in no table of these pages."""
KEEPERS = (
    "checkpointd/commit/",
    "checkpointd/pipeline/attempt.py",
    "checkpointd/pipeline/outcome/",
    "checkpointd/pipeline/read/chunks.py",
    "checkpointd/pipeline/read/readback.py",
    "checkpointd/store/",
    "client/checkpointd_client/staging/",
)
"""The modules whose invariants all have a test in the gate."""


def rows(text: str) -> dict[str, str]:
    """The rows of the tables in Markdown: the first cell, and the rest."""
    cells = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")]
    return {first: rest[0] for first, *rest in cells if rest}


@cache
def functions(path: str) -> dict[str, bool]:
    """The tests of a file, and whether each belongs to the night."""
    tree = ast.parse((ROOT / path).read_text())
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    whole = any("nightly" in ast.unparse(node) for node in marks)
    whole |= "accelerator/simulated" in path and PurePosixPath(path).stem not in DEVICE_TESTS_OF_THE_GATE
    return {
        node.name: whole or is_of_the_night(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def is_of_the_night(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = {ast.unparse(mark) for mark in test.decorator_list}
    return "pytest.mark.nightly" in marks or any("seaweed" in argument.arg for argument in test.args.args)


def promised(page: str, heading: str) -> set[str]:
    """The first cells of the table below a heading."""
    table = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    found = set(list(rows(table))[1:])
    assert found, f"{page} has no table below {heading!r}"
    return found


def faults(promise: str, tests: str) -> Iterator[str]:
    named = NODE.findall(tests)
    if not named and promise not in HEADS:
        yield f"{promise}: name its test as `path/of/test_file.py::test_name`"
    for path, name in named:
        if name not in functions(path):
            yield f"{promise}: there is no {path}::{name}"
        elif functions(path)[name]:
            yield f"{promise}: {path}::{name} belongs to the night; name one of the gate"


def test_each_promise_has_a_test_in_the_gate() -> None:
    found = [fault for promise, tests in rows(PAGE).items() for fault in faults(promise, tests)]
    assert not found, "\n".join(found)


def test_what_is_missing_or_of_the_night_is_seen() -> None:
    rounds = "tests/faults/test_bucket_rounds.py::test_no_strike_at_a_job_in_a_bucket_loses_a_committed_checkpoint"
    cases = {"-": "name its test", f"`{rounds}`": "belongs to the night", f"`{rounds}_x`": "there is no"}
    for tests, words in cases.items():
        (fault,) = faults("a promise", tests)
        assert words in fault


def test_all_promises_are_there() -> None:
    tables = ("README.md", "## What it guarantees on a crash"), ("docs/CONCEPTS.md", "## When something fails")
    missing = set.union(MORE, *(promised(*table) for table in tables)) - rows(PAGE).keys()
    assert not missing, f"CONTRIBUTING names no test for {sorted(missing)}"
    found = {name: paths[0] for name, paths in invariants(product()).items() if paths[0].startswith(KEEPERS)}
    for keeper in KEEPERS:
        assert any(path.startswith(keeper) for path in found.values()), f"{keeper} keeps no invariant: was it renamed?"
    assert found.keys() - rows(PAGE).keys() == set(), "CONTRIBUTING names no test for these invariants"


def test_no_row_is_left_over_or_there_twice() -> None:
    firsts = [line.strip("| ").split(" | ", 1)[0] for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(firsts) == len(set(firsts)), "a row of CONTRIBUTING is there twice"
    gone = {first for first in firsts if re.fullmatch(r"[A-Z]+-\d+", first)} - invariants(product()).keys()
    assert not gone, f"CONTRIBUTING names tests for invariants that are gone: {sorted(gone)}"
