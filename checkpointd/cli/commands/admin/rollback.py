"""`checkpointd rollback`: go back to an older checkpoint, from which the job goes on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import click

from checkpointd.admin.rollback import RollbackReport, rollback
from checkpointd.cli.arguments import as_json, places, root_and_tag
from checkpointd.cli.asking import ask_about_tag
from checkpointd.cli.formatting import count
from checkpointd.cli.render import Block, Facts, Heading, Table, show_answer


@click.command("rollback", short_help="Go back to an older checkpoint.")
@places("[ROOT] TAG")
@click.option("--attempt", metavar="ID", help="Which attempt at TAG, if two branches have saved it.")
@click.option("--dry-run", is_flag=True, help="Only print what would be left behind; write nothing.")
@click.option("--take-over", is_flag=True, help="Also if a job is alive at ROOT; every save of it fails from then on.")
@as_json()
def command(places: tuple[str, ...], attempt: str | None, dry_run: bool, take_over: bool, as_json: bool) -> None:
    """Go back to checkpoint TAG: the next start of the job loads it, and so do readers.

    The checkpoints after it stay, and are left behind: no load takes them unless it names them, not even if TAG is damaged. To
    undo this, go back to one of them. End the job first; the command is refused while one runs.
    """
    root, tag = root_and_tag(places, "rollback")
    act = partial(rollback, attempt=attempt, take_over=take_over, dry_run=dry_run)
    found = ask_about_tag(root, tag, act)
    show_answer(found, page, as_json=as_json)


def page(found: RollbackReport) -> Iterator[Block]:
    """The page for people."""
    would = "would be " if found.dry_run else ""
    facts = [("the next load takes", f"{found.tag} (step {found.step})")]
    facts.append((f"{would}left behind", count(len(found.left_behind), "checkpoint")))
    if found.current:
        facts.append((f"{would}current again", count(len(found.current), "checkpoint")))
    yield Facts(facts)
    for title, prefixes in (("left behind", found.left_behind), ("current again", found.current)):
        if prefixes:
            yield Heading(f"{would}{title}")
            yield Table(("tag", "attempt"), [tuple(prefix.rsplit("/", 1)) for prefix in prefixes], prose=frozenset({"tag"}))
