"""Checkpoints of real parallel jobs as the files that other programs load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from checkpointd_client import consolidate

PARALLEL = ("ddp", "zero", "fsdp2", "tp", "hsdp")
DTYPES = ("bf16", "fp32")


def wrong_exports(folder: Path, worlds: tuple[int, ...], dtypes: Iterable[str] = DTYPES) -> Iterator[str]:
    """What is wrong with the exports of the checkpoints `<layout>-<dtype>-<world>` in `folder/root`, each beside a file of what
    it holds: as safetensors, several files with an index, and as one file for torch, converted.
    """
    for world in worlds:
        for layout in PARALLEL:
            for dtype in dtypes:
                tag = f"{layout}-{dtype}-{world}"
                plain = torch.load(folder / f"{tag}.pt", weights_only=True)
                # What is no parameter and no buffer is state of an optimizer.
                wanted = {name: tensor for name, tensor in plain.items() if "/" not in name}
                yield from (f"{tag}: {words}" for words in _wrong(folder, tag, wanted))


def _wrong(folder: Path, tag: str, wanted: dict[str, torch.Tensor]) -> Iterator[str]:
    directory, file = folder / f"{tag}.export", folder / f"{tag}.export.pt"
    consolidate(folder / "root", directory, tag, only="model", max_shard_size="64KB")
    found = {name: tensor for part in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(part).items()}
    if not (directory / "model.safetensors.index.json").exists():
        yield "there is no index, or one file alone"
    yield from _differences(found, wanted)
    consolidate(folder / "root", file, tag, only="model", dtype="fp32", format="torch")
    yield from _differences(torch.load(file, weights_only=True), {name: tensor.float() for name, tensor in wanted.items()})


def _differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Iterator[str]:
    found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    if found.keys() != wanted.keys():
        yield f"names {sorted(found)}, not {sorted(wanted)}"
        return
    for name, tensor in wanted.items():
        if found[name].dtype != tensor.dtype or not found[name].equal(tensor):
            yield f"{name} is another"
