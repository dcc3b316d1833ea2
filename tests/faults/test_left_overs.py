"""A job that saves all the time and is killed now and then: beside the kept checkpoints, it leaves what TIDY-2 allows."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpointd.pipeline.root import catalog
from checkpointd.store import open_store
from tests.faults.daemons import Daemon
from tests.faults.jobs import Job, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SPARE, LIVES, SAVES = 3, 3, 10
SERVING = """
import runpy, sys
from checkpointd.pipeline.gc import tidying
tidying.SMALL_MAX, sys.argv = int(sys.argv[1]), sys.argv[4:]
runpy.run_module("checkpointd", run_name="__main__", alter_sys=True)
"""
"""A sidecar with another SMALL_MAX. Its arguments: the number, and the command line of a sidecar."""


class Counter:
    """Counts the attempts that have bytes at a root, over and over: those that two looks in a row see were there at once."""

    def __init__(self, root: Path) -> None:
        self.root, self.most, self.ever = root, 0, set[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def _seen(self) -> set[str]:
        tags = [entry for entry in self.root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        attempts = [attempt for tag in tags for attempt in listed(tag)]
        return {str(attempt) for attempt in attempts if any(path.suffix == ".chunks" for path in listed(attempt))}

    def _count(self) -> None:
        before = self._seen()
        while not self._stop.is_set():
            now = self._seen()
            self.most = max(self.most, len(before & now))
            self.ever |= now
            before = now

    def wait_for(self, more: int) -> None:
        """Until so many more attempts were seen."""
        until = len(self.ever) + more
        wait_until(lambda: len(self.ever) >= until, f"{more} more saves", limit_s=100)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def listed(folder: Path) -> list[Path]:
    """What is in a directory that may go at any moment."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("tag", [None, "best"])
@pytest.mark.parametrize("has_sidecar", [False, True])
@pytest.mark.parametrize("small_max", [0, 8])
async def test_tidy_2_a_job_that_is_killed_now_and_then(
    tmp_path: Path, tag: str | None, has_sidecar: bool, small_max: int
) -> None:
    """Its saves are small, so the bound is `small_max` where that is more than SPARE."""
    root = tmp_path / "root"
    root.mkdir()
    with ExitStack() as stack:
        serving = [sys.executable, "-c", SERVING, str(small_max)]
        socket = str(stack.enter_context(Daemon(tmp_path, within=serving)).socket) if has_sidecar else None
        counter = Counter(root)
        stack.callback(counter.stop)
        for _ in range(LIVES):
            with Job(folder=tmp_path, world_size=1) as job:
                job.tell("save_over_and_over", root=str(root), tag=tag, sidecar=socket, small_max=small_max)
                counter.wait_for(SAVES)
    assert counter.most <= (1 if tag else 3) + max(SPARE, small_max)
    async with open_store(root) as store:
        assert await catalog.checkpoints(store)
