"""Watching an answer that changes, with looks that fail now and then."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator

import msgspec
import pytest

from checkpointd.cli.render import Block, Note
from checkpointd.cli.watching import watch
from checkpointd.errors import StoreError


class Count(msgspec.Struct, frozen=True):
    number: int


class Over(Exception):
    """No further look is planned."""


def page(found: Count) -> Iterator[Block]:
    yield Note(f"the number is {found.number}")


def changes(before: Count | None, after: Count) -> Iterator[str]:
    if before != after:
        yield f"now {after.number}"


async def watched(*answers: int | str, as_json: bool = False) -> None:
    """Watch until the answers are used up; a str is the message of a look that fails."""
    left = list(answers)

    async def look() -> Count:
        if not left:
            raise Over
        answer = left.pop(0)
        if isinstance(answer, str):
            raise StoreError(answer)
        return Count(answer)

    with pytest.raises(Over):
        await watch(look, 0.0, as_json=as_json, page=page, changes=changes)


async def test_in_a_pipe_each_change_is_a_line_and_each_new_error_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    await watched(1, 1, "it hangs", "it hangs", 1, "it hangs", 2)
    said = capsys.readouterr()
    assert [line.split("  ", 1)[1] for line in said.out.splitlines()] == ["now 1", "now 2"]
    assert said.err.splitlines() == ["warning: it hangs", "warning: there is an answer again"] * 2


async def test_json_has_a_document_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    await watched(1, 1, "it hangs", 1, 2, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"number": 1}, {"number": 2}]


async def test_on_a_terminal_an_error_takes_the_place_of_what_may_be_so_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    await watched(7, "it hangs")
    shown = terminal.getvalue()
    assert shown.rindex("the number is 7") < shown.index("it hangs")
    assert re.search(r"the last answer came at 20\d\d-\d\d-\d\dT[\d:]+Z; this goes on asking", shown)
