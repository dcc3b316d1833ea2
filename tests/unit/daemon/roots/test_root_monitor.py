"""What a look at a root shows, and MONITOR-1 and MONITOR-2: what a root that fails, hangs or is gone does to the others."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpointd.daemon import served_roots as roots_module
from checkpointd.daemon.hub import Hub, RootScan
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.process.logs import PERIOD_S, SAID_MAX, Rationed
from checkpointd.daemon.roots import root_monitor as monitor_module
from checkpointd.daemon.roots.root_monitor import MonitorPace, RootMonitor
from checkpointd.daemon.roots.root_scan import CHECKPOINTS_MAX, RootScanner
from checkpointd.errors import CheckpointdError, StoreError, UnreadableError
from checkpointd.layout.log_records import RemoveRecord
from checkpointd.pipeline.identity import seconds_of, writer
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from tests.builders import leave_in_doubt, save_checkpoint
from tests.unit.daemon.conftest import until
from tests.unit.daemon.roots.conftest import AT_ONCE, TAG, ended, look

# --- looks -------------------------------------------------------------------------------------------------------------


async def test_a_look_shows_the_checkpoints_newest_first_and_latest(hub: Hub, root: Path, store: Store) -> None:
    for step in (1, 2, 3):
        await save_checkpoint(store, tag=f"global_step{step}", save_latest=step != 3)
    await save_checkpoint(store, tag="global_step4", failing={1: RuntimeError("no")})
    await leave_in_doubt(store, tag="global_step5", voting=(0,))
    found = await look(hub, root)
    assert [(c.tag, c.step, c.attempt, c.order, c.is_latest) for c in found.checkpoints] == [
        ("global_step3", 3, "00000001-0", (1, 3), False),
        ("global_step2", 2, "00000001-0", (1, 2), True),
        ("global_step1", 1, "00000001-0", (1, 1), False),
    ]
    assert (found.latest, found.newest_step, found.problem) == ("global_step2", 3, None)
    assert {c.world_size for c in found.checkpoints} == {2}
    commit = (await root_view.find(store, "global_step3")).commit
    assert found.checkpoints[0].committed_at == seconds_of(commit.writer.time)
    assert found.newest_committed_at is not None


async def test_an_empty_root_shows_nothing(hub: Hub, root: Path) -> None:
    seen = await look(hub, root)
    assert seen.space is not None
    assert replace(seen, space=None) == RootScan()


async def test_a_look_shows_so_many_checkpoints_and_no_more(hub: Hub, root: Path, store: Store) -> None:
    for step in range(CHECKPOINTS_MAX + 2):
        await save_checkpoint(store, tag=f"global_step{step}", world_size=1)
    found = await look(hub, root)
    assert [c.step for c in found.checkpoints] == list(range(CHECKPOINTS_MAX + 1, 1, -1))


async def test_an_entry_is_read_once_and_a_removal_is_noticed(store: Store) -> None:
    class Counting(PassingStore):
        def __init__(self) -> None:
            super().__init__(store)
            self.read: list[str] = []

        async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
            self.read += keys
            return await super().get_each(keys, size_max=size_max)

    for step in range(CHECKPOINTS_MAX + 5):
        await save_checkpoint(store, tag=f"global_step{step}", world_size=1)
    counting, looker = Counting(), RootScanner()
    await looker.look(counting)
    assert len(counting.read) == len(set(counting.read))
    counting.read.clear()
    newest = (await looker.look(counting))[0].checkpoints[0]
    assert not counting.read
    remove = RemoveRecord(attempts=(f"{newest.tag}/{newest.attempt}",), reason="by hand", user="alice", writer=writer())
    assert not await RootLog.of(store).add(remove)
    found, _ = await looker.look(counting)
    assert len(counting.read) == 1
    assert newest.tag not in {c.tag for c in found.checkpoints}
    assert len(found.checkpoints) == CHECKPOINTS_MAX


@pytest.mark.parametrize(
    ("answer_s", "problem"),
    [
        (2.0, None),
        pytest.param(31.0, "has not answered for 30 s", marks=pytest.mark.nightly),
        pytest.param(29.0, "took longer than 600 s", marks=pytest.mark.nightly),
    ],
)
def test_monitor_2_a_look_goes_on_while_the_storage_answers(
    answer_s: float, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a long history, on a loop of virtual time: each answer takes `answer_s` seconds."""

    class Slow(MemoryStore):
        answer_s = 0.0

        async def list(self, prefix: str) -> list[Entry]:
            await asyncio.sleep(self.answer_s)
            return await super().list(prefix)

    async def main() -> None:
        store = Slow()
        saves = [await leave_in_doubt(store, tag=f"global_step{step}", world_size=1) for step in range(400)]
        jobs = [SimpleNamespace(info=save.info(0)) for save in saves]  # which decide their attempts themselves
        store.answer_s = answer_s

        async def given(*_: object) -> Store:
            return store

        async def none(*_: object) -> None:
            return None

        monkeypatch.setattr(monitor_module.inline_saves, "find", none)
        hub = SimpleNamespace(
            roots=SimpleNamespace(looked_after=given, room=none, check_answers=none),
            jobs=SimpleNamespace(at=lambda _: jobs),
            users_at=lambda _: [],
            root_scans={},
            looking_at=set(),
            leaving=False,
        )
        monitor = RootMonitor(hub)  # type: ignore[arg-type]  # all that a look needs of a hub
        began = asyncio.get_running_loop().time()
        await monitor.look("/root")
        found, took_s = hub.root_scans["/root"].problem, asyncio.get_running_loop().time() - began
        assert took_s > 31 or problem == "has not answered for 30 s"
        assert took_s <= 600.0
        assert (found is None) if problem is None else (found is not None and problem in found.message)

    simloop.run(0, main())


async def test_a_pointer_that_is_damaged_is_the_looks_problem(hub: Hub, root: Path, store: Store) -> None:
    await save_checkpoint(store)
    await store.put("latest", b"../../etc/passwd\n")
    found = await look(hub, root)
    assert found.problem is not None
    assert found.problem.code == "DamagedError"
    assert (found.latest, [c.tag for c in found.checkpoints]) == (None, [TAG])


async def test_what_was_last_seen_stays_beside_the_problem(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await save_checkpoint(store)
    monitor = RootMonitor(hub, AT_ONCE)
    await monitor.look(str(root))
    before = hub.root_scans[str(root)]

    async def fails(_: object, prefix: str) -> list[object]:
        raise StoreError(f"listing {prefix!r} failed: the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "list", fails)
        for _ in range(3):
            await monitor.look(str(root))
    found = hub.root_scans[str(root)]
    assert found.problem is not None
    assert (found.problem.code, "the disk is gone" in found.problem.message) == ("StoreError", True)
    assert (found.latest, found.checkpoints) == (before.latest, before.checkpoints)
    assert caplog.text.count("cannot be looked after") == 1
    caplog.set_level(logging.INFO)
    await monitor.look(str(root))
    assert replace(hub.root_scans[str(root)], space=before.space) == before
    assert "can be looked after again" in caplog.text


async def test_a_storage_that_does_not_answer_is_given_up_and_tried_again(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_checkpoint(store)
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "list", lambda *_: asyncio.Event().wait())
        found = await look(hub, root, MonitorPace(look_s=0.01))
    assert found.problem is not None
    assert "has not answered for 0.01 s" in found.problem.message
    assert (await look(hub, root)).problem is None


async def test_monitor_2_why_a_bucket_does_not_answer_is_known_long_before_its_store_gives_up(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = asyncio.Event()
    listing = PosixStore.list

    async def hang(self: PosixStore, prefix: str) -> object:
        await answers.wait()
        return await listing(self, prefix)

    async def refuse(_: str) -> None:
        raise UnreadableError("Connection refused")

    monkeypatch.setattr(PosixStore, "list", hang)
    monkeypatch.setattr(hub.roots, "check_answers", refuse)
    monitor = RootMonitor(hub, replace(AT_ONCE, ask_s=0.0))
    looking = asyncio.create_task(monitor.look(str(root)))
    await until(lambda: str(root) in hub.root_scans)
    problem = hub.root_scans[str(root)].problem
    assert problem is not None
    assert (problem.code, problem.message) == ("UnreadableError", "Connection refused")
    assert not looking.done()
    answers.set()
    await looking
    assert hub.root_scans[str(root)].problem is None
    answers.clear()
    await RootMonitor(hub, replace(AT_ONCE, ask_s=0.0, look_s=0.3)).look(str(root))
    problem = hub.root_scans[str(root)].problem
    assert problem is not None
    assert problem.message == "Connection refused", "and not only that it has not answered"
    assert caplog.text.count("cannot be looked after: Connection refused") == 2


async def test_a_bucket_that_stays_silent_is_named_by_one_reason_in_the_log(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a short `retry_s`, its store gives up within a look, and words the reason in another way than the question does."""
    asked = asyncio.Event()

    async def gives_up(*_: object) -> list[Entry]:
        await asked.wait()
        raise UnreadableError("listing 'log' failed: Connection refused")

    async def refuse(_: str) -> None:
        asked.set()
        raise UnreadableError("looking at 'log/root' failed: Connection refused")

    monkeypatch.setattr(PosixStore, "list", gives_up)
    monkeypatch.setattr(hub.roots, "check_answers", refuse)
    monitor = RootMonitor(hub, replace(AT_ONCE, ask_s=0.0))
    for _ in range(3):
        asked.clear()
        await monitor.look(str(root))
    assert caplog.text.count("cannot be looked after") == 1


async def test_monitor_2_a_bucket_that_answers_late_is_reached_although_the_look_goes_on(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await save_checkpoint(store)
    caplog.set_level(logging.INFO)
    answers, goes_on, listing = asyncio.Event(), asyncio.Event(), PosixStore.list
    listed = 0

    async def slow(self: PosixStore, prefix: str) -> list[Entry]:
        nonlocal listed
        listed += 1
        await (answers if listed == 1 else goes_on).wait()
        return await listing(self, prefix)

    async def refuse(_: str) -> None:
        raise UnreadableError("Connection refused")

    monkeypatch.setattr(PosixStore, "list", slow)
    monkeypatch.setattr(hub.roots, "check_answers", refuse)
    looking = asyncio.create_task(RootMonitor(hub, replace(AT_ONCE, ask_s=0.0)).look(str(root)))
    await until(lambda: str(root) in hub.root_scans and hub.root_scans[str(root)].problem is not None)
    answers.set()
    await until(lambda: listed > 1)
    assert (hub.root_scans[str(root)].problem, looking.done()) == (None, False)
    assert "can be looked after again" in caplog.text
    goes_on.set()
    await looking
    assert hub.root_scans[str(root)].latest == TAG


async def test_a_defect_is_a_problem_and_ends_nothing(hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("who would have thought")

    monkeypatch.setattr(RootScanner, "look", broken)
    found = await look(hub, root)
    assert found.problem is not None
    assert "who would have thought" in found.problem.message


# --- all roots -----------------------------------------------------------------------------------------------------------


async def test_it_looks_after_roots_on_disk_and_after_each_commit(hub: Hub, root: Path, store: Store, tmp_path: Path) -> None:
    await save_checkpoint(store)
    other = tmp_path / "other"
    async with PosixStore(other) as elsewhere:
        await save_checkpoint(elsewhere, tag="global_step9")
    monitor = RootMonitor(hub, AT_ONCE)
    running = asyncio.create_task(monitor.run())
    await until(lambda: hub.root_scans.keys() == {str(root), str(other)})
    assert (hub.root_scans[str(root)].latest, hub.root_scans[str(other)].latest) == (TAG, "global_step9")
    await save_checkpoint(store, tag="global_step2")
    monitor.look_soon(str(root))
    await until(lambda: hub.root_scans[str(root)].latest == "global_step2")
    new = hub.roots.store(str(tmp_path / "joined"))
    await save_checkpoint(new, tag="global_step3")
    hub.rank(str(tmp_path / "joined"), 0, world_size=1, pid=1)
    monitor.look_soon(str(tmp_path / "joined"))
    await until(lambda: str(tmp_path / "joined") in hub.root_scans)
    await ended(running)


async def test_a_root_that_is_gone_is_looked_after_no_longer(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_checkpoint(store)
    monitor = RootMonitor(hub, AT_ONCE)
    running = asyncio.create_task(monitor.run())
    await until(lambda: str(root) in hub.root_scans)
    monkeypatch.setattr(hub.roots, "found", list)
    monitor.look_soon("/a/root/that/nobody/knows")
    await until(lambda: not hub.root_scans)
    await ended(running)


async def test_a_root_that_hangs_keeps_no_other_one_waiting(
    hub: Hub, root: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_checkpoint(store)
    hanging = hub.roots.store(str(tmp_path / "hanging"))
    hub.rank(str(tmp_path / "hanging"), 0, world_size=1, pid=1)
    listing = PosixStore.list

    async def hang(self: PosixStore, prefix: str) -> object:
        return await asyncio.Event().wait() if self is hanging else await listing(self, prefix)

    monkeypatch.setattr(PosixStore, "list", hang)
    running = asyncio.create_task(RootMonitor(hub, AT_ONCE).run())
    await until(lambda: str(root) in hub.root_scans)
    assert hub.root_scans[str(root)].latest == TAG
    await ended(running)
    assert str(tmp_path / "hanging") not in hub.root_scans


@pytest.mark.parametrize("is_joined", [True, False])
async def test_a_bucket_that_hangs_keeps_no_joined_root_and_none_on_disk_waiting(
    hub: Hub, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, *, is_joined: bool
) -> None:
    """MONITOR-1: a bucket in which roots are looked for may be silent for minutes."""

    async def hang() -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(hub.roots, "seen_in_buckets", hang)
    await save_checkpoint(store)
    if is_joined:
        hub.rank(str(root), 0, world_size=1, pid=1)
    running = asyncio.create_task(RootMonitor(hub, AT_ONCE).run())
    await until(lambda: str(root) in hub.root_scans)
    assert hub.root_scans[str(root)].latest == TAG
    await ended(running)


async def test_a_file_system_that_hangs_keeps_no_other_root_waiting(
    hub: Hub, root: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MONITOR-1: not even a look at the path answers; one thread waits for it, however often it is asked."""
    await save_checkpoint(store)
    hanging, never, asked = str(tmp_path / "hanging"), threading.Event(), []
    check = hub.roots.check

    def hang(path: str) -> str:
        if path == hanging:
            asked.append(path)
            never.wait()
        return check(path)

    monkeypatch.setattr(hub.roots, "check", hang)
    monkeypatch.setattr(roots_module, "ANSWER_S", 0.5)
    hub.rank(str(root), 0, world_size=1, pid=1)
    hub.rank(hanging, 0, world_size=1, pid=1)
    running = asyncio.create_task(RootMonitor(hub, replace(AT_ONCE, idle_s=0.01)).run())
    await until(lambda: hub.root_scans.keys() >= {str(root), hanging})
    await until(lambda: hub.root_scans[str(root)].latest == TAG)  # on a busy machine, a later look is the first in time
    problem = hub.root_scans[hanging].problem
    assert problem is not None
    assert "has not answered for" in problem.message
    with pytest.raises(StoreError, match="has not answered"):
        await hub.roots.opened(hanging)
    assert len(asked) == 1
    await ended(running)
    never.set()


async def test_roots_in_use_are_looked_after_however_many_lie_on_disk(
    hub: Hub, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "ROOTS_MAX", 2)
    for name in ("a", "b", "c"):
        async with PosixStore(tmp_path / name) as old:
            await save_checkpoint(old)
    monitor = RootMonitor(hub, AT_ONCE)
    hub.on_news = monitor.look_soon
    running = asyncio.create_task(monitor.run())
    await until(lambda: len(hub.root_scans) == 2)
    used = str(tmp_path / "zz")
    async with PosixStore(used) as store:
        await save_checkpoint(store)
    hub.rank(used, 0, world_size=1, pid=1).connected(os.getuid())
    await until(lambda: used in hub.root_scans)
    assert len(hub.root_scans) == 2
    [words] = standing(hub).left_out
    assert words.endswith(f"Not looked after: {tmp_path}/b, {tmp_path}/c.")
    assert "`checkpointd status ROOT` looks at one by itself" in words
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "c")
    monitor.look_soon("somewhere new")
    await until(lambda: standing(hub).left_out == ())
    await ended(running)


async def test_many_roots_that_are_not_looked_after_are_counted(hub: Hub) -> None:
    hub.not_looked_after = [f"/runs/{number}" for number in range(9)]
    [words] = standing(hub).left_out
    assert "and not after 9 others. " in words
    assert "Not looked after: /runs/0, /runs/1, " in words
    assert words.endswith("/runs/7 and 1 more.")
    hub.not_looked_after = ["/runs/\x1b[2J" + "x" * 4096]
    [words] = standing(hub).left_out
    assert words.isprintable()
    assert len(words) < 700


async def test_log_3_left_out_messages_are_counted_although_nothing_else_is_logged(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    hub.said = Rationed(logging.getLogger("checkpointd"), lambda: now[0])
    for _ in range(SAID_MAX + 3):
        hub.said.warning("refused", 1, "refused")
    now[0] = PERIOD_S
    watching = asyncio.create_task(RootMonitor(hub, AT_ONCE).run())
    await until(lambda: "3 more" in caplog.text)
    await ended(watching)


async def test_what_was_seen_of_a_root_that_was_removed_is_forgotten(hub: Hub, root: Path, store: Store) -> None:
    await save_checkpoint(store)
    monitor = RootMonitor(hub, AT_ONCE)
    await monitor.look(str(root))
    assert monitor._roots[str(root)].scanner._decided
    monitor.remade(str(root))
    assert not monitor._roots[str(root)].scanner._decided
