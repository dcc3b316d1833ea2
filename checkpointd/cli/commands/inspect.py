"""`checkpointd inspect`: the content of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import click

from checkpointd.cli.arguments import as_json, places, root_and_tag
from checkpointd.cli.asking import ask_about_tag
from checkpointd.cli.attempts import read_back_cell
from checkpointd.cli.formatting import ABSENT, count, metrics, moment, number, ratio, runs, shape, shortened, size
from checkpointd.cli.render import Block, Facts, Heading, Note, Table, show_answer
from checkpointd.errors import DamagedError
from checkpointd.layout.indexes import Alias
from checkpointd.report.inspection import GlobalReport, Inspection, RankReport, TensorBytes, TensorReport, Totals, inspection

VALUE_CHARACTERS = 100
ROWS_MAX = 10_000
"""The most rows of a table. They take ten times the memory of what they show."""
NAMES_MAX = 20
_RIGHT = frozenset({"raw", "stored", "ratio", "chunks"})


@click.command("inspect", short_help="The tensors, sizes and codecs of a checkpoint.")
@places("[ROOT] TAG")
@click.option("--rank", type=int, help="Only this rank's tensors.")
@click.option("--tensors", metavar="GLOB", default="*", help="Only tensors whose name matches, such as 'model.*.weight'.")
@click.option("--values", is_flag=True, help="Also the values that are stored beside the tensors.")
@as_json()
def command(places: tuple[str, ...], rank: int | None, tensors: str, values: bool, as_json: bool) -> int:
    """Show the tensors of checkpoint TAG: shapes, sizes and codecs; global tensors first, then those of each rank.

    TAG may be `latest`. `ratio` is stored bytes per raw byte. Only the indexes are read: `checkpointd verify` reads all of it.
    """
    root, tag = root_and_tag(places, "inspect")
    look = partial(inspection, rank=rank, tensors=tensors, values=values)
    found = ask_about_tag(root, tag, look, read_only=True)
    show_answer(found, page, as_json=as_json)
    return DamagedError.exit_code if found.damage or found.missing or found.log_damage else 0


def page(found: Inspection) -> Iterator[Block]:
    """The page for people: the checkpoint, its codecs, then each rank."""
    yield Heading(f"{found.tag} (attempt {found.attempt})")
    sizes = _sizes(found.contents)
    part = ratio(found.contents.raw_bytes, found.contents.stored_bytes)
    yield Facts(
        [
            ("step", number(found.step)),
            ("ranks", number(found.world_size)),
            ("committed", moment(found.time)),
            ("size", f"{sizes}, ratio {part}" if part != ABSENT else sizes),
            *([("metrics", metrics(found.metrics))] if found.metrics else []),
            ("read back", read_back_cell(found.read_back)),
        ]
    )
    if found.why:
        yield Note(found.why, "bad" if found.read_back == "damaged" or found.missing else "doubt")
    if found.log_damage:
        yield Note(found.log_damage, "bad")
    if found.missing is not None:
        yield Note(found.missing.advice(found.root, found.tag), "bad")
    if found.contents.codecs:
        yield Heading("codecs")
        yield _codecs_table(found.contents.codecs)
    together = len(found.ranks) == found.world_size and bool(found.tensors)
    if together:
        yield Heading(f"all ranks: {count(len(found.tensors), 'tensor')}, {_sizes(*found.tensors)}")
        yield _global_table(found.tensors[:ROWS_MAX])
        yield from _more(len(found.tensors))
    for report in found.ranks:
        yield from _rank_blocks(report, boxes=not together)


def _sizes(*of: TensorBytes) -> str:
    """Raw and stored sizes and, if some chunks are references, how much was written and how much is referred to."""
    raw, stored, referred = (
        sum(one.raw_bytes for one in of),
        sum(one.stored_bytes for one in of),
        sum(one.referred_bytes for one in of),
    )
    if not referred:
        return f"{size(raw)} raw, {size(stored)} stored"
    return f"{size(raw)} raw, {size(stored)} stored: {size(stored - referred)} written, {size(referred)} referred to"


def _codecs_table(codecs: Totals) -> Table:
    rows = [
        (t.codec, str(t.chunks), size(t.raw_bytes), size(t.stored_bytes), ratio(t.raw_bytes, t.stored_bytes)) for t in codecs
    ]
    return Table(("codec", "chunks", "raw", "stored", "ratio"), rows, right=_RIGHT)


def _global_table(tensors: tuple[GlobalReport, ...]) -> Table:
    titles = ("tensor", "dtype", "shape", "boxes", "ranks", "codec", "raw", "stored", "ratio")
    rows = [
        (
            tensor.fqn,
            tensor.dtype,
            shape(tensor.shape),
            _boxes_cell(tensor),
            runs(rank for rank, _ in tensor.boxes),
            _codecs_cell(tensor.codecs),
            size(tensor.raw_bytes),
            size(tensor.stored_bytes),
            ratio(tensor.raw_bytes, tensor.stored_bytes),
        )
        for tensor in tensors
    ]
    return Table(titles, rows, right=_RIGHT, prose=frozenset({"tensor", "boxes", "ranks", "codec"}), optional=("ratio",))


def _rank_blocks(report: RankReport, *, boxes: bool) -> Iterator[Block]:
    """`boxes`: whether to list the rank's boxes of global tensors among its own tensors, or only to count them."""
    if report.damage:
        yield Heading(f"rank {report.rank}")
        yield Note(report.damage.message, "bad")
        return
    sizes = _sizes(*report.tensors)
    listed = [tensor for tensor in report.tensors if boxes or tensor.scope == "rank"]
    counted = len(report.tensors) - len(listed)
    others = f", {counted} box{'es' if counted > 1 else ''} of those above" if counted else ""
    yield Heading(f"rank {report.rank}: {count(len(listed), 'tensor')}{others}, {sizes}")
    if listed or report.aliases:
        yield _tensors_table(listed[:ROWS_MAX], report.aliases[: max(0, ROWS_MAX - len(listed))])
        yield from _more(len(listed) + len(report.aliases))
    if report.excluded:
        others = f", and {len(report.excluded) - NAMES_MAX} more (see --json)" if len(report.excluded) > NAMES_MAX else ""
        yield Note(f"left out on purpose (frozen): {', '.join(report.excluded[:NAMES_MAX])}{others}", "quiet")
    if report.values is not None:
        yield Heading(f"rank {report.rank}: {count(len(report.values), 'value')}")
        rows = [(value.path, value.kind, shortened(value.text, VALUE_CHARACTERS)) for value in report.values[:ROWS_MAX]]
        yield Table(("path", "kind", "value"), rows, prose=frozenset({"path", "value"}))
        yield from _more(len(report.values))


def _more(rows: int) -> Iterator[Note]:
    """Says that a table was cut."""
    if rows > ROWS_MAX:
        yield Note(f"{rows - ROWS_MAX} more rows are not shown: choose with --rank and --tensors, or use --json", "doubt")


def _tensors_table(tensors: list[TensorReport], aliases: tuple[Alias, ...]) -> Table:
    titles = ("tensor", "dtype", "shape", "codec", "raw", "stored", "ratio")
    rows: list[tuple[str, ...]] = [_tensor_cells(tensor) for tensor in tensors]
    rows += [(alias.fqn, "=", shape(alias.shape), f"shares {alias.owner}", ABSENT, ABSENT, ABSENT) for alias in aliases]
    return Table(titles, rows, right=_RIGHT, prose=frozenset({"tensor", "shape", "codec"}), optional=("ratio",))


def _tensor_cells(tensor: TensorReport) -> tuple[str, ...]:
    where = shape(tensor.shape)
    if tensor.box is not None:
        where = f"{shape(tensor.box.sizes)}@{','.join(map(str, tensor.box.offsets))} of {where}"
    return (
        tensor.fqn,
        tensor.dtype,
        where,
        _codecs_cell(tensor.codecs),
        size(tensor.raw_bytes),
        size(tensor.stored_bytes),
        ratio(tensor.raw_bytes, tensor.stored_bytes),
    )


def _boxes_cell(tensor: GlobalReport) -> str:
    """The number of boxes, and their shape if all have the same. `--rank` shows the places of one rank's boxes."""
    first, *others = {box.sizes for _, box in tensor.boxes}
    return f"{len(tensor.boxes)}, uneven" if others else f"{len(tensor.boxes)} of {shape(first)}"


def _codecs_cell(codecs: Totals) -> str:
    return "+".join(total.codec for total in codecs) or ABSENT
