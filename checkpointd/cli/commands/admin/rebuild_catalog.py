"""`checkpointd rebuild-catalog`: make the catalog of a root again from its attempts."""

from __future__ import annotations

from collections.abc import Iterator

import click

from checkpointd.admin.catalog import CatalogReport, rebuilt
from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask
from checkpointd.cli.formatting import count
from checkpointd.cli.render import Block, Facts, show_answer


@click.command("rebuild-catalog", short_help="Make the catalog of a root again from its attempts.")
@places("[ROOT]")
@as_json()
def command(places: tuple[str, ...], as_json: bool) -> None:
    """Make the catalog of ROOT again from the outcomes and marks of all attempts, which are the truth.

    The catalog saves commands and jobs a look into every directory. A start mends it by itself. Use this command if files in
    ROOT/.checkpointd/catalog were damaged, or if tags were copied or removed by hand and no job will start there. A job may
    save at the same time.
    """
    show_answer(ask(only_root(places, "rebuild-catalog"), rebuilt), page, as_json=as_json)


def page(found: CatalogReport) -> Iterator[Block]:
    """The page for people."""
    yield Facts([("the catalog now names", count(found.attempts, "attempt"))])
