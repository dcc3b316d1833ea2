"""A DCP StorageReader: DCP plans which boxes each rank needs, our indexes say where they lie, and only their chunks are read.

Invariants
  DCPREAD-1  DCP's metadata is made from the indexes. All bytes that DCP's planner unpickles are made here: from plain values,
      or from what torch.load(weights_only=True) loads. Unless `weights_only` is False, it never has bytes that are stored.
  DCPREAD-2  All ranks read one checkpoint, even if another one is committed meanwhile.
  DCPREAD-3  Each chunk is verified, and damage raises an error. Tensors may be filled by then, as always with DCP.
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

from checkpointd import arguments
from checkpointd.config import PINNED_BYTES
from checkpointd.errors import CheckpointdError, MismatchError
from checkpointd.export.selection import Exported
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.keys import LATEST, check_tag
from checkpointd.layout.regions import slices
from checkpointd.phrases import listed
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd_client.capture.dtypes import DTYPES, empty
from checkpointd_client.capture.pickled import loaded, saved, where_it_was
from checkpointd_client.integrations.conversion.objects import OPT_IN
from checkpointd_client.integrations.dcp.content import DcpContent, content_of, is_whole
from checkpointd_client.integrations.dcp.session import take_up
from checkpointd_client.integrations.dcp.tagged import Tagged
from checkpointd_client.reader import OpenCheckpoint, open_checkpoint
from checkpointd_client.restore.sinks import box_sink, host_sink
from checkpointd_client.restore.uploads import Uploads

log = logging.getLogger("checkpointd")

After = Callable[[], None]
"""Finishes an item once its bytes are read."""


class CheckpointdReader(Tagged, StorageReader):
    """Lets `dcp.load` read checkpoint `tag` (default: the newest) below `root`, saved by dcp.save or by a Checkpointer.

    `checkpoint_id` of dcp.load names the tag, too. `weights_only`: objects that are not plain values are loaded only if
    torch.load(weights_only=True) loads them; False passes them to DCP's planner, which runs the code that they name.
    `pinned_bytes`: the most host memory that a load to devices pins; 0 pins none.

    A tensor of another dtype gets the stored elements converted, as always with DCP. dcp.load raises CheckpointException, whose
    `failures` hold the error of each rank: DamagedError with object, FQN and rank, or UnsafeObjectError. If the checkpoint
    cannot be found or its indexes cannot be read, DCP raises an AssertionError with the reason.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        tag: str | None = None,
        *,
        weights_only: bool = True,
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:
        super().__init__()
        arguments.whole("pinned_bytes", pinned_bytes, least=0)
        self._root = root
        self._tag = None if tag is None else _checked(tag)
        self._weights_only, self._pinned_bytes = weights_only, pinned_bytes
        self._opened: tuple[OpenCheckpoint, DcpContent] | None = None

    @property
    def checkpoint(self) -> OpenCheckpoint:
        """The checkpoint that dcp.load reads or has read: its `.tag`, `.step`, `.client_state`, `.metrics` and more."""
        return self._open()[0]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if self._opened is not None:
            self._opened[0].close()
        self._opened = None
        if checkpoint_id is not None:
            self._tag = _checked(os.fspath(checkpoint_id))

    def read_metadata(self, *args: Any, **_options: Any) -> Metadata:
        try:
            content = self._content
        except CheckpointdError as error:
            log.error("%s", error)  # torch before 2.12 drops this error, and raises "metadata is None"
            raise
        if content.left_out:
            log.info("%s: DCP cannot represent %s", content.world.checkpoint.tag, listed(content.left_out))
        return content.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **_options: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._content.world.checkpoint.prefix)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check on the coordinator that all ranks have found the same checkpoint (DCPREAD-2)."""
        found = {plan.storage_data: i for i, plan in enumerate(plans)}
        if len(found) > 1:
            each = ", ".join(f"rank {rank}: {prefix}" for prefix, rank in found.items())
            raise MismatchError(f"the ranks found different checkpoints ({each}): one was committed meanwhile; load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        wants, afters = [], []
        with Uploads(self._pinned_bytes) as uploads:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, BytesIO(self._object(item.storage_index.fqn)))
                    continue
                want, after = self._tensor(item, planner, uploads)
                wants.append(want)
                afters.append(after)
            self.checkpoint.read(wants)
        for after in afters:
            after()
        take_up(os.fspath(self._root), self._content.world.checkpoint)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    # --- parts -------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[OpenCheckpoint, DcpContent]:
        if self._opened is None:
            reader = open_checkpoint(self._root, self._tag or LATEST)
            self._opened = reader, content_of(reader.world)
        return self._opened

    @property
    def _content(self) -> DcpContent:
        return self._open()[1]

    def _object(self, name: str) -> bytes:
        data = self._content.object_bytes(name)
        if self._weights_only and name in self._content.objects:
            return saved(loaded(data, name, opt_in=OPT_IN, map_location=where_it_was))
        return data

    def _tensor(self, item: ReadItem, planner: LoadPlanner, uploads: Uploads) -> tuple[BoxRequest, After]:
        """The request for `item`, and the function that finishes it."""
        tensor = self._content.tensors[item.storage_index.fqn]
        start = item.storage_index.offset or (0,) * len(item.lengths)
        box = Box(tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True)), tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != box.sizes:
            raise MismatchError(
                f"{tensor.name}: a target of shape {list(target.shape)} cannot be filled with {list(box.sizes)}"
            )
        if is_whole(tensor):
            sink = box_sink(target, box, tensor.name, tensor.source.dtype, uploads)
            want = BoxRequest(tensor.source.fqn, box, sink, tensor.source.rank)
            return want, lambda: planner.commit_tensor(item, target)
        return self._viewed(tensor, box, target, lambda: planner.commit_tensor(item, target))

    @staticmethod
    def _viewed(tensor: Exported, box: Box, target: torch.Tensor, commit: After) -> tuple[BoxRequest, After]:
        """The same for a view of a stored tensor: the whole tensor is read, and the view is cut from it."""
        source, view = tensor.source, tensor.view
        owner = empty(source.shape, DTYPES[source.dtype], torch.device("cpu"))
        everything = whole(source.shape)

        def after() -> None:
            shown = owner.as_strided(view.shape, view.stride, view.offset)
            with torch.no_grad():
                target.copy_(shown[slices(whole(view.shape), box)])
            commit()

        return BoxRequest(source.fqn, everything, host_sink(owner, everything, source.dtype), source.rank), after


def _checked(tag: str) -> str:
    return tag if tag == LATEST else check_tag(tag)
