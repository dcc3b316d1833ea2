"""`checkpointd consolidate`: a checkpoint as plain files for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import click

from checkpointd.cli.arguments import as_json, before_out, given_root_and_maybe_tag, located, places
from checkpointd.cli.asking import ask, check_place, maybe_named_tag, place_is_missing
from checkpointd.cli.formats import module_for
from checkpointd.cli.formatting import count, size
from checkpointd.cli.progress import progress_of_bytes
from checkpointd.cli.render import Block, Facts, Heading, Table, show_answer
from checkpointd.commands import install
from checkpointd.errors import UsageError
from checkpointd.export.beside import read_beside
from checkpointd.export.consolidate import Consolidation, Container, ExportRequest, Safetensors, consolidate
from checkpointd.phrases import byte_count
from checkpointd.store.base import Store

FORMATS = ("safetensors", "torch")
DTYPES = ("keep", "fp32", "bf16")
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


@click.command("consolidate", short_help="Write a checkpoint as safetensors or as a torch file.")
@places("[ROOT] [TAG] OUT")
@click.option("--only", metavar="NAME", help="Only the state below this name, such as 'model'. Tensor names start after it.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="keep", show_default=True, help="The dtype of floating-point tensors."
)
@click.option("--format", "kind", type=click.Choice(FORMATS), help="[default: torch if OUT ends in .pt, .pth or .bin]")
@click.option(
    "--max-shard-size", metavar="SIZE", default="5GB", show_default=True, help="The largest size of one safetensors file."
)
@click.option("--plain-names", is_flag=True, help="Drop what torch.compile, FSDP and DDP have put into the names of tensors.")
@click.option("--files", metavar="DIR", help="Copy configuration and tokenizer from DIR beside the weights.")
@click.option("--rank", type=int, help="The rank whose per-rank tensors to take.")
@click.option("--memory", metavar="SIZE", default="512MiB", show_default=True, help="Approximate memory to use.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@as_json()
def command(
    places: tuple[str, ...],
    only: str | None,
    dtype: str,
    kind: str | None,
    max_shard_size: str,
    plain_names: bool,
    files: str | None,
    rank: int | None,
    memory: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write checkpoint TAG (default: latest) as plain files to OUT, which appears whole or not at all.

    OUT is a directory of safetensors files, as Hugging Face's libraries load them, or the URL of one in a bucket. If it ends in
    .safetensors, it is one such file; if it ends in .pt, .pth or .bin, a file for torch.load(weights_only=True). Every byte is
    verified on the way.

    ROOT may also be the save_dir of a DeepSpeed job: its fp32 weights are then written.
    """
    before, out = before_out(places, "consolidate", "model.safetensors")
    given, tag = given_root_and_maybe_tag(before, "consolidate")
    request = ExportRequest(
        tag=tag,
        only=only,
        dtype=dtype,  # type: ignore[arg-type]  # click has checked it
        rank=rank,
        force=force,
        memory_bytes=byte_count(memory, "--memory"),
        plain_names=plain_names,
        beside=None if files is None else read_beside(files, dtype),
    )
    container = _container(out, kind, byte_count(max_shard_size, "--max-shard-size"))
    directory_of = module_for("deepspeed", "file_names").directory_of
    zero = directory_of(given, tag)
    root, tag = (given, tag) if zero is not None else located(given, tag)
    if zero is None:
        check_place(root, tag, out, "consolidate")
    elif tag is None and "/" not in out and directory_of(given, out) is not None:
        raise place_is_missing(root, out, "consolidate")

    async def write(store: Store) -> Consolidation:
        named = replace(request, tag=await maybe_named_tag(store, tag))
        return await consolidate(store, out, container, named, on_progress)

    with progress_of_bytes() as on_progress:
        if zero is not None:
            act = module_for("deepspeed", "consolidating").consolidate_zero
            done = act(root, zero, out, container, request, on_progress)
        else:
            done = ask(root, write, read_only=True)
    show_answer(done, page, as_json=as_json)


def _container(out: str, kind: str | None, file_bytes_max: int) -> Container:
    told = "torch" if out.endswith(TORCH_SUFFIXES) else "safetensors" if out.endswith(".safetensors") else None
    if kind is not None and told is not None and kind != told:
        raise UsageError(f"--format {kind} does not fit {out}, by whose name programs expect {told}: change one of the two")
    kind = kind or told or "safetensors"
    if kind == "safetensors":
        return Safetensors(out, file_bytes_max)
    try:
        made: Container = import_module("checkpointd_client.export.torch_file").TorchFile()
    except ImportError as error:
        raise UsageError(
            f"--format torch needs torch, which cannot be imported ({error}): {install('torch')}, or use --format safetensors"
        ) from error
    return made


def page(done: Consolidation) -> Iterator[Block]:
    """The page for people: what was written, and the files."""
    yield Heading(f"{done.tag} -> {done.out}")
    tied = f", {count(len(done.tied), 'name')} of them tied" if done.tied else ""
    yield Facts([("step", str(done.step)), ("tensors", f"{done.tensors}{tied}"), ("size", size(done.bytes))])
    yield Table(("file", "size"), [(file.name, size(file.size)) for file in done.files], right=frozenset({"size"}))
