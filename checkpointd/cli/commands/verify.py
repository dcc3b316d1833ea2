"""`checkpointd verify`: read checkpoints whole and check every byte."""

from __future__ import annotations

from collections.abc import Iterator

import click

from checkpointd.cli.arguments import as_json, places, root_and_maybe_tag
from checkpointd.cli.asking import ask, maybe_named_tag
from checkpointd.cli.formatting import count, printable, size
from checkpointd.cli.progress import progress_bar
from checkpointd.cli.render import Block, Cell, Heading, Mood, Note, Table, show_answer, warn
from checkpointd.errors import DamagedError, StoreError
from checkpointd.phrases import listed
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.wholeness import lost_advice, lost_text
from checkpointd.report.latest import pointer
from checkpointd.report.verification import TagVerdict, Verification, tasks, verified
from checkpointd.store.base import Store

MOODS: dict[str, Mood] = {"whole": "good", "damaged": "bad", "unreadable": "doubt", "removed": "quiet", "copied": "quiet"}


@click.command("verify", short_help="Read checkpoints whole and check every byte.")
@places("[ROOT] [TAG]")
@click.option(
    "--record",
    is_flag=True,
    help="Record the result in each checkpoint. Others are removed only when one that stays is recorded as whole.",
)
@as_json()
def command(places: tuple[str, ...], record: bool, as_json: bool) -> int:
    """Read checkpoint TAG, or all at ROOT, from the storage itself, and check every byte along the chain of digests.

    Lists all damage with its object, tensor and rank, and ends with code 5 if there is any. An object that cannot be read now
    is shown as unreadable, which does not prove damage: code 6 if there is nothing worse. So it ends, too, if a result could
    not be recorded. A checkpoint whose directory somebody removed is shown as removed. TAG may be `latest`.
    """
    root, tag = root_and_maybe_tag(places, "verify")
    found = ask(root, lambda store: _verify(store, tag, record=record))
    if as_json or found.checkpoints or found.damage or found.unreadable:
        show_answer(found, page, as_json=as_json)
    else:
        warn(f"there are no checkpoints at {found.root}")
    unrecorded = [verdict for verdict in found.checkpoints if verdict.record_error]
    if unrecorded and not as_json:
        tags = listed([verdict.tag for verdict in unrecorded])
        warn(f"{count(len(unrecorded), 'result')} could not be recorded ({tags}): {unrecorded[0].record_error}")
    return DamagedError.exit_code if found.damage else StoreError.exit_code if found.unreadable or unrecorded else 0


async def _verify(store: Store, tag: str | None, *, record: bool) -> Verification:
    named = await maybe_named_tag(store, tag)
    todo = await tasks(store, named)
    with progress_bar(sum(task.nbytes for task in todo)) as update:
        verdicts = await verified(
            store,
            todo,
            record=record,
            on_task=lambda task: update(description=printable(task.tag)),
            on_bytes=lambda nbytes: update(advance=nbytes),
        )
    latest = await pointer(store, await catalog.checkpoints(store)) if named is None else None
    return Verification(root=store.url, checkpoints=tuple(verdicts), latest=latest)


def page(found: Verification) -> Iterator[Block]:
    """The page for people: a line for each checkpoint, then every damage."""
    if found.checkpoints:
        yield Table(("tag", "attempt", "state", "read"), [_cells(v) for v in found.checkpoints], right=frozenset({"read"}))
    if found.damage:
        yield Heading(f"{count(len(found.damage), 'damage')} found")
        for damage in found.damage:
            yield Note(damage.message, "bad")
    if found.unreadable:
        yield Heading("cannot be read now, so nobody knows whether it is whole")
        for one in found.unreadable:
            yield Note(one.message, "doubt")
    for verdict in found.checkpoints:
        if verdict.copy:
            yield Note(verdict.copy, "doubt")
        if verdict.lost:
            is_not = "" if verdict.state == "removed" else " is not whole"
            advice = lost_advice(found.root, verdict.tag, verdict.lost)
            yield Note(f"{verdict.tag}{is_not}: {lost_text(verdict.lost)}; {advice}", "bad")


def _cells(verdict: TagVerdict) -> tuple[str | Cell, ...]:
    return verdict.tag, verdict.attempt, Cell(verdict.state, MOODS[verdict.state]), size(verdict.bytes_read)
