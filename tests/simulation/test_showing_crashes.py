"""Plain files beside a store, at every crash point: what a directory shows is whole, and the next start finishes the work.

`plain.py` (PLAINDIR-1 to PLAINDIR-3) and `tag_directories.py` (TAGDIR-1 to TAGDIR-3, TAGDIR-5), which docs/ORDERING.md
has in words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import pytest

from checkpointd.layout.ballot import encode_ballot
from checkpointd.layout.files import WHOLE
from checkpointd.layout.keys import AttemptId, attempt_prefix, ballot_name, file_name, index_name, vote_name
from checkpointd.layout.log_records import AnnounceRecord, CommitRecord, RemoveRecord
from checkpointd.layout.manifest import BesideFile, IndexRef, PlanRef, Shown, Vote, digest, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import starts, tag_directories
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import Queue
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.unfinished import UnfinishedDirectories
from checkpointd.testing.crashpoints import Crash, every_crash_point
from checkpointd.testing.simdisk import ProcessDisk, SimDisk

BESIDE = "/root/run"
SEEDS = range(3)
OLD = {
    "mp_rank_00_model_states.pt": b"old model",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt": b"of two",
    "recipe": b"old",
}
NEW = {"mp_rank_00_model_states.pt": b"new model", "recipe": b"new"}
OWN, FOLDER = "notes.txt", "figures"
MINE = {OWN: b"mine", f"{FOLDER}/loss.png": b"mine"}


class World:
    """A disk with one store that can show, and processes at it."""

    def __init__(self, *, clones: bool = False, exchanges: bool = True) -> None:
        self.disk = SimDisk(clones=clones, exchanges=exchanges)

    def store(self, name: str) -> tuple[PosixStore, ProcessDisk]:
        disk = self.disk.process(name)
        alive = self.disk.alive
        return PosixStore(f"{BESIDE}/.checkpointd", disk, writer=name, is_alive=lambda one: one in alive()), disk

    async def committed(self, tag: str, start: int, files: dict[str, bytes], **more: Any) -> CommitRecord:
        """The attempt of a save of `files`, committed and not shown."""
        store, disk = self.store("saver")
        commit: CommitRecord = await disk.process.spawn(_commit(store, tag, start, files, **more))
        self.disk.kill("saver")
        self.disk.fs.make_all_durable()
        return commit

    async def shown(self, commit: CommitRecord) -> None:
        store, disk = self.store("shower")
        await disk.process.spawn(tag_directories.show(store, commit))
        self.disk.kill("shower")
        self.disk.fs.make_all_durable()

    async def struck(self, crash: Crash, task: asyncio.Task[None]) -> bool:
        """Whether the crash came before the end of `task`; without it the power is cut then."""
        struck = await crash.strikes(self.disk, [task])
        self.disk.after = lambda *_: None
        if not struck:
            self.disk.power_cut()
        return struck

    async def started(self, start: int = 0) -> None:
        """What a start does."""
        store, disk = self.store("next")
        await disk.process.spawn(tag_directories.mend(store, start))
        self.disk.kill("next")

    async def removed(self, commit: CommitRecord) -> None:
        """A checkpoint is removed, and what is shown of it goes."""
        store, disk = self.store("remover")
        await disk.process.spawn(_remove(store, commit))
        self.disk.kill("remover")

    async def is_removed(self, commit: CommitRecord) -> bool:
        """Whether the log has it as removed."""
        store, disk = self.store("looker")
        state = await disk.process.spawn(RootLog.of(store).look())
        self.disk.kill("looker")
        return state.attempts[commit.attempt].status == "removed"

    async def contents(self, at: str) -> dict[str, bytes] | None:
        """What stands in a directory; None where there is none."""
        disk = self.disk.process("looker")

        async def look() -> dict[str, bytes]:
            names = [child.name for child in await disk.children(f"{BESIDE}/{at}") if not child.is_directory]
            return {name: await disk.read(f"{BESIDE}/{at}/{name}", 1 << 20) for name in names}

        try:
            return await disk.process.spawn(look())
        except FileNotFoundError:
            return None
        finally:
            self.disk.kill("looker")

    async def own(self, at: str) -> dict[str, bytes]:
        """What is left of the user's own, by path below the directory."""
        files = await self.contents(at) or {}
        below = await self.contents(f"{at}/{FOLDER}") or {}
        return {name: data for name, data in files.items() if name == OWN} | {
            f"{FOLDER}/{n}": data for n, data in below.items()
        }

    async def visible(self, tags: Iterable[str]) -> list[str]:
        return [tag for tag in tags if await self.contents(tag) is not None]

    async def whole_step(self, at: str) -> bool | None:
        """Whether `checkpoint-8` holds all of it, with the save's own files in `at`; None where it is not there."""
        beside, deep = await self.contents("checkpoint-8"), await self.contents("checkpoint-8/deep") or {}
        if beside is None:
            return None
        written = beside | {f"deep/{name}": data for name, data in deep.items()}
        own = await self.contents(at) or {}
        if at == "checkpoint-8":  # others fill all of it, and `latest` would mean nothing to them
            is_own = own.items() >= NEW.items() and not own.keys() & (OLD.keys() - NEW.keys()) and "latest" not in beside
        else:
            is_own = own == NEW and beside.get("latest") == b"step8"
        return is_own and all(written.get(name) == data for name, data in BESIDE_IT.items())

    async def latest(self) -> str:
        """The tag that it names."""
        found = await self.contents("")
        assert found is not None
        return found["latest"].decode()

    async def filled(self, name: str, files: dict[str, bytes]) -> list[BesideFile]:
        """What some other program has written beside a save, as the vote and the commit list it."""
        store, disk = self.store("filler")
        path = store.plain_files.unfinished.path(name, "checkpoint-8")

        async def fill() -> list[BesideFile]:
            for at in [BESIDE, f"{BESIDE}/.checkpointd", *_above(path, f"{BESIDE}/.checkpointd"), f"{path}/deep"]:
                with suppress(FileExistsError):
                    await disk.make_directory(at)
            for one, data in files.items():
                file = await disk.create(f"{path}/{one}")
                await file.write_at(0, data)
                await file.close()
            await store.plain_files.unfinished.settle(name)  # as a save does before it votes
            found = await store.plain_files.unfinished.files(name, "checkpoint-8")
            below = "checkpoint-8/" if name.endswith(WHOLE) else ""
            return [BesideFile(f"{below}{path}", status.size, status.changed_ns) for path, status in found.items()]

        found: list[BesideFile] = await disk.process.spawn(fill())
        self.disk.kill("filler")
        return found

    async def put_own(self, at: str) -> None:
        """A file of the user's in a directory that is shown, and a directory with another one."""
        disk = self.disk.process("user")

        async def put() -> None:
            await disk.make_directory(f"{BESIDE}/{at}/{FOLDER}")
            for path in MINE:
                file = await disk.create(f"{BESIDE}/{at}/{path}")
                await file.write_at(0, b"mine")
                await file.close()

        await disk.process.spawn(put())
        self.disk.kill("user")
        self.disk.fs.make_all_durable()


def _above(path: str, below: str) -> list[str]:
    """`path` and the directories above it that lie below `below`, from the top."""
    names = path.removeprefix(f"{below}/").split("/")
    return ["/".join([below, *names[: number + 1]]) for number in range(len(names))]


async def _commit(
    store: PosixStore,
    tag: str,
    start: int,
    files: dict[str, bytes],
    at: str = "",
    unfinished: str = "",
    beside: Iterable[BesideFile] = (),
) -> CommitRecord:
    attempt, log = AttemptId(start, 0), RootLog.of(store)
    prefix = attempt_prefix(tag, attempt)
    while await starts.newest(store) < start:
        await starts.take(store, 1)
    await log.add(AnnounceRecord(attempt=prefix, n=0, step=1))
    for number, data in enumerate(files.values()):
        await store.put_if_absent(f"{prefix}/{file_name(0, number)}", data)
    vote = encode(
        Vote(
            tag=tag,
            attempt=str(attempt),
            step=1,
            world_size=1,
            rank=0,
            n=0,
            save_latest=True,
            vote="yes",
            index=IndexRef(name=index_name(0), size=1, digest=digest(b""), plan=PlanRef(size=0, digest=digest(b""))),
            files=tuple(files),
            shown_at=at or tag,
            unfinished=unfinished,
            writer=writer(),
        )
    )
    await store.put_if_absent(f"{prefix}/{vote_name(0)}", vote)
    ref, ballot = encode_ballot([vote])
    await store.put_if_absent(f"{prefix}/{ballot_name(ref.digest)}", ballot)
    commit = CommitRecord(
        attempt=prefix,
        n=0,
        step=1,
        world_size=1,
        ballot=ref,
        files=len(files),
        shown_at=at or tag,
        unfinished=unfinished,
        leftovers=("_states.pt",),
        beside=tuple(beside),
        decided_by=0,
        writer=writer(),
    )
    refused = await log.add(commit)
    assert not refused, refused
    return commit


async def _remove(store: PosixStore, commit: CommitRecord) -> None:
    refused = await RootLog.of(store).add(RemoveRecord(attempts=(commit.attempt,), reason="a test", writer=writer()))
    assert not refused, refused
    await tag_directories.hide(store, {commit.attempt})


@pytest.mark.parametrize("how", ["power cut", "killed"])
def test_a_tag_that_is_saved_again_is_the_old_or_the_new_one_and_the_next_start_shows_the_new(how: str) -> None:
    async def scenario(crash: Crash) -> bool:
        world = World()
        await world.shown(await world.committed("best", 1, OLD))
        await world.put_own("best")
        commit = await world.committed("best", 2, NEW)
        store, disk = world.store("shower")
        shown = disk.process.spawn(tag_directories.show(store, commit))
        struck = await world.struck(crash, shown)
        found, mine = await world.contents("best"), {OWN: b"mine"}
        assert found in ([NEW | mine] if not struck else [OLD | mine, NEW | mine]), f"half of each, or nothing: {found}"
        assert await world.latest() == "best"
        await world.started()
        assert await world.contents("best") == NEW | mine
        return struck

    kill = None if how == "power cut" else lambda disk, _: disk.kill("shower")
    assert every_crash_point(scenario, SEEDS, kill) > 20 * len(SEEDS)


def test_a_new_tag_is_not_there_or_whole_and_latest_names_one_that_is() -> None:
    async def scenario(crash: Crash) -> bool:
        world = World()
        await world.shown(await world.committed("first", 1, OLD))
        commit = await world.committed("second", 2, NEW)
        store, disk = world.store("shower")
        struck = await world.struck(crash, disk.process.spawn(tag_directories.show(store, commit)))
        found, latest = await world.contents("second"), await world.latest()
        assert found in ([NEW] if not struck else [None, NEW])
        assert await world.contents("first") == OLD
        assert latest == "second" if not struck else latest in ({"first"} if found is None else {"first", "second"})
        await world.started()
        assert await world.contents("second") == NEW
        assert await world.latest() == "second"
        return struck

    assert every_crash_point(scenario, SEEDS) > 10 * len(SEEDS)


@pytest.mark.nightly
def test_a_start_that_is_cut_off_is_finished_by_the_next() -> None:
    async def scenario(crash: Crash) -> bool:
        world = World()
        await world.shown(await world.committed("best", 1, OLD))
        await world.committed("best", 2, NEW)
        await world.committed("last", 3, NEW)
        store, disk = world.store("shower")
        struck = await world.struck(crash, disk.process.spawn(tag_directories.mend(store)))
        assert await world.contents("best") in (OLD, NEW)
        assert await world.contents("last") in ([NEW] if not struck else [None, NEW])
        await world.started()
        assert (await world.contents("best"), await world.contents("last"), await world.latest()) == (NEW, NEW, "last")
        return struck

    assert every_crash_point(scenario, SEEDS) > 20 * len(SEEDS)


BESIDE_IT = {"model.safetensors": b"weights" * 400, "deep/config.json": b"{}"}
PLACES = {"checkpoint-8/step8": "", "checkpoint-8": WHOLE}
"""Where the save's own files are shown: in a directory of their own, as an engine's, or in the one that others fill, as the
Trainer's; each with the end of the names of unfinished directories.
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(7, marks=pytest.mark.nightly, id="7: every point")])
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("how", ["power cut", "killed"])
def test_what_others_filled_appears_whole_with_the_files(how: str, is_there: bool, at: str, rounds: int) -> None:
    """TAGDIR-6, UNFINISHED-1, UNFINISHED-2: or, where the directory was there before, it is whole after the next start."""
    kill = None if how == "power cut" else lambda disk, _: disk.kill("shower")
    assert every_crash_point(revealing(at, is_there=is_there), range(rounds), kill, stride=7) > 10


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("mutation", ["sync", "_is_filled"])
def test_without_care_what_others_filled_appears_in_part(mutation: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> bool:
        return False

    monkeypatch.setattr(UnfinishedDirectories if mutation == "sync" else tag_directories, mutation, nothing)
    with pytest.raises(AssertionError):
        every_crash_point(revealing(at, is_there=False), range(2), stride=3)


def revealing(at: str, *, is_there: bool) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """A save in `checkpoint-8`, where others have written files, too; it `is_there` from an earlier save, or not."""

    async def scenario(crash: Crash) -> bool:
        world, end = World(), PLACES[at]
        place = {"at": at, "unfinished": f"00000002-0{end}"}
        if is_there:
            await world.filled(f"00000001-0{end}", {"model.safetensors": b"old", "mine.txt": b"mine"})
            await world.shown(await world.committed("c8--step8", 1, OLD, at=at, unfinished=f"00000001-0{end}"))
        await world.filled(f"00000002-1{end}", {"half": b"of one that was killed"})
        filled = await world.filled(place["unfinished"], BESIDE_IT)
        commit = await world.committed("c8--step8", 2, NEW, **place, beside=filled)
        store, disk = world.store("shower")
        struck = await world.struck(crash, disk.process.spawn(tag_directories.show(store, commit)))
        if not is_there:
            assert await world.whole_step(at) in ([True] if not struck else [None, True])
        await world.started(start=3)
        assert await world.whole_step(at)
        if is_there:
            assert (await world.contents("checkpoint-8") or {})["mine.txt"] == b"mine"
        assert not [line for line in world.disk.fs.dump() if "unfinished/0" in line], "leftovers"
        await world.removed(commit)
        left = {"mine.txt": b"mine"} if is_there else None
        assert (await world.contents("checkpoint-8"), await world.contents("checkpoint-8/deep")) == (left, None)
        return struck

    return scenario


@pytest.mark.nightly
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("how", ["power cut", "killed"])
def test_a_removal_that_is_cut_off_is_finished_by_the_next_start(how: str, at: str) -> None:
    """TAGDIR-7: also when the directory has gone, and what others had filled beside it has not."""
    kill = None if how == "power cut" else lambda disk, _: disk.kill("shower")
    assert every_crash_point(removing(at), range(3), kill, stride=3) > 20


def test_without_a_word_before_it_a_removal_that_is_cut_off_leaves_what_others_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgetful(plain: PlainFiles, at: str, _: Shown) -> bool:
        return await tag_directories.is_gone(plain, at)

    monkeypatch.setattr(tag_directories, "_is_removed_by_others", forgetful)
    with pytest.raises(AssertionError):
        every_crash_point(removing("checkpoint-8/step8"), range(2))


def removing(at: str) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """A checkpoint is hidden, beside whose files others have written theirs, and the user a file of his own."""

    async def scenario(crash: Crash) -> bool:
        world, name = World(), f"00000001-0{PLACES[at]}"
        filled = await world.filled(name, BESIDE_IT | {"mine.txt": b"mine"})
        listed = [file for file in filled if not file.path.endswith("mine.txt")]
        commit = await world.committed("c8--step8", 1, NEW, at=at, unfinished=name, beside=listed)
        await world.shown(commit)
        store, disk = world.store("shower")
        struck = await world.struck(crash, disk.process.spawn(_remove(store, commit)))
        if not struck or await world.is_removed(commit):
            await world.started()
            assert await world.contents("checkpoint-8") == {"mine.txt": b"mine"}
            assert [await world.contents(f"checkpoint-8/{name}") for name in ("step8", "deep")] == [None, None]
            assert await world.contents(".checkpointd/.checkpointd/shown/checkpoint-8") is None  # TAGDIR-8
        return struck

    return scenario


TAGS = ("step17", "step18", "step19")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["power cut", "killed"])
@pytest.mark.parametrize("who", ["a start", "a writer"])
def test_checkpoints_appear_in_the_order_of_their_saves(who: str, how: str) -> None:
    """TAGDIR-5: wherever it is cut off, what is there are the oldest, and `latest` names the last of them."""
    kill = None if how == "power cut" else lambda disk, _: disk.kill("shower")
    assert every_crash_point(appearing(who), range(2), kill, stride=5) > 20


@pytest.mark.parametrize("who", ["a start", "a writer"])
def test_without_turns_they_appear_in_another_order(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: object) -> None: ...

    monkeypatch.setattr(Queue, "_turn", at_once)
    monkeypatch.setattr(tag_directories, "reversed", lambda newest_first: newest_first, raising=False)
    with pytest.raises(AssertionError, match=r"not the oldest|in another order"):
        every_crash_point(appearing(who), range(2), stride=5)


def appearing(who: str) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """Three commits are shown, by a start, or by their writer, which learns of the newest first."""

    async def scenario(crash: Crash) -> bool:
        world = World()
        commits = [await world.committed(tag, start, NEW) for start, tag in enumerate(TAGS, 1)]
        store, disk = world.store("shower")
        work = tag_directories.mend(store) if who == "a start" else _shown_by_a_writer(store, commits)
        struck = await world.struck(crash, disk.process.spawn(work))
        seen = await world.visible(TAGS)
        assert tuple(seen) == TAGS[: len(seen)], f"not the oldest: {seen}"
        latest = (await world.contents("") or {}).get("latest", b"").decode()
        assert latest in ({TAGS[-1]} if not struck else {"", *seen}), f"latest names {latest} where there are {seen}"
        await world.started()
        assert (await world.visible(TAGS), await world.latest()) == ([*TAGS], TAGS[-1]), "shown in another order by the start"
        return struck

    return scenario


async def _shown_by_a_writer(store: PosixStore, commits: list[CommitRecord]) -> None:
    queue = Queue(store)
    infos = [_info(number, commit) for number, commit in enumerate(commits)]
    for info in infos:
        queue.expect(info)

    async def decided(info: AttemptInfo, commit: CommitRecord) -> None:
        await queue.show(info, commit)
        queue.end(info)

    # As tasks of this very process, which a crash ends.
    await asyncio.gather(*(decided(*pair) for pair in reversed(list(zip(infos, commits, strict=True)))))


def _info(number: int, commit: CommitRecord) -> AttemptInfo:
    return AttemptInfo(tag=commit.tag, attempt=commit.id, rank=0, world_size=1, step=1, n=number)


@pytest.mark.nightly
@pytest.mark.parametrize(("exchanges", "clones"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("how", ["power cut", "killed"])
@pytest.mark.parametrize("what", ["shown again", "hidden"])
def test_what_is_the_users_own_is_there_after_the_next_start(what: str, how: str, exchanges: bool, clones: bool) -> None:
    """PLAINDIR-2: files and directories, whether the file system exchanges two names in one step or not."""
    kill = None if how == "power cut" else lambda disk, _: disk.kill("worker")
    assert every_crash_point(replacing(what, clones=clones, exchanges=exchanges), range(2), kill) > 20


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("what", ["shown again", "hidden"])
def test_without_the_finish_something_of_the_users_is_lost(what: str, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_: PlainFiles) -> int:
        return 0

    monkeypatch.setattr(PlainFiles, "finish", nothing)
    with pytest.raises(AssertionError):
        every_crash_point(replacing(what, exchanges=exchanges), range(2))


def replacing(what: str, *, clones: bool = False, exchanges: bool = True) -> Callable[[Crash], Coroutine[Any, Any, bool]]:
    """A directory that holds things of the user's is shown again, or hidden; after a start they are all there."""

    async def scenario(crash: Crash) -> bool:
        world = World(clones=clones, exchanges=exchanges)
        first = await world.committed("best", 1, OLD)
        await world.shown(first)
        await world.put_own("best")
        store, disk = world.store("worker")
        if what == "shown again":
            work = disk.process.spawn(tag_directories.show(store, await world.committed("best", 2, NEW)))
        else:
            work = disk.process.spawn(tag_directories.hide(store, {first.attempt}))
        struck = await world.struck(crash, work)
        await world.started()
        assert await world.own("best") == MINE
        assert not [line for line in world.disk.fs.dump() if "/tmp/" in line and ".shown" in line]
        return struck

    return scenario


@pytest.mark.nightly
def test_what_the_user_puts_there_in_the_middle_of_a_showing_is_there_after_the_next_start() -> None:
    """A file that comes, and one that is replaced, after the directory was looked at: wherever the process is killed."""

    async def scenario(crash: Crash) -> bool:
        world = World()
        await world.shown(await world.committed("best", 1, OLD))
        await world.put_own("best")
        commit = await world.committed("best", 2, NEW)
        store, disk = world.store("worker")
        user = world.disk.process("user")
        done = []

        async def write() -> None:
            for name in ("late.txt", "notes.tmp"):
                file = await user.create(f"{BESIDE}/best/{name}")
                await file.write_at(0, b"late")
                await file.close()
            await user.rename(f"{BESIDE}/best/notes.tmp", f"{BESIDE}/best/{OWN}")
            done.append(True)

        showing_ = disk.process.spawn(_both(tag_directories.show(store, commit), user.process.spawn(write())))
        struck = await crash.strikes(world.disk, [showing_])
        world.disk.after = lambda *_: None
        if not done:
            return struck
        if struck:
            await world.started()
        found = await world.contents("best") or {}
        assert (found.get("late.txt"), found.get(OWN)) == (b"late", b"late")
        return struck

    assert every_crash_point(scenario, range(4), lambda disk, _: disk.kill("worker")) > 50


async def _both(showing_: Coroutine[Any, Any, None], writing: asyncio.Task[None]) -> None:
    await showing_
    await asyncio.wait({writing})


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("how", ["power cut", "killed"])
def test_a_lone_file_is_the_old_or_the_new_one_and_the_next_start_shows_the_new(how: str, clones: bool) -> None:
    async def scenario(crash: Crash) -> bool:
        world = World(clones=clones)
        await world.shown(await world.committed("last.ckpt", 1, {"last.ckpt": b"old"}))
        commit = await world.committed("last.ckpt", 2, {"last.ckpt": b"new"})
        store, disk = world.store("shower")
        struck = await world.struck(crash, disk.process.spawn(tag_directories.show(store, commit)))
        assert (await world.contents("") or {}) in ([{"last.ckpt": b"new"}, *([{"last.ckpt": b"old"}] if struck else [])])
        await world.started()
        assert await world.contents("") == {"last.ckpt": b"new"}
        await world.removed(commit)
        assert await world.contents("") == {}
        return struck

    kill = None if how == "power cut" else lambda disk, _: disk.kill("shower")
    assert every_crash_point(scenario, SEEDS, kill) > 5 * len(SEEDS)
