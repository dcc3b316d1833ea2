"""The writer's thread and its workers: when they end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from checkpointd.errors import ClosedError
from checkpointd_client.ranks import writer as writing
from checkpointd_client.ranks.writer import WriterThread


def test_close_ends_the_thread_and_the_workers() -> None:
    before = set(threading.enumerate())
    writer = WriterThread(threads=4)

    async def work() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert writer.call(work(), 60) == 7
    assert {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before} == {
        "checkpointd-writer",
        "checkpointd-worker",
    }
    writer.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ClosedError):
        writer.submit(work())


def test_close_leaves_a_worker_behind_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(writing, "ABANDON_S", 0.1)
    begun, end = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        end.wait()

    async def work() -> None:
        running = asyncio.get_running_loop().run_in_executor(None, hang)
        try:
            await asyncio.shield(running)
        finally:
            await running  # as the pipeline does, since the worker still uses its memory

    writer = WriterThread(threads=1)
    writer.submit(work())
    try:
        assert begun.wait(60)
        writer.close()
        writer._thread.join(60)
        assert not writer._thread.is_alive()
        assert "without waiting for a call" in caplog.text
    finally:
        end.set()
