"""`checkpointd export`: a checkpoint in another program's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkpointd.cli.arguments import as_json, before_out, places, root_and_maybe_tag
from checkpointd.cli.asking import ask, check_place, maybe_named_tag
from checkpointd.cli.formats import EXPORTS, module_for
from checkpointd.cli.formatting import count, size
from checkpointd.cli.progress import progress_of_bytes
from checkpointd.cli.render import Block, Facts, Heading, Table, show_answer, warn
from checkpointd.errors import UsageError


@click.command("export", short_help="Write a checkpoint in another program's format.")
@places("[ROOT] [TAG] OUT")
@click.option(
    "--format", "--to", "kind", type=click.Choice(EXPORTS), default="dcp", show_default=True, help="The format of OUT."
)
@click.option("--stage", type=click.IntRange(1, 3), help="For deepspeed: the engine's ZeRO stage.  [default: 2]")
@click.option("--ranks", type=click.IntRange(1), help="For deepspeed: the number of ranks that will load it.  [default: 1]")
@click.option("--memory", metavar="SIZE", default="512MiB", show_default=True, help="Approximate memory to use.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@as_json()
def command(
    places: tuple[str, ...],
    kind: str,
    stage: int | None,
    ranks: int | None,
    memory: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write checkpoint TAG (default: latest) to OUT, a directory that torch.distributed.checkpoint's FileSystemReader loads.

    With --to deepspeed, OUT is a directory for DeepSpeed's load_checkpoint, for an engine at the given stage and number of
    ranks; one file is in memory at a time. OUT appears whole or not at all. Every byte is verified on the way. For
    safetensors and torch files see `consolidate`.
    """
    before, out = before_out(places, "export", "/mnt/dcp/run1")
    root, tag = root_and_maybe_tag(before, "export")
    options: dict[str, Any] = {"memory": memory}
    if kind == "deepspeed":
        options = {"stage": stage or 2, "ranks": ranks or 1}
    elif stage or ranks:
        raise UsageError(f"--stage and --ranks are for --to deepspeed; {kind} has neither")
    check_place(root, tag, out, "export")
    act = getattr(module_for(kind, "exporting"), f"export_{kind}")
    tag = ask(root, lambda store: maybe_named_tag(store, tag), read_only=True)
    with progress_of_bytes() as on_progress:
        done = act(root, out, tag, force=force, on_progress=on_progress, **options)
    show_answer(done, page, as_json=as_json)
    if as_json:
        return
    if done.left_out:
        named = ", ".join(done.left_out[:8])
        why = "what differs between ranks, arrays, and tensors in client_state cannot be exported"
        warn(f"{count(len(done.left_out), 'value')} stayed behind, since {why}: {named}")


def page(done: Any) -> Iterator[Block]:
    """The page for people; `done` is the client's result."""
    yield Heading(f"{done.tag} -> {done.out}")
    values = [("values", str(done.values))] if done.format == "dcp" else []
    yield Facts([("step", str(done.step)), ("tensors", str(done.tensors)), *values, ("size", size(done.bytes))])
    yield Table(("file", "size"), [(file.name, size(file.size)) for file in done.files], right=frozenset({"size"}))
