"""The writer's thread and its workers: when they end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from checkpointd.errors import ClosedError
from checkpointd_client.ranks.writer import WriterThread


def test_close_ends_the_thread_and_the_workers() -> None:
    before = set(threading.enumerate())
    writer = WriterThread(threads=4)

    async def work() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert writer.call(work(), 30) == 7
    assert {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before} == {
        "checkpointd-writer",
        "checkpointd-worker",
    }
    writer.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ClosedError):
        writer.submit(work())
