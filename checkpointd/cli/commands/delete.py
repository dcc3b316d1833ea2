"""`checkpointd delete`: removes one checkpoint after a confirmation."""

from __future__ import annotations

import sys
from functools import partial

import click

from checkpointd.admin.gc import CollectionReport, deletion
from checkpointd.cli.arguments import as_json, places, root_and_tag
from checkpointd.cli.asking import ask_about_tag
from checkpointd.cli.collection_page import page
from checkpointd.cli.formatting import printable, size
from checkpointd.cli.render import show, show_answer
from checkpointd.commands import at_tag
from checkpointd.commands import command as command_line
from checkpointd.errors import UsageError

DECLINED = 1
"""The exit code if the answer was no."""


@click.command("delete", short_help="Remove one checkpoint.")
@places("[ROOT] TAG")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed; write nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Required if standard input is not a terminal.")
@click.option("--force", is_flag=True, help="Also the newest checkpoint, which a restart would load. It still asks.")
@as_json()
def command(places: tuple[str, ...], dry_run: bool, yes: bool, force: bool, as_json: bool) -> int:
    """Remove checkpoint TAG. Objects that newer checkpoints refer to stay as long as these do.

    Shows what it would remove and asks, unless --yes is given. Ends with code 1 if the answer is no. It refuses to remove the
    newest checkpoint without --force.
    """
    root, tag = root_and_tag(places, "delete")

    def act(tag: str, *, dry_run: bool) -> CollectionReport:
        return ask_about_tag(root, tag, partial(deletion, force=force, dry_run=dry_run))

    if not (dry_run or yes):
        plan = act(tag, dry_run=True)
        if not _confirmed(plan, force=force):
            click.echo("nothing was removed", err=True)
            return DECLINED
        tag = plan.retired[0]  # `latest` may name another one by now
    found = act(tag, dry_run=dry_run)
    show_answer(found, page, as_json=as_json)
    return 0


def _confirmed(plan: CollectionReport, *, force: bool) -> bool:
    """Show the plan and ask, on standard error. UsageError if standard input is not a terminal."""
    tag = plan.retired[0]
    if not sys.stdin.isatty():
        anyway = command_line("delete", *at_tag(plan.root, tag), "--yes", *(["--force"] if force else []))
        raise UsageError(
            f"delete asks before it removes {tag} ({size(plan.freed_bytes)}), and standard input is not a terminal: {anyway} "
            "does not ask"
        )
    show(page(plan), sys.stderr)
    return click.confirm(f"Remove {printable(tag)} at {printable(plan.root)}?", default=False, err=True)
