"""A DCP StorageReader: DCP plans what each rank needs, our indexes say where it lies, and only those chunks are read.

Invariants
  R1  Nothing here unpickles: what a checkpoint holds of DCP's metadata is in the indexes. Bytes that DCP's planner unpickles
      are made here from plain values, or pass torch.load(weights_only=True) first.
  R2  All ranks read one checkpoint, whatever is committed meanwhile.
  R3  Each chunk is verified before its bytes reach a tensor. Other tensors may be filled by then, as DCP does it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from checkpointd.config import LoadConfig
from checkpointd.errors import MismatchError, NotFoundError
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.keys import LATEST, check_tag
from checkpointd.pipeline import catalog
from checkpointd.pipeline.export.selection import Exported
from checkpointd.pipeline.world import Want, World, read_boxes, read_world
from checkpointd.store.base import Store
from checkpointd_client.dtypes import DTYPES, empty
from checkpointd_client.export import run_on_store
from checkpointd_client.integrations.dcp.content import Content, content_of, is_whole
from checkpointd_client.integrations.dcp.objects import OPT_IN
from checkpointd_client.integrations.dcp.tagged import Tagged
from checkpointd_client.pickled import loaded
from checkpointd_client.sinks import box_sink

log = logging.getLogger("checkpointd")
SHOWN_MAX = 8

After = Callable[[], None]
"""What is left to do with an item when its bytes are there."""


class CheckpointdReader(Tagged, StorageReader):
    """What `dcp.load` reads from: checkpoint `tag` (default: the newest) below `root`, saved by dcp.save or by a Checkpointer.

    `checkpoint_id` of dcp.load names the tag, too. `weights_only`: objects that are no plain values are loaded only where
    torch.load(weights_only=True) does; False hands them to DCP's planner, which runs the code that they name.

    As DCP has it, a tensor of another dtype gets the stored elements converted. dcp.load raises CheckpointException, whose
    `failures` hold what happened on each rank: DamagedError with object, FQN and rank, UnsafeObjectError; where the checkpoint
    cannot be found or its indexes not be read, an AssertionError of DCP's own that says so.
    """

    def __init__(self, root: str | os.PathLike[str], tag: str | None = None, *, weights_only: bool = True) -> None:
        super().__init__()
        self._root = root
        self._tag = tag if tag is None or tag == LATEST else check_tag(tag)
        self._weights_only = weights_only
        self._content: Content | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._content = None
        if checkpoint_id is not None:
            self._tag = check_tag(os.fspath(checkpoint_id))

    def read_metadata(self, *args: Any, **_options: Any) -> Metadata:
        self._content = run_on_store(self._root, self._look)
        if self._content.left_out:
            shown = ", ".join(self._content.left_out[:SHOWN_MAX]) + (", ..." if len(self._content.left_out) > SHOWN_MAX else "")
            log.info("%s: DCP is not told of %s", self._content.world.checkpoint.tag, shown)
        return self._content.metadata()

    async def _look(self, store: Store) -> Content:
        tag = self._tag
        if tag is None or tag == LATEST:
            tag = await catalog.latest(store)
        if tag is None:
            raise NotFoundError(f"there is no {LATEST} at {store.url}: name a tag")
        return content_of(await read_world(store, await catalog.find(store, tag), LoadConfig()))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **_options: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._known.world.checkpoint.prefix)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: that all ranks have found the same one (R2)."""
        found = {plan.storage_data: i for i, plan in enumerate(plans)}
        if len(found) > 1:
            each = ", ".join(f"rank {rank}: {prefix}" for prefix, rank in found.items())
            raise MismatchError(f"the ranks found different checkpoints ({each}): one was committed meanwhile; load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        wants, afters = [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, BytesIO(self._object(item.storage_index.fqn)))
                continue
            want, after = self._tensor(item, planner)
            wants.append(want)
            afters.append(after)
        world = self._known.world
        self._read(world, wants)
        for after in afters:
            after()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    # --- parts -------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> Content:
        if self._content is None:
            self.read_metadata()
        assert self._content is not None
        return self._content

    def _read(self, world: World, wants: list[Want]) -> None:
        damage = run_on_store(self._root, lambda store: read_boxes(store, world, wants, LoadConfig()))
        if damage:
            raise damage[0]

    def _object(self, name: str) -> bytes:
        data = self._known.object_bytes(name)
        if self._weights_only and name in self._known.objects:
            loaded(data, name, opt_in=OPT_IN)
        return data

    def _tensor(self, item: ReadItem, planner: LoadPlanner) -> tuple[Want, After]:
        """What to read for `item`, and what to do then."""
        tensor = self._known.tensors[item.storage_index.fqn]
        start = item.storage_index.offset or (0,) * len(item.lengths)
        box = Box(tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True)), tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != box.sizes:
            raise MismatchError(f"{tensor.name}: {list(target.shape)} is to be filled with {list(box.sizes)}")
        if is_whole(tensor):
            sink = box_sink(target, box, tensor.source.dtype)
            want = Want(tensor.source.fqn, box, sink, tensor.source.rank)
            return want, lambda: planner.commit_tensor(item, target)
        return self._viewed(tensor, box, target, lambda: planner.commit_tensor(item, target))

    @staticmethod
    def _viewed(tensor: Exported, box: Box, target: torch.Tensor, commit: After) -> tuple[Want, After]:
        """A view of a stored tensor: all of that is read, and the view cut from it."""
        source, view = tensor.source, tensor.view
        owner = empty(source.shape, DTYPES[source.dtype], torch.device("cpu"))
        everything = whole(source.shape)

        def after() -> None:
            shown = owner.as_strided(view.shape, view.stride, view.offset)
            cut = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            with torch.no_grad():
                target.copy_(shown[cut])
            commit()

        return Want(source.fqn, everything, box_sink(owner, everything, source.dtype), source.rank), after
