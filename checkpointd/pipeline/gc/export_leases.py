"""The leases of exports: they tell whoever removes checkpoints which ones an export still needs.

A process that exports a root by rule keeps a lease at the root while it runs: `.checkpointd/exports/<digest of the place>`.
It names the checkpoints that are being exported, and says which ones the rule wants. Retention leaves those (RETENTION-7).

Invariants
  EXPORTLEASE-1  A lease keeps at most two checkpoints: the one that is being exported, and one that waits. The one that waits
      is the newest that the rule wants and the exporter has not seen yet, or, if there is none, the next one to be exported.
  EXPORTLEASE-2  A lease keeps nothing once its holder is known to have ended, or once another process has seen the same bytes
      for the lease's length, on its own clock. So no checkpoint stays for long after its exporter was killed.
  EXPORTLEASE-3  A lease is never needed for a correct export, and never in the way of a save: on a full disk, retention does
      not heed it, and one that cannot be read keeps nothing. A deletion by name does not heed it either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from checkpointd.commit.facts import Order
from checkpointd.errors import FormatError, NotFoundError, StoreError
from checkpointd.layout.keys import SERVICE
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import LEASE_S_MAX, Lease, decode_sealed
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import LOOK_S_MAX, RUNNING_LENGTHS, Sight
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LEASES_OF_EXPORTS = f"{SERVICE}/exports"


class ExportLease(Lease, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.export-lease"):
    """The lease of a process that exports the root to the place `to`."""

    to: str
    keeps: tuple[str, ...] = ()
    """The attempts (`<tag>/<attempt>`) that are exported next, in that order."""
    every_steps: int | None = None
    """The rule wants checkpoints whose step is a multiple of this; None: all."""
    seen: Order = (0, 0)
    """The newest commit that the exporter has seen."""

    def kept_among(self, newest_first: Sequence[LoggedAttempt]) -> set[str]:
        """The checkpoints that stay for this export, by prefix."""
        unseen = (c for c in newest_first if c.commit.order > self.seen and is_wanted(c.commit.step, self.every_steps))
        waiting = next((c.prefix for c in unseen if c.read_back != "damaged"), None)
        return {*self.keeps[:1], *(self.keeps[1:2] if waiting is None else [waiting])}


def is_wanted(step: int, every_steps: int | None) -> bool:
    """Whether a rule with `every_steps` exports checkpoints of `step`."""
    return every_steps is None or step % every_steps == 0


class ExportLeases:
    """All leases of exports at `root`, as one process watches them that removes checkpoints there."""

    def __init__(self, root: Store, sight: Sight | None = None) -> None:
        self._root, self._life = root, (sight or Sight()).life
        self._since: dict[str, tuple[bytes, float]] = {}
        """The bytes of each lease, and since when they are the same (seconds of the loop's clock)."""
        self._said = set[str]()
        """What the look before could not read."""

    async def kept(self, attempts: Iterable[LoggedAttempt]) -> frozenset[str]:
        """The checkpoints among `attempts` that exports keep now, by prefix."""
        leases = await self._look()
        newest_first = root_view.checkpoints_of(attempts) if leases else []
        return frozenset(prefix for lease in leases for prefix in lease.kept_among(newest_first))

    async def settle(self) -> None:
        """Return once it is known of each lease whether its holder lives. Takes at most a lease's length (EXPORTLEASE-2)."""
        doubtful = {lease.to: lease for lease in await self._look() if self._life(lease.process) == "unknown"}
        for lease in doubtful.values():
            words = "process %d on %s may export %s to %s: watching its lease for up to %g s"
            log.warning(words, lease.writer.pid, lease.writer.host, self._root.url, lease.to, lease.length_s)
        while doubtful:
            await asyncio.sleep(LOOK_S_MAX)
            doubtful = {lease.to: lease for lease in await self._look() if lease == doubtful.get(lease.to)}

    async def _look(self) -> list[ExportLease]:
        """The leases that count."""
        loop, found = asyncio.get_running_loop(), dict[str, tuple[bytes, float]]()
        began = loop.time()
        read = await self._read()
        ended = loop.time()  # a read may be slow: the bytes were the same from the end of one read to the start of another
        for key, data in read.items():
            before = self._since.get(key)
            found[key] = before if before is not None and before[0] == data else (data, ended)
        self._since = found
        leases = ((_understood(data, key), since) for key, (data, since) in found.items())
        return [lease for lease, since in leases if lease is not None and not self._has_ended(lease, began - since)]

    async def _read(self) -> dict[str, bytes]:
        found, faults = dict[str, bytes](), set[str]()
        try:
            for entry in await self._root.list(LEASES_OF_EXPORTS):
                key = f"{LEASES_OF_EXPORTS}/{entry.name}"
                try:
                    found[key] = await self._root.get(key)
                except NotFoundError:
                    continue
                except StoreError as error:
                    faults.add(f"what an export of {self._root.url} still needs is not known, so nothing stays for it: {error}")
        except StoreError as error:
            faults.add(f"what exports of {self._root.url} still need is not known, so nothing stays for them: {error}")
        for fault in sorted(faults - self._said):
            log.warning("%s", fault)
        self._said = faults
        return found

    def _has_ended(self, lease: ExportLease, idle_s: float) -> bool:
        """Whether the holder of a lease that has not changed for `idle_s` has ended, as far as this process can tell."""
        life = self._life(lease.process)
        return life == "ended" or idle_s >= lease.length_s * (RUNNING_LENGTHS if life == "running" else 1)


def _understood(data: bytes, key: str) -> ExportLease | None:
    try:
        return decode_sealed(data, ExportLease, key, _fault)
    except FormatError as error:
        log.warning("%s; it keeps no checkpoint", error)
        return None


def _fault(lease: ExportLease) -> str | None:
    if not 0 < lease.length_s <= LEASE_S_MAX:
        return f"is a lease of {lease.length_s:g} seconds, which cannot be"
    if lease.every_steps is not None and lease.every_steps < 1:
        return f"is for an export every {lease.every_steps} steps, which cannot be"
    return None
