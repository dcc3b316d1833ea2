"""Pages as plain text and on terminals of 80 and 120 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from checkpointd.cli.render import Block, Cell, Facts, Heading, Note, Table, fitted, plain, rich_page

TABLE = Table(
    ("name", "size", "why"),
    [("a", "10B", "because it is so"), ("longer", "9.5MiB", Cell("", "quiet"))],
    right=frozenset({"size"}),
    prose=frozenset({"why"}),
)


def terminal(blocks: list[Block], width: int) -> list[str]:
    """The page as a terminal of `width` columns shows it, without its colours."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, highlight=False)
    for part in rich_page(blocks, width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()]


def test_plain_columns_are_aligned_two_blanks_apart_and_never_empty() -> None:
    assert plain([TABLE]).splitlines() == [
        "NAME      SIZE  WHY",
        "a          10B  because it is so",
        "longer  9.5MiB  -",
    ]


def test_a_plain_page_has_one_line_per_fact_and_a_blank_one_before_a_heading() -> None:
    page = plain([Heading("one"), Facts([("step", "3"), ("job", "")]), Heading("two"), Note("said", "bad")])
    assert page.splitlines() == ["one", "step: 3", "job: -", "", "two", "said"]


def test_plain_text_holds_no_boxes_and_no_escapes() -> None:
    page = plain([Heading("h\x1b[31m"), Facts([("k", "v\r\nw")]), Table(("t",), [("\x9b2J",)])])
    assert page.isascii()
    assert all(line.isprintable() for line in page.splitlines())
    assert page.count("\n") == 3


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_every_cell_whole(width: int) -> None:
    table = Table(("tag", "attempt"), [("global_step123456", "00000001-0")], right=frozenset({"attempt"}))
    shown = terminal([table], width)
    assert shown[-1].split() == ["global_step123456", "00000001-0"]
    assert all(len(line) <= width for line in shown)


def test_markup_in_a_name_is_only_text() -> None:
    [line] = terminal([Note("[red]model[/red][0] :smile: \x1b[31m")], 80)
    assert line == r"[red]model[/red][0] :smile: \x1b[31m"


def test_optional_columns_go_in_their_order_until_the_rest_fits() -> None:
    row = ("x" * 30, "y" * 30, "z" * 30)
    table = Table(("a", "b", "c"), [row], optional=("b", "a"))
    assert list(fitted(table, 94).titles) == ["a", "b", "c"]
    assert list(fitted(table, 93).titles) == ["a", "c"]
    assert list(fitted(table, 40).titles) == ["c"]
    assert fitted(table, 40).rows == [["z" * 30]]


def test_prose_is_broken_over_lines_instead_of_losing_a_column() -> None:
    table = Table(("key", "why"), [("k" * 20, "word " * 40)], prose=frozenset({"why"}))
    shown = terminal([table], 80)
    assert sum(line.count("word") for line in shown) == 40
    assert all(len(line) <= 80 for line in shown)


def test_moods_are_colours() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")
    for part in rich_page([Note("bad news", "bad")], 80):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[1;31mbad news" in console.file.getvalue()


def test_a_long_cell_does_not_widen_every_row() -> None:
    table = Table(("name", "size"), [("x" * 5000, "1"), *((f"n{n}", "2") for n in range(100))], right=frozenset({"size"}))
    text = plain([table])
    assert text.splitlines()[1] == "x" * 5000 + "     1"
    assert len(text) < 5000 + 101 * 220
