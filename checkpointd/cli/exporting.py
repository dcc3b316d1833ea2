"""`checkpointd export`: a checkpoint in another program's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkpointd.cli.arguments import as_json, places, root_and_maybe_tag
from checkpointd.cli.asking import check_root, show_json
from checkpointd.cli.consolidate import progress
from checkpointd.cli.formats import FORMATS, module_for
from checkpointd.cli.render import Block, Facts, Heading, Table, show, warn
from checkpointd.cli.words import count, size
from checkpointd.errors import UsageError
from checkpointd.store import open_store


@click.command("export", short_help="Write a checkpoint in another program's format.")
@places("[ROOT] [TAG] OUT")
@click.option("--format", "kind", type=click.Choice(FORMATS), default="dcp", show_default=True, help="What OUT is to be.")
@click.option("--memory", metavar="SIZE", default="512MiB", show_default=True, help="About what to hold in memory at once.")
@click.option("--force", is_flag=True, help="Replace OUT where it is there.")
@as_json()
def command(places: tuple[str, ...], kind: str, memory: str, force: bool, as_json: bool) -> None:
    """Write checkpoint TAG (default: latest) to OUT, a directory that torch.distributed.checkpoint's FileSystemReader loads.

    OUT appears whole or not at all. Every byte is verified on the way. For safetensors and torch files see `consolidate`.
    """
    if not places:
        raise UsageError("where to? Give the place, as in `checkpointd export /mnt/ckpts/run1 /mnt/dcp/run1 --format dcp`")
    *before, out = places
    root, tag = root_and_maybe_tag(tuple(before), "export")
    check_root(open_store(root))
    act = module_for(kind, "exporting").export_dcp
    with progress() as on_progress:
        done = act(root, out, tag, force=force, memory=memory, on_progress=on_progress)
    if as_json:
        show_json(done)
        return
    show(page(done))
    if done.left_out:
        named = ", ".join(done.left_out[:8])
        warn(f"{count(len(done.left_out), 'value')} stayed behind, as it differs between ranks or is an array: {named}")


def page(done: Any) -> Iterator[Block]:
    """The page for people; `done` is the client's `ExportedDCP`."""
    yield Heading(f"{done.tag} -> {done.out}")
    yield Facts(
        [("step", str(done.step)), ("tensors", str(done.tensors)), ("values", str(done.values)), ("size", size(done.bytes))]
    )
    yield Table(("file", "size"), [(file.name, size(file.size)) for file in done.files], right=frozenset({"size"}))
