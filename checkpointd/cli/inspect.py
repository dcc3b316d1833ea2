"""`checkpointd inspect`: what lies in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import click

from checkpointd.cli.arguments import as_json, places, root_and_tag
from checkpointd.cli.asking import ask, named_tag, show_json
from checkpointd.cli.render import Block, Facts, Heading, Note, Table, show
from checkpointd.cli.words import ABSENT, count, moment, ratio, shape, shortened, size
from checkpointd.errors import DamagedError
from checkpointd.pipeline.report.inspection import Inspection, RankReport, TensorReport, Totals, inspection
from checkpointd.store.base import Store

VALUE_CHARACTERS = 100
_RIGHT = frozenset({"raw", "stored", "ratio", "chunks"})


@click.command("inspect", short_help="The tensors, sizes and codecs of a checkpoint.")
@places("[ROOT] TAG")
@click.option("--rank", type=int, help="Only what this rank stored.")
@click.option("--tensors", metavar="GLOB", default="*", help="Only tensors whose name matches, such as 'model.*.weight'.")
@click.option("--values", is_flag=True, help="Also what is stored beside the tensors.")
@as_json()
def command(places: tuple[str, ...], rank: int | None, tensors: str, values: bool, as_json: bool) -> int:
    """The tensors of checkpoint TAG: shapes, sizes and codecs, rank by rank.

    TAG may be `latest`. `ratio` is stored bytes per raw byte. Only the indexes are read: `checkpointd verify` reads all of it.
    """
    root, tag = root_and_tag(places, "inspect")

    async def look(store: Store) -> Inspection:
        return await inspection(store, await named_tag(store, tag), rank=rank, tensors=tensors, values=values)

    found = ask(root, look)
    if as_json:
        show_json(found)
    else:
        show(page(found))
    return DamagedError.exit_code if found.damage else 0


def page(found: Inspection) -> Iterator[Block]:
    """The page for people: the checkpoint, its codecs, then each rank."""
    yield Heading(f"{found.tag} (attempt {found.attempt})")
    sizes = _sizes(found.raw_bytes, found.stored_bytes, found.referred_bytes)
    part = ratio(found.raw_bytes, found.stored_bytes)
    yield Facts(
        [
            ("step", str(found.step)),
            ("ranks", str(found.world_size)),
            ("committed", moment(found.time)),
            ("size", f"{sizes}, ratio {part}" if part != ABSENT else sizes),
        ]
    )
    if found.codecs:
        yield Heading("codecs")
        yield _codecs_table(found.codecs)
    for report in found.ranks:
        yield from _rank_blocks(report)


def _sizes(raw: int, stored: int, referred: int) -> str:
    """Written here, and, where there is any, referred to in older checkpoints, as it has not changed since."""
    if not referred:
        return f"{size(raw)} raw, {size(stored)} stored"
    return f"{size(raw)} raw, {size(stored)} stored: {size(stored - referred)} written, {size(referred)} referred to"


def _codecs_table(codecs: Totals) -> Table:
    rows = [
        (t.codec, str(t.chunks), size(t.raw_bytes), size(t.stored_bytes), ratio(t.raw_bytes, t.stored_bytes)) for t in codecs
    ]
    return Table(("codec", "chunks", "raw", "stored", "ratio"), rows, right=_RIGHT)


def _rank_blocks(report: RankReport) -> Iterator[Block]:
    if report.damage:
        yield Heading(f"rank {report.rank}")
        yield Note(report.damage.message, "bad")
        return
    sizes = _sizes(report.raw_bytes, report.stored_bytes, report.referred_bytes)
    yield Heading(f"rank {report.rank}: {count(len(report.tensors), 'tensor')}, {sizes}")
    if report.tensors:
        yield _tensors_table(report)
    if report.excluded:
        yield Note(f"left out on purpose (frozen): {', '.join(report.excluded)}", "quiet")
    if report.values is not None:
        yield Heading(f"rank {report.rank}: {count(len(report.values), 'value')}")
        rows = [(value.path, value.kind, shortened(value.text, VALUE_CHARACTERS)) for value in report.values]
        yield Table(("path", "kind", "value"), rows, prose=frozenset({"path", "value"}))


def _tensors_table(report: RankReport) -> Table:
    titles = ("tensor", "dtype", "shape", "codec", "raw", "stored", "ratio")
    rows: list[tuple[str, ...]] = [_tensor_cells(tensor) for tensor in report.tensors]
    rows += [(alias.fqn, "=", shape(alias.shape), f"shares {alias.owner}", ABSENT, ABSENT, ABSENT) for alias in report.aliases]
    return Table(titles, rows, right=_RIGHT, prose=frozenset({"tensor", "shape", "codec"}), optional=("ratio",))


def _tensor_cells(tensor: TensorReport) -> tuple[str, ...]:
    where = shape(tensor.shape)
    if tensor.box is not None:
        where = f"{shape(tensor.box.sizes)}@{','.join(map(str, tensor.box.offsets))} of {where}"
    return (
        tensor.fqn,
        tensor.dtype,
        where,
        "+".join(total.codec for total in tensor.codecs) or ABSENT,
        size(tensor.raw_bytes),
        size(tensor.stored_bytes),
        ratio(tensor.raw_bytes, tensor.stored_bytes),
    )
