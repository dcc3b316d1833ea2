"""`checkpointd import`: turns another program's checkpoint into one of checkpointd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkpointd.cli.arguments import EXAMPLE_ROOT, as_json, given_root, places
from checkpointd.cli.formats import IMPORTS, module_for
from checkpointd.cli.formatting import count, size
from checkpointd.cli.progress import progress_of_bytes
from checkpointd.cli.render import Block, Facts, Heading, show_answer, warn
from checkpointd.commands import command as command_line
from checkpointd.errors import UsageError


@click.command("import", short_help="Turn another program's checkpoint into one of checkpointd.")
@places("SRC [ROOT]")
@click.option("--from", "kind", type=click.Choice(IMPORTS), default="dcp", show_default=True, help="The format of SRC.")
@click.option(
    "--tag",
    metavar="TAG",
    help="The new tag; for deepspeed, the tag to read.  [default: SRC's name; for deepspeed, the latest]",
)
@click.option("--step", type=int, help="The step.  [default: from SRC, otherwise the last number in the tag]")
@click.option("--latest/--no-latest", default=True, show_default=True, help="Whether `latest` will name it.")
@click.option("--memory", metavar="SIZE", default="512MiB", show_default=True, help="Approximate memory to use.")
@click.option(
    "--module", metavar="NAME", help="For dcp: the name of the module whose state_dict() was saved alone, as in --module model."
)
@click.option("--leave-out", is_flag=True, help="For deepspeed: leave out values that cannot be stored safely.")
@click.option("--force", is_flag=True, help="Also if TAG exists; it is then saved again.")
@as_json()
def command(
    places: tuple[str, ...],
    kind: str,
    tag: str | None,
    step: int | None,
    latest: bool,
    memory: str,
    module: str | None,
    leave_out: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Turn SRC into a checkpoint at ROOT. SRC is only read.

    SRC is a directory of torch.distributed.checkpoint (FileSystemWriter), or with --from deepspeed the save_dir of a DeepSpeed
    job. The checkpoint commits as a whole, or not at all. If ROOT does not exist, it is made; no job may run at it.
    """
    if not places:
        raise UsageError("import what? Give a directory, as in " + command_line("import", "/mnt/dcp/step100", EXAMPLE_ROOT))
    source, *root = places
    options: dict[str, Any] = {"step": step, "save_latest": latest, "force": force, "memory": memory}
    if kind == "deepspeed":
        options["leave_out"] = leave_out
        if module is not None:
            raise UsageError("--module is for --from dcp; DeepSpeed's checkpoints name their module")
    else:
        options["module"] = module
        if leave_out:
            raise UsageError(f"--leave-out is for --from deepspeed; of {kind}, everything is imported")
    act = getattr(module_for(kind, "importing"), f"import_{kind}")
    with progress_of_bytes() as on_progress:
        done = act(source, given_root(tuple(root), "import", source), tag, on_progress=on_progress, **options)
    show_answer(done, page, as_json=as_json)
    if as_json:
        return
    if kind == "deepspeed" and done.left_out:
        warn(f"{count(len(done.left_out), 'value')} were left out: {'; '.join(done.left_out[:8])}")
    if kind == "dcp" and done.pickled:
        named = ", ".join(done.pickled[:8])
        warn(f"{count(len(done.pickled), 'value')} stayed pickled, and may need weights_only=False to load: {named}")
    if kind == "dcp" and done.loose:
        again = command_line("import", "--from", "dcp", "--force", "--module", "model", source, done.root, "--tag", done.tag)
        warn(
            f"{', '.join(done.loose)} lie at the top, as tensors of a module whose state_dict() was saved alone. For "
            f"load({{'model': model}}), name the module: {again}"
        )


def page(done: Any) -> Iterator[Block]:
    """The page for people; `done` is the client's `ImportedDCP` or `ImportedDeepSpeed`."""
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
