"""The job of a start, and whether its process is still alive, as far as this machine can tell."""

from __future__ import annotations

import msgspec

from checkpointd.layout.keys import MIRRORS, job_lease_key
from checkpointd.layout.log_records import BeginRecord, LogState
from checkpointd.store.base import Store
from checkpointd.store.writers import Life, life_of


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that took a start. If `world_size` is 0, it was no job: a recovery from the command line, or a process that
    mirrors another root to this one.
    """

    start: int
    world_size: int
    host: str
    pid: int
    since: str
    life: Life
    job: str = ""
    """The job's name, if it has one."""

    @property
    def is_job(self) -> bool:
        return self.world_size > 0

    @property
    def mirrors(self) -> str:
        """The root that it mirrors to this one; empty if it does not."""
        return self.job.removeprefix(MIRRORS) if not self.is_job and self.job.startswith(MIRRORS) else ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


async def newest_holder(store: Store, state: LogState) -> Holder | None:
    """The newest start's holder; None if no job ever ran at the root."""
    return None if state.begin is None else await _holder(store, state.begin)


async def holder_at(store: Store, state: LogState, number: int) -> Holder | None:
    """The holder of start `number`; None if the log does not tell of it any more."""
    begin = next((one for one in state.begins if one.start == number), None)
    return None if begin is None else await _holder(store, begin)


async def _holder(store: Store, begin: BeginRecord) -> Holder:
    who, life = begin.writer, life_of(begin.process)
    if life == "unknown" and await store.stat(job_lease_key(begin.start)) is None:
        life = "ended"  # a job that was not closed leaves its lease behind
    return Holder(
        start=begin.start, world_size=begin.world_size, host=who.host, pid=who.pid, since=who.time, life=life, job=begin.job
    )
