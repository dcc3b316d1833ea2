"""A job that saves all the time and is killed now and then: beside the kept checkpoints, it leaves what TIDY-2 allows. However
long its history is, no kind of object grows with it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter as Counts
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpointd.commit import log as table
from checkpointd.commit import log_access
from checkpointd.commit.retention import Retention
from checkpointd.errors import StagingError
from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import leases, root_view
from checkpointd.store import open_store
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, plan_save, save_checkpoint
from tests.faults.daemons import Daemon
from tests.faults.jobs import Job, wait_until
from tests.logged_roots import log_state

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(400)]

SPARE, LIVES, SAVES = 3, 3, 10
SERVING = """
import runpy, sys
from checkpointd.pipeline.gc import room
room.SMALL_MAX, sys.argv = int(sys.argv[1]), sys.argv[4:]
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
    """What is in a directory that may go at any moment; nothing if it is a file."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@pytest.mark.parametrize(
    ("small_max", "has_sidecar", "tag"), [(0, True, "best"), (0, False, None), (8, True, None), (8, False, "best")]
)
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
        assert await root_view.checkpoints(store)


# --- a long history -------------------------------------------------------------------------------------------------------

ROUNDS = 8
LITTLE_STAYS = [
    (log_access, "STATE_EVERY", 8),
    (table, "FORGET_EVERY", 8),
    (table, "FORGET_AFTER", 16),
    (table, "BEGINS_MAX", 4),
]
"""The numbers of what stays, made small, so that a short history shows whether they bound a long one."""
NUMBERS = ((r"global_step\d+", "<tag>"), (r"\d{12}", "<number>"), (r"\d{8}-\d+", "<attempt>"), (r"\d{8}", "<start>"))
DIGEST = re.compile(r"[0-9a-f]{32}|\.gone\S*")


def kinds_of(root: Path) -> Counts[str]:
    """How many files and directories of each kind are at `root`."""
    found = Counts[str]()
    for path in root.rglob("*"):
        kind = DIGEST.sub("<digest>", str(path.relative_to(root)))
        for pattern, name in NUMBERS:
            kind = re.sub(pattern, name, kind)
        found[kind + "/" * path.is_dir()] += 1
    return found


async def begin_job(store: PosixStore) -> int:
    taken = await starting.begin(store, leases.Beginner(world_size=1, job="job"))
    await recover(store, taken.before)
    taken.lease._over.set()  # it is killed, so its lease stays
    return taken.start.start


async def one_round(root: Path, number: int) -> None:
    """A start, a commit after which retention removes, an aborted save, a save that is killed after its vote, and one that is
    killed while it writes.
    """
    async with PosixStore(root, writer=f"gone{number}", is_alive=lambda _: False) as store:
        start = await begin_job(store)
        rules = Retention(keep_last=2)
        for n, failing in enumerate(({}, {0: StagingError("torn")})):
            step = 10 * number + n
            await save_checkpoint(
                store,
                tag=f"global_step{step}",
                n=n,
                step=step,
                world_size=1,
                start=start,
                failing=failing,
                retention=rules,
            )
        await leave_in_doubt(store, tag=f"global_step{10 * number + 2}", voting=(0,), world_size=2, start=start)
        cut_short = await plan_save(store, tag=f"global_step{10 * number + 3}", world_size=1, start=start)
        await cut_short.announce()
        await store.open_writer(cut_short.info(0).key("00000-0.chunks"))


async def test_no_kind_of_object_grows_with_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, number in LITTLE_STAYS:
        monkeypatch.setattr(module, name, number)
    root = tmp_path / "root"
    root.mkdir()
    seen: list[Counts[str]] = []
    for number in range(1, 4 * ROUNDS + 1):
        await one_round(root, number)
        if number in (ROUNDS, 4 * ROUNDS):
            seen.append(kinds_of(root))
    early, late = seen
    logs = {kind for kind in late if kind.startswith("log/")}
    assert all(late[kind] <= 2 * log_access.STATES_KEPT * log_access.STATE_EVERY for kind in logs)
    assert {kind: count for kind, count in late.items() if kind not in logs} == {
        kind: count for kind, count in early.items() if kind not in logs
    }
    state = log_state(root)
    assert len(state.begins) <= table.BEGINS_MAX
    assert len(state.attempts) <= 24
