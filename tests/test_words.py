"""One name, one thing: what the words of docs/GLOSSARY.md and the names of invariants promise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("sources")

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("checkpointd", "client/checkpointd_client")

INVARIANT = re.compile(r"^  ([A-Z][A-Z0-9]*-[1-9][0-9]*)  \S", re.MULTILINE)
UNNAMED = re.compile(r"^  ([A-Z][0-9]{1,2})  \S", re.MULTILINE)
"""How invariants were called that only their own file could tell apart."""
REFERENCE = re.compile(r"\b([A-Z][A-Z0-9]*)-([1-9][0-9]*)\b")

SAME_IDEA = {
    "Slot": "the slot of the arena, and the message that hands it to the sidecar",
    "Config": "torchtitan asks for a nested class of this name in each of its managers",
}
"""Names that two classes have because they are one idea on both sides of a protocol."""


@cache
def product() -> dict[str, str]:
    """The text of every module that is shipped, by path."""
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def docstring(text: str) -> str:
    return ast.get_docstring(parsed(text), clean=False) or ""


def invariants(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules that define each invariant."""
    found: dict[str, list[str]] = {}
    for path, text in sources.items():
        for name in INVARIANT.findall(docstring(text)):
            found.setdefault(name, []).append(path)
    return found


def badly_named(sources: Mapping[str, str]) -> Iterator[str]:
    for path, text in sources.items():
        for name in UNNAMED.findall(docstring(text)):
            yield f"{path}: the invariant {name} cannot be searched for; instead: a family of its own, as COMMIT-1"
    for name, paths in invariants(sources).items():
        if len(paths) > 1:
            yield f"{name} is defined in {', '.join(paths)}; instead: a family of its own for each"


def undefined(sources: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[str]:
    defined = invariants(sources)
    families = {name.rpartition("-")[0] for name in defined}
    for path, text in texts.items():
        for family, number in REFERENCE.findall(text):
            if family in families and f"{family}-{number}" not in defined:
                yield f"{path}: {family}-{number} is defined nowhere"


def test_every_invariant_has_one_name() -> None:
    assert len(invariants(product())) > 300
    found = list(badly_named(product()))
    assert not found, "\n".join(found)


def test_every_invariant_that_is_named_is_defined() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    found = list(undefined(product(), product() | texts))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('"""A.\n\nInvariants\n  K1  It holds.\n"""', "cannot be searched for"),
        ('"""A.\n\nInvariants\n  OWN-1  It holds.\n"""', "is defined in a.py, b.py"),
    ],
)
def test_a_badly_named_invariant_is_found(text: str, complaint: str) -> None:
    found = list(badly_named({"a.py": '"""B.\n\nInvariants\n  OWN-1  Another holds.\n"""', "b.py": text}))
    assert len(found) == 1
    assert complaint in found[0]


def test_an_invariant_that_is_defined_nowhere_is_found() -> None:
    sources = {"a.py": '"""A.\n\nInvariants\n  OWN-1  It holds.\n"""'}
    assert list(undefined(sources, {"b.py": "# OWN-1, XXH3-64, SHA-256"})) == []
    assert list(undefined(sources, {"b.py": "# " + "OWN-" + "2"})) == ["b.py: OWN-" + "2 is defined nowhere"]


def classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules that define a class of each name, at any depth."""
    found: dict[str, list[str]] = {}
    for path, text in sources.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return found


def shared_names(sources: Mapping[str, str], same: Mapping[str, str]) -> Iterator[str]:
    classes_of = classes(sources)
    for name, paths in classes_of.items():
        if len(paths) > 1 and name not in same:
            yield f"{name} is a class in {', '.join(paths)}; instead: a word of docs/GLOSSARY.md for each"
    for name in same:
        if len(classes_of.get(name, [])) < 2:
            yield f"{name} is the name of one class only; instead: take it off the list"


def test_no_two_classes_have_one_name() -> None:
    found = list(shared_names(product(), SAME_IDEA))
    assert not found, "\n".join(found)


def test_two_classes_of_one_name_are_found() -> None:
    sources = {"a.py": "class Part: ...", "b.py": "def f():\n    class Part: ..."}
    assert len(list(shared_names(sources, {}))) == 1
    assert list(shared_names(sources, {"Part": "both sides"})) == []
    assert len(list(shared_names({"a.py": "class Part: ..."}, {"Part": "both sides"}))) == 1


def test_the_glossary_explains_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "GLOSSARY.md").read_text(), re.MULTILINE)
    words = [row for row in rows if row != "word" and not row.startswith("---")]
    assert [word for word in words if words.count(word) > 1] == []
