"""The tree of errors, the public module that shows it, and the page that explains it: none has a class that the others miss."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointd import errors
from checkpointd.errors import ERRORS, CheckpointdError
from checkpointd_client import errors as public
from checkpointd_client.integrations.deepspeed.adapter_base import DirectoryError, TagError

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `(\w+)`(?: \(`(\w+)`\))? \| (\d+) \| (yes|no) \| (.+) \| (.+) \|")
OF_DEEPSPEED = {kind.__name__: kind for kind in (DirectoryError, TagError)}
"""Raised by its plug alone, and caught as what DeepSpeed itself raises."""
NEVER_LEAVE = {
    "CircleBroken",
    "DecidedBefore",
    "NoAnswer",
    "LinkLost",
    "SidecarRefusal",
    "SpoolForgot",
    "SpoolUnreadError",
    "VoteUncertain",
    "WriterLost",
}
"""What parts of the service tell each other: users get what becomes of it."""
KINDS: dict[str, type[CheckpointdError]] = {"CheckpointdError": CheckpointdError, **ERRORS, **OF_DEEPSPEED}


def classes() -> Iterator[tuple[str, list[str]]]:
    """Every class of both packages, with its bases, as the source has them."""
    for folder in (ROOT / "checkpointd", ROOT / "client/checkpointd_client"):
        for path in folder.rglob("*.py"):
            for name, bases in re.findall(r"^ *class (\w+)\((.*)\):", path.read_text(), re.MULTILINE):
                yield name, bases.split(", ")


def test_no_class_is_missing_from_the_tree() -> None:
    found, known = {"CheckpointdError"}, dict(classes())
    while more := {name for name, bases in known.items() if name not in found and found.intersection(bases)}:
        found |= more
    assert found - NEVER_LEAVE == set(KINDS)


def test_the_page_has_a_row_for_each_class_with_its_parent_code_and_whether_a_retry_helps() -> None:
    rows = ROW.findall((ROOT / "docs/ERRORS.md").read_text())
    said = {name: (parent, int(code), retry == "yes") for name, parent, code, retry, _, _ in rows}
    assert len(rows) == len(said)
    assert said == {
        name: ("" if kind is CheckpointdError else kind.__bases__[0].__name__, kind.exit_code, kind.retryable)
        for name, kind in KINDS.items()
    }


def test_every_exit_code_stands_in_the_manual() -> None:
    [codes] = re.findall(r"Exit codes: (.+?)\. Logs", (ROOT / "docs/OPERATING.md").read_text(), re.DOTALL)
    assert {kind.exit_code for kind in KINDS.values()} <= {int(code) for code in re.findall(r"\b\d+\b", codes)}


@pytest.mark.parametrize("name", sorted(set(KINDS) - set(OF_DEEPSPEED)))
def test_it_is_public(name: str) -> None:
    assert getattr(public, name) is getattr(errors, name)
    assert name in public.__all__


def test_nothing_else_is_public() -> None:
    assert set(public.__all__) == set(KINDS) - set(OF_DEEPSPEED)


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from checkpointd_client.errors import UnreadableError"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
