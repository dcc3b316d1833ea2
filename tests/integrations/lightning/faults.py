"""Lets the disk fail, or the process die, around the saves of some steps of a training."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Callback

from checkpointd.errors import StoreError
from checkpointd.layout.keys import vote_name
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.integrations.lightning import CheckpointdIO, CheckpointdModelParallelStrategy


@dataclass(eq=False)
class Fails(Callback):
    """On `rank`, the saves of the steps `fail` fail, and the process dies in that of step `die`. `per_batch`: steps a batch."""

    saver: CheckpointdIO | CheckpointdModelParallelStrategy
    fail: Collection[int]
    die: int
    rank: int = 0
    per_batch: int = 1

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step + self.per_batch
        self.saver.settle()  # the saves before are not meant
        if trainer.global_rank != self.rank:
            return
        PosixStore.open_writer = _fails if step in self.fail else _OPEN_WRITER  # type: ignore[method-assign]
        if step == self.die:
            _die_while_writing(self.rank)


_OPEN_WRITER = PosixStore.open_writer


async def _fails(*_: Any, **__: Any) -> Any:
    raise StoreError("no space is left on this disk")


def _die_while_writing(rank: int) -> None:
    """From now on, the process dies when it has written a shard and is about to vote."""
    put = PosixStore.put_if_absent

    async def put_if_absent(store: PosixStore, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.endswith(f"/{vote_name(rank)}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return await put(store, key, *args, **kwargs)

    PosixStore.put_if_absent = put_if_absent  # type: ignore[method-assign]
