"""The lease of a process that exports a root by rule. What it means for others: `pipeline/gc/export_leases.py`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from checkpointd.commit.facts import Order
from checkpointd.errors import StoreError
from checkpointd.layout.manifest import digest
from checkpointd.pipeline.gc.export_leases import LEASES_OF_EXPORTS, ExportLease
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.leases import HeldLease, Sight
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


class OwnExportLease:
    """The lease of this process, which exports `root` to the place `to`. `check` raises StoreError if another process may do
    so by now: its lease has the same key.
    """

    def __init__(
        self,
        root: Store,
        to: str,
        every_steps: int | None,
        sight: Sight,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        async def counts() -> bool:
            return await starts.newest(root) > 0  # else the root is gone, and nothing is put where it was

        lease = ExportLease(
            process=sight.process, count=0, length_s=sight.length_s, writer=writer(), to=to, every_steps=every_steps
        )
        self._root, self._content = root, lease
        self._held = HeldLease(root, f"{LEASES_OF_EXPORTS}/{digest(to.encode())}", lease, counts, check)
        self._said = ""

    async def keep(self, keeps: Iterable[str], seen: Order) -> None:
        """Keep these attempts, the one that is exported next first, and what the rule wants after `seen`. If the lease cannot
        be put, the log says so.
        """
        content = msgspec.structs.replace(self._content, keeps=tuple(keeps), seen=seen)
        if content == self._content and self._held.is_kept:
            return
        self._content = content
        try:
            await self._held.change(content)
            self._said = ""
        except StoreError as error:
            if str(error) != self._said:
                words = "retention at %s may remove checkpoints before they are exported, because no lease can be put there: %s"
                log.warning(words, self._root.url, error)
            self._said = str(error)

    async def release(self) -> None:
        """Keep nothing any more. Raises nothing."""
        await self._held.release()

    def lapse(self) -> None:
        """Renew the lease no more, and leave it there."""
        self._held.lapse()
