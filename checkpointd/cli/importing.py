"""`checkpointd import`: another program's checkpoint as one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import show_json
from checkpointd.cli.consolidate import progress
from checkpointd.cli.formats import FORMATS, module_for
from checkpointd.cli.render import Block, Facts, Heading, show, warn
from checkpointd.cli.words import count, size
from checkpointd.errors import UsageError


@click.command("import", short_help="Make a checkpoint of another program's.")
@places("SRC [ROOT]")
@click.option("--from", "kind", type=click.Choice(FORMATS), default="dcp", show_default=True, help="What SRC is.")
@click.option("--tag", metavar="TAG", help="The checkpoint's tag.  [default: the name of SRC]")
@click.option("--step", type=int, help="Its step.  [default: the last number in the tag]")
@click.option("--latest/--no-latest", default=True, show_default=True, help="Whether `latest` is to name it.")
@click.option("--memory", metavar="SIZE", default="512MiB", show_default=True, help="About what to hold in memory at once.")
@click.option("--force", is_flag=True, help="Also where TAG exists, or it cannot be checked that no job runs at ROOT.")
@as_json()
def command(
    places: tuple[str, ...], kind: str, tag: str | None, step: int | None, latest: bool, memory: str, force: bool, as_json: bool
) -> None:
    """Make a checkpoint at ROOT of SRC, a directory of torch.distributed.checkpoint (FileSystemWriter), which is only read.

    It is committed as a whole, or not at all. ROOT is made where it is not there; no job may run at it.
    """
    if not places:
        raise UsageError("import what? Give a directory, as in `checkpointd import /mnt/dcp/step100 /mnt/ckpts/run1`")
    source, *root = places
    options = {"step": step, "save_latest": latest, "force": force, "memory": memory}
    act = module_for(kind, "importing").import_dcp
    with progress() as on_progress:
        done = act(source, only_root(tuple(root), f"import {source}"), tag, on_progress=on_progress, **options)
    if as_json:
        show_json(done)
        return
    show(page(done))
    if done.pickled:
        named = ", ".join(done.pickled[:8])
        warn(f"{count(len(done.pickled), 'value')} stayed pickled, and may need weights_only=False to load: {named}")


def page(done: Any) -> Iterator[Block]:
    """The page for people; `done` is the client's `Imported`."""
    yield Heading(f"{done.source} -> {done.tag}")
    yield Facts(
        [
            ("step", str(done.step)),
            ("tensors", str(done.tensors)),
            ("values", str(done.values)),
            ("size", size(done.bytes)),
            ("written as", count(done.parts, "part")),
        ]
    )
