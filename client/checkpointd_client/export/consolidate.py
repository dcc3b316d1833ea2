"""A checkpoint as files for other programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from checkpointd import arguments
from checkpointd.export import consolidate as exporting
from checkpointd.export.beside import read_beside
from checkpointd.export.consolidate import MEMORY_BYTES, Consolidation, Container, DType, ExportRequest, Safetensors
from checkpointd.phrases import byte_count
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore
from checkpointd_client.export.torch_file import TorchFile

T = TypeVar("T")
RETRY_S = 3.0
"""How long a failed read is tried again: only briefly, since the user waits for the answer."""
Root = str | os.PathLike[str]


def consolidate(
    root: Root,
    out: Root,
    tag: str | None = None,
    *,
    only: str | None = None,
    dtype: DType = "keep",
    format: Literal["safetensors", "torch"] = "safetensors",
    max_shard_size: int | str = "5GB",
    rank: int | None = None,
    force: bool = False,
    memory: int | str = MEMORY_BYTES,
    plain_names: bool = False,
    files: Root | None = None,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> Consolidation:
    """Write checkpoint `tag` (default: latest), or only the part `only` of its state, as plain files to `out`.

    `out` is a directory of safetensors files, as Hugging Face's libraries load them, or the URL of such a place in a bucket. If
    it ends in `.safetensors`, it is one file; with `format="torch"` it is a file for torch.load(weights_only=True). It appears
    whole or not at all. Floats become `dtype`, rounded as torch rounds. `rank`: if ranks stored different tensors under one
    name, that of this rank is written. About `memory` bytes are held at once, for a model of any size. `on_progress` gets the
    bytes written and their total.

    `plain_names`: names lose what torch.compile, FSDP, activation checkpointing and DistributedDataParallel have put into them.
    `files`: a directory whose files, without weights, are copied beside the weights: configuration and tokenizer.

    Raises NotFoundError, UsageError if `out` is in the way or the format cannot hold a tensor, DamagedError with object, FQN
    and rank, StoreError, StoreFullError.
    """
    arguments.path("out", out)
    request = ExportRequest(
        tag=tag,
        only=only,
        dtype=dtype,
        rank=rank,
        force=force,
        memory_bytes=byte_count(memory, "memory"),
        plain_names=plain_names,
        beside=None if files is None else read_beside(files, dtype),
    )
    container: Container = TorchFile()
    if format == "safetensors":
        container = Safetensors(out, byte_count(max_shard_size, "max_shard_size"))
    return run_on_store(root, lambda store: exporting.consolidate(store, out, container, request, on_progress), read_only=True)


def run_on_store(root: Root, question: Callable[[Store], Coroutine[Any, Any, T]], *, read_only: bool = False) -> T:
    """Run `question` on the store at `root`; on another thread if this one runs an event loop, as in a notebook.

    With `read_only` it cannot write, and a failed read is tried again for RETRY_S seconds.
    """

    async def ask() -> T:
        async with open_store(root, read_only=read_only) as store:
            return await question(PatientStore(store, Patience(RETRY_S, absence_s=0.0)) if read_only else store)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(ask())
    with ThreadPoolExecutor(1, thread_name_prefix="checkpointd-export") as thread:
        return thread.submit(asyncio.run, ask()).result()
