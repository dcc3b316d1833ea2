"""Who runs the newest epoch, and whether that process still lives, as far as it can be told from here."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from checkpointd.layout.manifest import Epoch
from checkpointd.pipeline import epochs
from checkpointd.store import writers
from checkpointd.store.base import Store

Life: TypeAlias = Literal["running", "ended", "unknown"]
"""`unknown`: the process was started on another machine, before this one's last boot, or in another container."""


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
    return holder_of(await epochs.read(store, number)) if number else None


def holder_of(epoch: Epoch) -> Holder:
    who = epoch.writer
    return Holder(
        epoch=epoch.epoch,
        world_size=epoch.world_size,
        host=who.host,
        pid=who.pid,
        since=who.time,
        life=life_of(epoch.process),
    )


def life_of(process: str) -> Life:
    if not writers.is_within_sight(process):
        return "unknown"
    return "running" if writers.is_alive(process) else "ended"
