"""Shown files at every crash point: what a directory shows is whole, and the next start finishes the work.

`plain.py` (PLAINDIR-1 to PLAINDIR-3) and `tag_directories.py` (TAGDIR-1 to TAGDIR-8), which docs/ORDERING.md has in words.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from checkpointd.layout.ballot import encode_ballot
from checkpointd.layout.files import WHOLE
from checkpointd.layout.keys import AttemptId, attempt_prefix, ballot_name, file_name, index_name, vote_name
from checkpointd.layout.log_records import AnnounceRecord, CommitRecord, RemoveRecord
from checkpointd.layout.manifest import IndexRef, PlanRef, Vote, digest, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome.after_commit import Turns
from checkpointd.pipeline.root import starts, tag_directories
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.unfinished import UnfinishedDirectories
from checkpointd.testing.crashpoints import Crash, every_crash_point
from checkpointd.testing.simdisk import ProcessDisk, SimDisk
from checkpointd.testing.simfs import SimDirectory

BESIDE = "/root/run"
OLD = {
    "mp_rank_00_model_states.pt": b"old model",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt": b"of two",
    "recipe": b"old",
    "part/0": b"old part",
}
NEW = {"mp_rank_00_model_states.pt": b"new model", "recipe": b"new"}
MINE = {"notes.txt": b"mine", "figures/loss.png": b"mine", "part/mine": b"mine"}
"""The user's own, in a directory that is shown."""
Files = dict[str, bytes]


class World:
    """A disk with one store that can show, and processes at it."""

    def __init__(self, *, clones: bool = False, exchanges: bool = True) -> None:
        self.disk = SimDisk(clones=clones, exchanges=exchanges)
        self.names = (f"process{number}" for number in itertools.count())

    def store(self, name: str) -> tuple[PosixStore, ProcessDisk]:
        disk = self.disk.process(name)
        alive = self.disk.alive
        return PosixStore(f"{BESIDE}/.checkpointd", disk, writer=name, is_alive=lambda one: one in alive()), disk

    async def did(self, work: Callable[[PosixStore], Coroutine[Any, Any, Any]]) -> Any:
        """What `work` returns in a process of its own."""
        store, disk = self.store(name := next(self.names))
        try:
            return await disk.process.spawn(work(store))
        finally:
            self.disk.kill(name)

    async def struck(self, crash: Crash, work: Callable[[PosixStore], Coroutine[Any, Any, Any]]) -> bool:
        """Whether the crash came before the end of `work`; without it the power is cut then."""
        self.disk.fs.make_all_durable()
        store, disk = self.store("worker")
        struck = await crash.strikes(self.disk, [disk.process.spawn(work(store))])
        self.disk.after = lambda *_: None
        if not struck:
            self.disk.power_cut()
        return struck

    async def committed(self, tag: str, start: int, files: Files, **more: Any) -> CommitRecord:
        """The attempt of a save of `files`, committed and not shown."""
        commit: CommitRecord = await self.did(lambda store: _commit(store, tag, start, files, **more))
        return commit

    async def shown(self, commit: CommitRecord) -> None:
        await self.did(lambda store: tag_directories.show(store, commit))

    async def started(self, start: int = 0) -> None:
        await self.did(lambda store: tag_directories.settle(store, start))

    async def written(self, files: Files, path: str) -> None:
        """Some other program has written `files` in the directory `path`."""
        disk = self.disk.process("user")

        async def write() -> None:
            for name, data in files.items():
                parts = f"{path}/{name}".split("/")
                for number in range(2, len(parts)):
                    with suppress(FileExistsError):
                        await disk.make_directory("/".join(parts[:number]))
                file = await disk.create("/".join(parts))
                await file.write_at(0, data)
                await file.close()

        await disk.process.spawn(write())
        self.disk.kill("user")

    async def filled(self, name: str, files: Files) -> None:
        """What some other program has written beside a save, durable as before the vote."""
        store, _ = self.store("path")
        self.disk.kill("path")
        await self.written(files, store.plain_files.unfinished.path(name, "checkpoint-8"))
        await self.did(lambda store: store.plain_files.unfinished.settle(name))

    def contents(self, at: str = "") -> Files | None:
        """What stands in a directory and below, but for the root; None where there is none."""
        try:
            return dict(_files(self.disk.fs.directory(f"{BESIDE}/{at}".rstrip("/")), ""))
        except FileNotFoundError:
            return None

    def latest(self) -> str:
        return (self.contents() or {}).get("latest", b"").decode()

    def hidden(self) -> list[str]:
        return [line for line in self.disk.fs.dump() if "/unfinished/" in line and not line.endswith("/unfinished/")]


def _files(directory: SimDirectory, below: str) -> Files:
    found: Files = {}
    for name, node in directory.live.items():
        if isinstance(node, SimDirectory) and name != ".checkpointd":
            found |= _files(node, f"{below}{name}/")
        elif not isinstance(node, SimDirectory):
            found[f"{below}{name}"] = bytes(node.data)
    return found


async def _commit(store: PosixStore, tag: str, start: int, files: Files, at: str = "", unfinished: str = "") -> CommitRecord:
    attempt, log = AttemptId(start, 0), RootLog.of(store)
    prefix, place = attempt_prefix(tag, attempt), {"shown_at": at or tag, "unfinished": unfinished}
    while await starts.newest(store) < start:
        await starts.take(store, 1)
    await log.add(AnnounceRecord(attempt=prefix, n=0, step=1))
    for number, data in enumerate(files.values()):
        await store.put_if_absent(f"{prefix}/{file_name(0, number)}", data)
    plan = PlanRef(size=0, digest=digest(b""))
    index = IndexRef(name=index_name(0), size=1, digest=digest(b""), plan=plan)
    said: dict[str, Any] = {"tag": tag, "attempt": str(attempt), "step": 1, "world_size": 1, "rank": 0, "n": 0}
    vote = encode(Vote(**said, save_latest=True, vote="yes", index=index, files=tuple(files), writer=writer(), **place))
    await store.put_if_absent(f"{prefix}/{vote_name(0)}", vote)
    ref, ballot = encode_ballot([vote])
    await store.put_if_absent(f"{prefix}/{ballot_name(ref.digest)}", ballot)
    commit = CommitRecord(
        attempt=prefix, n=0, step=1, world_size=1, ballot=ref, files=len(files), decided_by=0, writer=writer(), **place
    )
    refused = await log.add(commit)
    assert not refused, refused
    return commit


async def _remove(store: PosixStore, commit: CommitRecord) -> None:
    refused = await RootLog.of(store).add(RemoveRecord(attempts=(commit.attempt,), reason="a test", writer=writer()))
    assert not refused, refused
    await tag_directories.hide(store, {commit.attempt})


async def _is_removed(store: PosixStore, commit: CommitRecord) -> bool:
    return (await RootLog.of(store).look()).attempts[commit.attempt].status == "removed"


HOW = {"power cut": None, "killed": lambda disk, _: disk.kill("worker")}
how = pytest.mark.parametrize("how", HOW)
DISKS = {"links": {}, "clones": {"clones": True}, "without exchange": {"exchanges": False}}
disks = pytest.mark.parametrize("kind", DISKS)


# --- one directory --------------------------------------------------------------------------------------------------


def replacing(what: str, kind: str) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """A directory that holds things of the user's is shown again, or hidden, by a job or by a start."""

    async def scenario(crash: Crash) -> bool:
        world = World(**DISKS[kind])
        first = await world.committed("best", 1, OLD)
        await world.shown(first)
        await world.written(MINE, f"{BESIDE}/best")
        if what == "hidden":
            struck = await world.struck(crash, lambda store: _remove(store, first))
            after = MINE if await world.did(lambda store: _is_removed(store, first)) else OLD | MINE
        else:
            commit = await world.committed("best", 2, NEW)
            by_a_start = what == "shown by a start"
            struck = await world.struck(
                crash, lambda store: tag_directories.settle(store) if by_a_start else tag_directories.show(store, commit)
            )
            after = NEW | MINE
        found = world.contents("best")
        if struck and what != "hidden" and kind != "without exchange":
            assert found is not None, "the directory is missing"
        theirs = {name: data for name, data in (found or {}).items() if name not in MINE}
        assert theirs in ([OLD, NEW, {}] if struck else [{}, NEW]), f"half of each: {found}"
        if not struck:
            assert found == after
        assert not struck or world.latest() in {"", "best"}
        await world.started()
        assert world.contents("best") == after
        assert world.latest() == ("best" if after != MINE else "")
        assert not world.hidden(), "something is left under a hidden name"
        return struck

    return scenario


@how
@disks
@pytest.mark.parametrize("what", ["shown", "shown by a start", "hidden"])
def test_a_directory_has_the_old_files_or_the_new_ones_and_what_is_the_users_own_comes_back(
    what: str, kind: str, how: str, pytestconfig: pytest.Config
) -> None:
    """TAGDIR-1, PLAINDIR-1 to PLAINDIR-3. The night strikes at every second effect."""
    stride, seeds = (2, 2) if pytestconfig.getoption("nightly") else (3, 1)
    assert every_crash_point(replacing(what, kind), range(seeds), HOW[how], stride=stride) > 20 * seeds // stride


@pytest.mark.parametrize("what", ["shown", "hidden"])
def test_without_the_emptying_something_of_the_users_is_lost(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(PlainFiles, "_move_out", nothing)
    with pytest.raises(AssertionError):
        every_crash_point(replacing(what, "links"), range(1), stride=5)


def test_a_new_directory_is_not_there_or_whole_and_latest_names_one_that_is() -> None:
    async def scenario(crash: Crash) -> bool:
        world = World()
        await world.shown(await world.committed("first", 1, OLD))
        commit = await world.committed("second", 2, NEW)
        struck = await world.struck(crash, lambda store: tag_directories.show(store, commit))
        found, latest = world.contents("second"), world.latest()
        assert found in ([NEW] if not struck else [None, NEW])
        assert world.contents("first") == OLD
        assert latest == "second" if not struck else latest in ({"first"} if found is None else {"first", "second"})
        await world.started()
        assert (world.contents("second"), world.latest()) == (NEW, "second")
        return struck

    assert every_crash_point(scenario, range(3)) > 30


@pytest.mark.nightly
@how
def test_a_start_that_is_cut_off_is_finished_by_the_next(how: str) -> None:
    """However often: the second crash comes in the middle of the start that finishes the first."""

    async def scenario(crash: Crash) -> bool:
        world = World(exchanges=False)
        await world.shown(await world.committed("best", 1, OLD))
        await world.written(MINE, f"{BESIDE}/best")
        await world.committed("best", 2, NEW)
        await world.struck(Crash(40), tag_directories.settle)
        struck = await world.struck(crash, tag_directories.settle)
        await world.started()
        assert (world.contents("best"), world.latest(), world.hidden()) == (NEW | MINE, "best", [])
        return struck

    assert every_crash_point(scenario, range(3), HOW[how]) > 20


@how
@pytest.mark.parametrize("clones", [False, True])
def test_a_lone_file_is_the_old_or_the_new_one_and_the_next_start_shows_the_new(how: str, clones: bool) -> None:
    async def scenario(crash: Crash) -> bool:
        world = World(clones=clones)
        await world.shown(await world.committed("last.ckpt", 1, {"last.ckpt": b"old"}))
        commit = await world.committed("last.ckpt", 2, {"last.ckpt": b"new"})
        struck = await world.struck(crash, lambda store: tag_directories.show(store, commit))
        assert world.contents() in ([{"last.ckpt": b"new"}, *([{"last.ckpt": b"old"}] if struck else [])])
        await world.started()
        assert world.contents() == {"last.ckpt": b"new"}
        await world.did(lambda store: _remove(store, commit))
        assert world.contents() == {}
        return struck

    assert every_crash_point(scenario, range(3), HOW[how]) > 15


# --- what others fill -----------------------------------------------------------------------------------------------

BESIDE_IT = {"model.safetensors": b"weights" * 400, "deep/config.json": b"{}"}
PLACES = {"checkpoint-8/step8": "", "checkpoint-8": WHOLE}
"""Where the save's own files are shown: in a directory of their own, as an engine's, or in the one that others fill, as the
Trainer's; each with the end of the names of directories that are filled.
"""


def whole(at: str) -> Files:
    """What `checkpoint-8` holds after the save of NEW."""
    below = at.removeprefix("checkpoint-8").lstrip("/")
    own = {f"{below}/{name}".lstrip("/"): data for name, data in NEW.items()}
    return own | BESIDE_IT | ({"latest": b"step8"} if below else {})  # `latest` would mean nothing to the Trainer


def revealing(at: str, *, is_there: bool) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """A save in `checkpoint-8`, where others have written files, too; it `is_there` from an earlier save, or not."""

    async def scenario(crash: Crash) -> bool:
        world, end = World(), PLACES[at]
        mine = {"mine.txt": b"mine"} if is_there else {}
        if is_there:
            await world.filled(f"00000001-0{end}", {"model.safetensors": b"old", "old.txt": b"old"})
            await world.shown(await world.committed("c8--step8", 1, OLD, at=at, unfinished=f"00000001-0{end}"))
            await world.written(mine, f"{BESIDE}/checkpoint-8")
        old = world.contents("checkpoint-8")
        await world.filled(f"00000002-1{end}", {"half": b"of one that was killed"})
        await world.filled(f"00000002-0{end}", BESIDE_IT)
        commit = await world.committed("c8--step8", 2, NEW, at=at, unfinished=f"00000002-0{end}")
        struck = await world.struck(crash, lambda store: tag_directories.show(store, commit))
        assert world.contents("checkpoint-8") in [whole(at) | mine, *([old, whole(at)] if struck else [])]
        await world.started(start=3)
        assert world.contents("checkpoint-8") == whole(at) | mine
        assert not world.hidden(), "leftovers"
        await world.did(lambda store: _remove(store, commit))
        assert (world.contents("checkpoint-8") or {}) == mine
        return struck

    return scenario


@pytest.mark.parametrize("rounds", [2, pytest.param(7, marks=pytest.mark.nightly, id="7: every point")])
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("is_there", [False, True])
@how
def test_what_others_filled_appears_whole_with_the_files(how: str, is_there: bool, at: str, rounds: int) -> None:
    """TAGDIR-6, UNFINISHED-1."""
    assert every_crash_point(revealing(at, is_there=is_there), range(rounds), HOW[how], stride=7) > 10


def test_without_care_what_others_filled_appears_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(UnfinishedDirectories, "sync", nothing)
    with pytest.raises(AssertionError):
        every_crash_point(revealing("checkpoint-8", is_there=False), range(2), stride=3)


@pytest.mark.nightly
@pytest.mark.parametrize("at", PLACES)
@how
def test_a_removal_that_is_cut_off_is_finished_by_the_next_start(how: str, at: str) -> None:
    """TAGDIR-7, TAGDIR-8: the directory goes at once, and what was filled beside the files goes with it."""

    async def scenario(crash: Crash) -> bool:
        world, name = World(), f"00000001-0{PLACES[at]}"
        await world.filled(name, BESIDE_IT)
        commit = await world.committed("c8--step8", 1, NEW, at=at, unfinished=name)
        await world.shown(commit)
        await world.written({"mine.txt": b"mine"}, f"{BESIDE}/checkpoint-8")
        struck = await world.struck(crash, lambda store: _remove(store, commit))
        if await world.did(lambda store: _is_removed(store, commit)):
            await world.started()
            assert world.contents("checkpoint-8") == {"mine.txt": b"mine"}
            assert not [line for line in world.disk.fs.dump() if line.endswith("record")]
        else:
            assert world.contents("checkpoint-8") == whole(at) | {"mine.txt": b"mine"}
        return struck

    assert every_crash_point(scenario, range(3), HOW[how], stride=3) > 15


# --- their order ----------------------------------------------------------------------------------------------------

TAGS = ("step17", "step18", "step19")


def appearing(who: str) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """Three commits are shown, by a start, or by their writer, which learns of the newest first."""

    async def scenario(crash: Crash) -> bool:
        world = World()
        commits = [await world.committed(tag, start, NEW) for start, tag in enumerate(TAGS, 1)]
        struck = await world.struck(
            crash, tag_directories.settle if who == "a start" else lambda store: _shown_by_a_writer(store, commits)
        )
        seen = [tag for tag in TAGS if world.contents(tag) is not None]
        assert tuple(seen) == TAGS[: len(seen)], f"not the oldest: {seen}"
        assert world.latest() in ({TAGS[-1]} if not struck else {"", *seen}), f"latest names {world.latest()}: {seen}"
        await world.started()
        assert all(world.contents(tag) == NEW for tag in TAGS)
        assert world.latest() == TAGS[-1]
        return struck

    return scenario


async def _shown_by_a_writer(store: PosixStore, commits: list[CommitRecord]) -> None:
    turns = Turns(store)
    infos = [
        AttemptInfo(tag=commit.tag, attempt=commit.id, rank=0, world_size=1, step=1, n=number)
        for number, commit in enumerate(commits)
    ]
    for info in infos:
        turns.expect(info)

    async def decided(info: AttemptInfo, commit: CommitRecord) -> None:
        await turns.of(info)
        await tag_directories._show_alone(store, store.plain_files, commit)  # `show` itself shows older ones first
        turns.end(info)

    # As tasks of this very process, which a crash ends.
    await asyncio.gather(*(decided(*pair) for pair in reversed(list(zip(infos, commits, strict=True)))))


@pytest.mark.nightly
@how
@pytest.mark.parametrize("who", ["a start", "a writer"])
def test_checkpoints_appear_in_the_order_of_their_saves(who: str, how: str) -> None:
    """TAGDIR-5: wherever it is cut off, what is there are the oldest, and `latest` names the last of them."""
    assert every_crash_point(appearing(who), range(2), HOW[how], stride=5) > 20


@pytest.mark.parametrize("who", ["a start", "a writer"])
def test_without_turns_they_appear_in_another_order(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: object) -> None: ...

    monkeypatch.setattr(Turns, "of", at_once)
    monkeypatch.setattr(tag_directories, "reversed", lambda newest_first: newest_first, raising=False)
    with pytest.raises(AssertionError, match=r"not the oldest|latest names"):
        every_crash_point(appearing(who), range(2), stride=5)
