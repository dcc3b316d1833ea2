"""Pages of headings, facts, tables and notes, as rich output on a terminal and as plain columns anywhere else.

Commands decide the contents; nothing here knows checkpoints. Plain output is stable: one line per row, two or more blanks
between columns, `-` for an empty cell, no colours and no boxes. rich is imported only for terminals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Literal, TypeAlias, TypeVar

import click
import msgspec

from checkpointd.cli.formatting import ABSENT, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable
    from rich.text import Text

Mood: TypeAlias = Literal["", "good", "bad", "doubt", "quiet"]

WIDTH_MAX = 200
"""The widest column of plain output. A longer cell moves the rest of its own row; it does not widen every other row."""

PROSE_WIDTH_MIN = 30
"""A terminal column of prose keeps at least this width; narrower ones lose optional columns first, and then break words."""

_STYLES: dict[Mood, str] = {"": "", "good": "green", "bad": "bold red", "doubt": "yellow", "quiet": "dim"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and its mood. The mood shows as a colour, and the text says the same in words."""

    text: str
    mood: Mood = ""


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    mood: Mood = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and values, one pair a line."""

    pairs: Sequence[tuple[str, str | Cell]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below titles. `right`: columns of numbers. `prose`: columns that a terminal may break over lines. `optional`:
    columns that a narrow terminal leaves out, in this order.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    right: frozenset[str] = frozenset()
    prose: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()

    def without(self, title: str) -> Table:
        """The same without one column."""
        at = list(self.titles).index(title)
        rows = [[*row[:at], *row[at + 1 :]] for row in self.rows]
        return replace(self, titles=[t for t in self.titles if t != title], rows=rows)


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar from 0 to 1 with a text beside it."""

    label: str
    fraction: float
    text: str
    mood: Mood = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Progress, one bar a line."""

    rows: Sequence[Bar]


Block: TypeAlias = Heading | Note | Facts | Table | Bars
A = TypeVar("A", bound=msgspec.Struct)


def show(blocks: Iterable[Block], file: IO[str] | None = None) -> None:
    """Print a page to `file`, standard output by default."""
    out = file or sys.stdout
    if out.isatty():
        _show_rich(blocks, out)
    else:
        click.echo(plain(blocks), file=out)


def show_answer(answer: A, page: Callable[[A], Iterable[Block]], *, as_json: bool) -> None:
    """Print `answer` as one JSON document, or as a page for people."""
    if as_json:
        show_json(answer)
    else:
        show(page(answer))


def show_json(answer: msgspec.Struct) -> None:
    """One document and a newline: indented on a terminal, otherwise on one line."""
    data = msgspec.json.encode(answer)
    click.echo(msgspec.json.format(data, indent=2) if sys.stdout.isatty() else data)


def warn(text: str) -> None:
    """Print one line for people on standard error, so that scripts that read the answer do not see it."""
    show([Note(f"warning: {text}", "doubt")], sys.stderr)


# --- plain ---------------------------------------------------------------------------------------------------


def plain(blocks: Iterable[Block]) -> str:
    """The page as text, with a blank line before each heading except at the start."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Heading) and lines:
            lines.append("")
        lines += _plain_lines(block)
    return "\n".join(lines)


def _plain_lines(block: Block) -> list[str]:
    match block:
        case Heading(text) | Note(text):
            return [printable(text)]
        case Facts(pairs):
            return [f"{label}: {_text(value) or ABSENT}" for label, value in pairs]
        case Table():
            return _columns(block)
        case Bars(rows):
            return _plain_bars(rows)


def _plain_bars(rows: Sequence[Bar]) -> list[str]:
    width = max((len(printable(bar.label)) for bar in rows), default=0)
    return [f"{printable(bar.label).ljust(width)}  {_percent(bar):>4}  {printable(bar.text)}".rstrip() for bar in rows]


def _percent(bar: Bar) -> str:
    return f"{int(min(max(bar.fraction, 0.0), 1.0) * 100)}%"


def _columns(table: Table) -> list[str]:
    rows = [[title.upper() for title in table.titles], *([_text(cell) or ABSENT for cell in row] for row in table.rows)]
    widths = _widths(rows)
    right = [title in table.right for title in table.titles]
    return ["  ".join(_padded(*part) for part in zip(row, widths, right, strict=True)).rstrip() for row in rows]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column: that of its longest cell, but at most WIDTH_MAX."""
    return [min(WIDTH_MAX, max(map(len, column))) for column in zip(*rows, strict=True)]


def _padded(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def _text(value: str | Cell) -> str:
    return printable(value.text if isinstance(value, Cell) else value)


# --- terminal ------------------------------------------------------------------------------------------------


def console(file: IO[str]) -> Console:
    """The rich console for a terminal; rich itself reads NO_COLOR and TERM."""
    from rich.console import Console

    return Console(file=file, highlight=False, markup=False, emoji=False)


def _show_rich(blocks: Iterable[Block], file: IO[str]) -> None:
    target = console(file)
    for part in rich_page(blocks, target.width):
        target.print(part)


def rich_page(blocks: Iterable[Block], width: int) -> list[ConsoleRenderable]:
    """The page as rich renderables for a terminal of `width` columns."""
    from rich.padding import Padding
    from rich.text import Text

    page: list[ConsoleRenderable] = []
    for block in blocks:
        match block:
            case Heading(text):
                page.append(Padding(Text(printable(text), style="bold"), (1 if page else 0, 0, 0, 0)))
            case Note(text, mood):
                page.append(Text(printable(text), style=_STYLES[mood]))
            case Facts():
                page.append(_rich_facts(block))
            case Table():
                page.append(_rich_table(fitted(block, width), width))
            case Bars(rows):
                page.append(_rich_bars(rows, width))
    return page


def _rich_bars(rows: Sequence[Bar], width: int) -> ConsoleRenderable:
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid

    label = max((len(printable(bar.label)) for bar in rows), default=0)
    bar = max(8, min(40, width // 4))
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=label)
    grid.add_column(width=bar)
    grid.add_column(justify="right", no_wrap=True, width=4)
    grid.add_column(overflow="fold", max_width=max(8, width - label - bar - 4 - 3 * 2))
    for row in rows:
        done = ProgressBar(total=1.0, completed=row.fraction, complete_style="cyan", finished_style="green")
        grid.add_row(_rich_text(row.label), done, _percent(row), _rich_text(Cell(row.text, row.mood)))
    return grid


def _rich_facts(facts: Facts) -> ConsoleRenderable:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts.pairs:
        grid.add_row(label, _rich_text(value))
    return grid


def fitted(table: Table, width: int) -> Table:
    """`table`, from which optional columns are removed until it fits into `width`."""
    for title in table.optional:
        if _least_width(table) <= width:
            break
        table = table.without(title)
    return table


def _least_width(table: Table) -> int:
    rows = [table.titles, *([_text(cell) for cell in row] for row in table.rows)]
    needed = zip(table.titles, _widths(rows), strict=True)
    return sum(min(n, PROSE_WIDTH_MIN) if title in table.prose else n for title, n in needed) + 2 * (len(table.titles) - 1)


def _rich_table(table: Table, width: int) -> ConsoleRenderable:
    from rich import box
    from rich.table import Table as Columns

    fits = _least_width(table) <= width
    columns = Columns(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in table.titles:
        columns.add_column(
            title,
            justify="right" if title in table.right else "left",
            no_wrap=title not in table.prose and (fits or title in table.right),
            overflow="fold",
        )
    for row in table.rows:
        columns.add_row(*(_rich_text(cell) for cell in row))
    return columns


def _rich_text(value: str | Cell) -> Text:
    from rich.text import Text

    return Text(_text(value), style=_STYLES[value.mood] if isinstance(value, Cell) else "")
