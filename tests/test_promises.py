"""CONTRIBUTING names a gate test for each promise of README and docs/CONCEPTS, and of the modules that keep data safe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.test_words import invariants, product

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().partition("### Which test checks which promise?")[2].partition("\n## ")[0]
NODE = re.compile(r"`([\w/]+\.py)::(?:\w+\.)?(test_\w+)`")
HEADS = {"what we promise", "invariant"}
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
    return {
        node.name: whole or any(ast.unparse(mark) == "pytest.mark.nightly" for mark in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def promised(page: str, heading: str) -> set[str]:
    """The first cells of the table below a heading."""
    table = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    return set(list(rows(table))[1:])


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
    missing = set.union(*(promised(*table) for table in tables)) - rows(PAGE).keys()
    assert not missing, f"CONTRIBUTING names no test for {sorted(missing)}"
    kept = {name for name, paths in invariants(product()).items() if paths[0].startswith(KEEPERS)}
    assert len(kept) > 100
    assert kept - rows(PAGE).keys() == set(), "CONTRIBUTING names no test for these invariants"
