"""The page that shows a collection, for `gc` and `delete`."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointd.admin.gc import CollectionReport
from checkpointd.cli.formatting import count, size
from checkpointd.cli.render import Block, Cell, Facts, Heading, Table
from checkpointd.commands import command
from checkpointd.phrases import listed
from checkpointd.pipeline.gc.collect import Removal


def page(found: CollectionReport) -> Iterator[Block]:
    """The page for people."""
    would = "would be " if found.dry_run else ""
    facts: list[tuple[str, str | Cell]] = [
        (f"{would}deleted", f"{count(len(found.retired), 'checkpoint')}"),
        (f"{would}freed", size(found.freed_bytes)),
    ]
    if found.kept_bytes:
        who = listed(found.needed_by) or "newer checkpoints"
        facts.append(("stays", f"{size(found.kept_bytes)} that {who} refer{'s' if len(found.needed_by) == 1 else ''} to"))
    if found.latest_moved_to:
        facts.append(("latest", f"moved to {found.latest_moved_to}"))
    if found.uploads:
        facts.append(("aborted" if not found.dry_run else "would be aborted", count(len(found.uploads), "unfinished upload")))
    if found.exporting:
        facts.append(("kept for exports", listed(found.exporting)))
    if found.unproved:
        why = f"since no checkpoint that was to stay could be read back whole: {command('verify', found.root)} says why"
        facts.append(("kept nevertheless", Cell(f"{count(len(found.unproved), 'checkpoint')}, {why}", "bad")))
    yield Facts(facts)
    if found.removed:
        yield Heading("would be removed" if found.dry_run else "removed")
        titles = ("tag", "attempt", "freed", "stays", "why")
        rows = [_cells(removed) for removed in found.removed]
        yield Table(titles, rows, right=frozenset({"freed", "stays"}), prose=frozenset({"why"}))


def _cells(removed: Removal) -> tuple[str, ...]:
    return removed.tag, removed.attempt, size(removed.freed_bytes), size(removed.kept_bytes), removed.reason
