"""`checkpointd verify`: read checkpoints whole and check every byte."""

from __future__ import annotations

from collections.abc import Iterator

import click

from checkpointd.cli.arguments import as_json, only_root, places, root_and_maybe_tag
from checkpointd.cli.asking import ask, check_root, maybe_named_tag
from checkpointd.cli.formatting import count, printable, size
from checkpointd.cli.progress import progress_bar
from checkpointd.cli.render import Block, Cell, Heading, Mood, Note, Table, show, show_json, warn
from checkpointd.commands import command as command_line
from checkpointd.errors import DamagedError, StoreError
from checkpointd.phrases import listed
from checkpointd.pipeline.read.verify import CheckpointVerdict
from checkpointd.pipeline.root.wholeness import in_words
from checkpointd.report.verification import Verification, of_copy, to_verify, verification, verified
from checkpointd.store import open_store
from checkpointd.store.base import Store

MOODS: dict[str, Mood] = {"whole": "good", "damaged": "bad", "unreadable": "doubt", "removed": "quiet"}


@click.command("verify", short_help="Read checkpoints whole and check every byte.")
@places("[ROOT] [TAG]")
@click.option(
    "--record",
    is_flag=True,
    help="Record each result in the log. Other checkpoints are removed only when one that stays is recorded as whole.",
)
@click.option(
    "--copy-of",
    metavar="ORIGIN",
    help="ROOT is a copy of this root: what that one has removed since, while a newer checkpoint is whole, is no damage.",
)
@as_json()
def command(places: tuple[str, ...], record: bool, copy_of: str | None, as_json: bool) -> int:
    """Read checkpoint TAG, or all at ROOT, from the storage itself, and check every byte along the chain of digests.

    Checks the log of ROOT as well. Lists all damage with its object, tensor and rank, and ends with code 5 if there is any. An
    object that cannot be read now is shown as unreadable, which does not prove damage: code 6 if there is nothing worse. So it
    ends, too, if a result could not be recorded. A checkpoint whose files somebody removed where they were shown is shown as
    removed. Without TAG, it also names what lies at ROOT beside the checkpoints. TAG may be `latest`.
    """
    root, tag = root_and_maybe_tag(places, "verify")
    origin = None if copy_of is None else only_root((copy_of,), "verify")
    found = ask(root, lambda store: _verify(store, tag, record=record, origin=origin))
    if as_json:
        show_json(found)
    elif blocks := list(page(found)):
        show(blocks)
    if not (as_json or found.checkpoints):
        warn(f"there are no checkpoints at {found.root}")
    unrecorded = [verdict for verdict in found.checkpoints if verdict.record_error]
    if unrecorded and not as_json:
        tags = listed([verdict.tag for verdict in unrecorded])
        warn(f"{count(len(unrecorded), 'result')} could not be recorded ({tags}): {unrecorded[0].record_error}")
    return DamagedError.exit_code if found.damage else StoreError.exit_code if found.unreadable or unrecorded else 0


async def _verify(store: Store, tag: str | None, *, record: bool, origin: str | None) -> Verification:
    named = await maybe_named_tag(store, tag)
    todo = await to_verify(store, named)
    with progress_bar(sum(one.commit.cost.stored_bytes for one in todo if one.commit.cost)) as update:
        verdicts = await verified(
            store,
            todo,
            record=record,
            on_begin=lambda one: update(description=printable(one.tag)),
            on_bytes=lambda nbytes: update(advance=nbytes),
        )
    if origin is not None:
        async with open_store(origin, read_only=True) as copied:
            check_root(copied, origin)
            verdicts = await of_copy(store, copied, verdicts)
    return await verification(store, verdicts, of_all=named is None)


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
    for line in in_words(found.root, {f"{one.tag}/{one.attempt}": one.missing for one in found.checkpoints if one.missing}):
        yield Note(line, "bad")
    if found.log_damage:
        yield Note(found.log_damage, "bad")
    elif found.log.damage:
        yield Note("the log can be read to its end all the same; newer states will take the place of what is damaged")
    if found.latest is not None and found.latest.note:
        yield Note(found.latest.note)
    if found.unknown:
        yield Heading("directories that the log does not know")
        yield Note(
            f"{listed(found.unknown)}: somebody brought them here, the log is an older copy, or they are left of attempts that "
            "were removed long ago"
        )
        yield Note(
            "A start takes those that came after the end of the log, if they are whole. No command uses or removes the others. "
            "If you do not need them, remove them yourself."
        )
    if found.leftovers:
        yield Heading("left of aborted and removed attempts")
        yield Note(f"{listed(found.leftovers)}: {command_line('gc', found.root)} removes these objects")


def _cells(verdict: CheckpointVerdict) -> tuple[str | Cell, ...]:
    return verdict.tag, verdict.attempt, Cell(verdict.state, MOODS[verdict.state]), size(verdict.bytes_read)
