"""A mirror as this process holds it: with a start and a lease of its own, so that others notice it.

A job that begins at the mirror, or another process that mirrors, is refused while this one lives. If it begins all the same, it
takes the next start, and this fences the one before it, as it fences a job.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from checkpointd.commands import command
from checkpointd.commit.facts import Order
from checkpointd.config import JOB_CHARACTERS_MAX
from checkpointd.errors import DamagedError, FencedError, NotFoundError
from checkpointd.layout.keys import MIRROR, MIRRORS
from checkpointd.layout.manifest import Mirrored, Start, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import leases, starts
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.leases import Beginner, HeldLease
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.store.base import Store
from checkpointd.store.conditions import check_conditions_of

log = logging.getLogger("checkpointd")

NO_RANKS = 0
"""The world size of a start in which no job runs."""


@dataclass(slots=True)
class Hold:
    """A start of this process at the mirror."""

    store: Store
    start: Start
    lease: HeldLease
    root: OwnRoot
    record: Mirrored

    async def check(self) -> None:
        """Raise FencedError if there is a newer start, and RootGoneError if the path leads to another directory."""
        await self.root.check(self.start.start)
        newest = await starts.newest(self.store)
        if newest > self.start.start:
            raise FencedError(
                f"{self.store.url} has another holder: start {newest}, of {await self._who(newest)}. "
                "This process copies nothing more there"
            )

    async def _who(self, number: int) -> str:
        try:
            found = (await starts.read(self.store, number)).writer
        except (NotFoundError, DamagedError) as error:
            return f"a process whose record cannot be read ({error})"
        return f"process {found.pid} on {found.host} at {found.time}"

    async def follow(self, record: Mirrored) -> None:
        """Record durably which root the mirror follows."""
        self.record = msgspec.structs.replace(record, writer=writer())
        await self.store.put(MIRROR, encode(self.record))

    async def reach(self, order: Order) -> None:
        """Record durably that a commit of `order` is about to be mirrored."""
        if order > self.record.reached:
            await self.follow(msgspec.structs.replace(self.record, reached=order))

    async def release(self) -> None:
        """Let others begin there without a wait. Raises nothing."""
        await self.lease.release()


async def hold(store: Store, record: Mirrored, known: CatalogLog | None = None) -> Hold:
    """Start at the mirror `store`. `known`: its catalog's log as this process has read it already.

    Raises RootInUseError if a job, or another process that mirrors, is alive there, and ConditionsIgnoredError.
    """
    beginner = Beginner(
        world_size=NO_RANKS,
        job=f"{MIRRORS}{record.origin}"[:JOB_CHARACTERS_MAX],
        alone=True,
        instead=(
            "If it mirrors, too, let one of the two go on. If it is a job, mirror to another root; "
            f"{command('status', store.url)} shows what runs there"
        ),
    )
    await check_conditions_of(store, new=False)
    start, lease = await leases.begin(store, beginner, known)
    root = OwnRoot(store)
    await root.begun(start.start, start.nonce)
    return Hold(store, start, lease, root, record)
