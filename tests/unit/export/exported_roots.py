"""Roots whose model is exported, and what an export must be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from checkpointd.config import ExportConfig
from checkpointd.export.bucket_output import record_at
from checkpointd.export.following import Exporter, ExportPace
from checkpointd.export.record import ExportRecord
from checkpointd.export.target import BucketTarget, DirectoryTarget
from checkpointd.pipeline.root.leases import Sight
from checkpointd.store.base import Store
from tests.builders import save_checkpoint

CONFIG = b'{"model_type": "llama", "dtype": "float32"}'
NAMES = ("embed.weight", "layers.0.weight", "norm.weight")


def arrays(step: int, rows: int = 40) -> dict[str, np.ndarray]:
    """The model of a step."""
    random = np.random.default_rng(step)
    return {name: random.normal(size=(rows, 5 + at)).astype(np.float32) for at, name in enumerate(NAMES)}


async def save(store: Store, *steps: int, rows: int = 40, **options: object) -> None:
    for step in steps:
        state = {f"model.{name}": value for name, value in arrays(step, rows).items()} | {"optimizer.moment": np.full(30, step)}
        tag = str(options.get("tag", f"global_step{step}"))
        more = {name: value for name, value in options.items() if name != "tag"}
        await save_checkpoint(store, tag=tag, step=step, world_size=1, tensors=lambda _, state=state: state, **more)


def to_directory(root: Store, to: Path, *, sight: Sight | None = None, **config: object) -> Exporter:
    target = DirectoryTarget(str(to))
    return Exporter(root, target, ExportConfig(to=str(to), **config), ExportPace(poll_s=0.02), sight=sight)  # type: ignore[arg-type]


def to_bucket(root: Store, to: Store, *, sight: Sight | None = None, **config: object) -> Exporter:
    return Exporter(
        root, BucketTarget(to), ExportConfig(to="s3://bucket/exports", **config), ExportPace(poll_s=0.02), sight=sight
    )  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.002)


async def files_at(to: Store, tag: str) -> dict[str, bytes]:
    return {entry.name: await to.get(f"{tag}/{entry.name}") for entry in await to.list(tag)}


def weights_in(files: Mapping[str, bytes]) -> dict[str, np.ndarray] | None:
    """The tensors that Hugging Face's libraries find: by the index, or in the one file; None if they find no model."""
    if "config.json" not in files:
        return None
    if "model.safetensors.index.json" in files:
        index = json.loads(files["model.safetensors.index.json"])
        return {name: load(files[file])[name] for name, file in index["weight_map"].items()}
    return load(files["model.safetensors"]) if "model.safetensors" in files else None


def is_model_of(step: int, found: Mapping[str, np.ndarray]) -> bool:
    wanted = arrays(step, len(next(iter(found.values()))))
    return wanted.keys() == found.keys() and all(np.array_equal(wanted[name], found[name]) for name in wanted)


async def check_exported(to: Store, step: int, tag: str | None = None) -> ExportRecord:
    """The export of `step` is whole; returns its record."""
    tag = tag or f"global_step{step}"
    files, record = await files_at(to, tag), await record_at(to, tag)
    assert record is not None
    assert record.complete
    assert files.keys() == {*record.files, "checkpointd.json"}
    found = weights_in(files)
    assert found is not None
    assert is_model_of(step, found)
    return record


async def tags_at(to: Store) -> list[str]:
    return [entry.name for entry in await to.list("") if not entry.name.startswith(".")]
