"""However long the history of a root is, no kind of object grows with it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from checkpointd.commit import log as table
from checkpointd.commit import log_access
from checkpointd.commit.retention import Retention
from checkpointd.errors import StagingError
from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import leases
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, plan_save, save_checkpoint
from tests.logged_roots import log_state

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

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


def kinds_of(root: Path) -> Counter[str]:
    """How many files and directories of each kind are at `root`."""
    found = Counter[str]()
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
    seen: list[Counter[str]] = []
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
