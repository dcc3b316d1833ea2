"""`checkpointd delete`: remove one checkpoint."""

from __future__ import annotations

import click

from checkpointd.cli.arguments import as_json, places, root_and_tag
from checkpointd.cli.asking import ask, named_tag, show_json
from checkpointd.cli.removed import page
from checkpointd.cli.render import show
from checkpointd.pipeline.report.collection import CollectionReport, deletion
from checkpointd.store.base import Store


@click.command("delete", short_help="Remove one checkpoint.")
@places("[ROOT] TAG")
@click.option("--dry-run", is_flag=True, help="Only say what would go; nothing is written.")
@click.option("--force", is_flag=True, help="Also the newest checkpoint, which a restart would load.")
@as_json()
def command(places: tuple[str, ...], dry_run: bool, force: bool, as_json: bool) -> None:
    """Remove checkpoint TAG. What newer checkpoints refer to stays until they go, too.

    The newest checkpoint, and the one that `latest` names, are refused without --force.
    """
    root, tag = root_and_tag(places, "delete")

    async def act(store: Store) -> CollectionReport:
        return await deletion(store, await named_tag(store, tag), force=force, dry_run=dry_run)

    found = ask(root, act)
    if as_json:
        show_json(found)
    else:
        show(page(found))
