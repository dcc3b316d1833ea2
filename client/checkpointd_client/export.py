"""A checkpoint without the job that saved it: as files for other programs, or as tensors that are read when asked for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import torch

from checkpointd.config import LoadConfig
from checkpointd.errors import NotFoundError
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.keys import LATEST
from checkpointd.layout.regions import slices
from checkpointd.pipeline import catalog
from checkpointd.pipeline.export import consolidate as exporting
from checkpointd.pipeline.export.consolidate import MEMORY_BYTES, Consolidation, Container, DType, Request, Safetensors
from checkpointd.pipeline.export.selection import Exported, Source, select
from checkpointd.pipeline.export.sizes import byte_count
from checkpointd.pipeline.world import CARRIERS, BoxSink, Want, World, read_boxes, read_world
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd_client.dtypes import DTYPES, empty
from checkpointd_client.torch_file import TorchFile

T = TypeVar("T")
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
    on_progress: Callable[[int, int], None] = lambda _, __: None,
) -> Consolidation:
    """Write checkpoint `tag` (default: latest), or the state under `only` of it, as plain files to `out`.

    `out` is a directory of safetensors files, as Hugging Face's libraries load them; one file where it ends in `.safetensors`;
    with `format="torch"` a file for torch.load(weights_only=True). It appears whole or not at all. Floats become `dtype`,
    rounded as torch rounds. `rank`: whose tensors, of those that each rank holds for itself and that differ. About `memory`
    bytes are held at once, whatever the model's size. `on_progress` is told bytes written and their total.

    Raises NotFoundError, UsageError where `out` is in the way or the format cannot hold a tensor, DamagedError with object,
    FQN and rank, StoreError, StoreFullError.
    """
    request = Request(tag=tag, only=only, dtype=dtype, rank=rank, force=force, memory_bytes=byte_count(memory, "memory"))
    container: Container = TorchFile()
    if format == "safetensors":
        container = Safetensors(out, byte_count(max_shard_size, "max_shard_size"))
    return run_on_store(root, lambda store: exporting.consolidate(store, out, container, request, on_progress))


def state_dict_from_checkpoint(
    root: Root, tag: str | None = None, only: str | None = None, *, rank: int | None = None
) -> StateDict:
    """The tensors of checkpoint `tag` (default: latest) by FQN, or by their names below `only`, each read when it is asked for.

    Only the indexes are read here. Raises NotFoundError, UsageError where ranks hold different tensors under one name and
    `rank` does not say whose is meant, DamagedError.
    """

    async def look(store: Store) -> World:
        name = tag if tag is not None and tag != LATEST else await catalog.latest(store)
        if name is None:
            raise NotFoundError(f"there is no {LATEST} at {store.url}: name a tag")
        return await read_world(store, await catalog.find(store, name), LoadConfig())

    world = run_on_store(root, look)
    return StateDict(root, world, {tensor.name: tensor for tensor in select(world, only, rank).names})


class StateDict(Mapping[str, torch.Tensor]):
    """Tensors on the CPU by name, read and verified on access, each time anew unless the last one is still in use.

    Names that shared memory when they were saved share it again while one of them is in use. Access raises DamagedError with
    object, FQN and rank where stored bytes are not what was written.
    """

    def __init__(self, root: Root, world: World, tensors: Mapping[str, Exported]) -> None:
        self._root, self._world, self._tensors = root, world, tensors
        self._live: WeakValueDictionary[Source, torch.Tensor] = WeakValueDictionary()

    @property
    def tag(self) -> str:
        return self._world.checkpoint.tag

    @property
    def step(self) -> int:
        return self._world.checkpoint.outcome.step

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading it."""
        return DTYPES[self._tensors[name].dtype]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        owner = self._live.get(tensor.source)
        if owner is None:
            owner = self._live[tensor.source] = self._read(tensor.source)
        view = tensor.view
        if tensor.fqn == tensor.source.fqn:
            return owner
        shown = owner.as_strided(view.shape, view.stride, view.offset)
        shown._checkpointd_owner = owner  # type: ignore[attr-defined]  # keeps it known while the view is in use
        return shown

    def _read(self, source: Source) -> torch.Tensor:
        made = empty(source.shape, DTYPES[source.dtype], torch.device("cpu"))
        want = Want(source.fqn, whole(source.shape), _filling(made), source.rank)
        damage = run_on_store(self._root, lambda store: read_boxes(store, self._world, [want], LoadConfig()))
        if damage:
            raise damage[0]
        return made


def _filling(made: torch.Tensor) -> BoxSink:
    flat = made.reshape(-1).view(torch.uint8).numpy()
    array = flat.view(CARRIERS[made.itemsize]).reshape(tuple(made.shape))
    frame = whole(tuple(made.shape))

    def sink(box: Box, elements: Any) -> None:
        array[slices(frame, box)] = elements

    return sink


def run_on_store(root: Root, question: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    """What `question` makes of the store at `root`; on a thread of its own where this one runs a loop, as in a notebook."""

    async def ask() -> T:
        async with open_store(root) as store:
            return await question(store)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(ask())
    with ThreadPoolExecutor(1, thread_name_prefix="checkpointd-export") as thread:
        return thread.submit(asyncio.run, ask()).result()
