"""The job of the newest epoch, and whether its process still lives, as far as this machine can tell."""

from __future__ import annotations

import msgspec

from checkpointd.layout.keys import job_lease_key
from checkpointd.layout.manifest import Epoch
from checkpointd.pipeline.root import epochs
from checkpointd.store.base import Store
from checkpointd.store.writers import Life, life_of


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that took an epoch; `world_size` 0: a recovery by the command line, with no job behind it."""

    epoch: int
    world_size: int
    host: str
    pid: int
    since: str
    life: Life

    @property
    def is_job(self) -> bool:
        return self.world_size > 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


async def newest_holder(store: Store) -> Holder | None:
    """The newest epoch's holder; None where no job ever ran at the root. DamagedError where its record cannot be read."""
    number = await epochs.newest(store)
    return await holder_at(store, number) if number else None


async def holder_at(store: Store, number: int) -> Holder:
    """The holder of epoch `number`. NotFoundError where the store does not show it, DamagedError where it cannot be read."""
    holder = _holder_of(await epochs.read(store, number))
    if holder.life == "unknown" and await store.stat(job_lease_key(number)) is None:
        return msgspec.structs.replace(holder, life="ended")  # a job that was not closed has left its lease
    return holder


def _holder_of(epoch: Epoch) -> Holder:
    who = epoch.writer
    return Holder(
        epoch=epoch.epoch,
        world_size=epoch.world_size,
        host=who.host,
        pid=who.pid,
        since=who.time,
        life=life_of(epoch.process),
    )
