"""`checkpointd gc`: remove leftovers, and old checkpoints by rule."""

from __future__ import annotations

import click

from checkpointd.admin.gc import collection
from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask
from checkpointd.cli.collection_page import page
from checkpointd.cli.render import show_answer
from checkpointd.cli.retention_options import retention_options
from checkpointd.commit.retention import Retention


@click.command("gc", short_help="Remove leftovers, and old checkpoints by rule.")
@places("[ROOT]")
@retention_options()
@click.option("--dry-run", is_flag=True, help="Only print what would be removed; write nothing.")
@as_json()
def command(places: tuple[str, ...], rules: Retention, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers at ROOT: objects of aborted saves and of removed checkpoints that no checkpoint needs.

    With rules, it also removes checkpoints that no rule keeps; never the newest, or the newest that was read back
    whole. If none that stays was read back, one is read back first; if none is whole, none is removed.
    With --best, checkpoints without the metric stay; a metric that no checkpoint has is an error. Objects that newer
    checkpoints refer to stay. A job may save at the same time.
    """
    found = ask(only_root(places, "gc"), lambda store: collection(store, rules, dry_run=dry_run))
    show_answer(found, page, as_json=as_json)
