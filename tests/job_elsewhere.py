"""A job that is alive on another machine, for tests that must not disturb it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.root import leases
from checkpointd.pipeline.root.leases import Beginner, Sight
from checkpointd.store.posix.store import PosixStore

ELSEWHERE = "node7.0123456789ab.4026531836.17.99.cafecafe"
RENEWALS = 300
"""Within a lease's length: who looks sees one soon, and takes no pause of this thread for the end of the job."""


@contextmanager
def live_job(root: Path, job: str = "") -> Iterator[None]:
    """It has begun the next start at `root` and renews its lease until the end."""
    over, begun = threading.Event(), threading.Event()

    async def live() -> None:
        async with PosixStore(root) as store:
            sight = Sight(process=ELSEWHERE, life=lambda _: "unknown", length_s=leases.LENGTH_S)
            taken = await starting.begin(store, Beginner(world_size=1, job=job, sight=sight))
            begun.set()
            while not over.is_set():
                await asyncio.sleep(0.01)
            await taken.lease.release()

    with mock.patch.object(leases, "RENEWALS", RENEWALS):
        thread = threading.Thread(target=lambda: asyncio.run(live()))
        thread.start()
        try:
            assert begun.wait(60)
            yield
        finally:
            over.set()
            thread.join()
