"""Invariants USER-1 and USER-2 of `checkpointd.daemon.users`: whom a daemon serves; one of root, with clients
of other users.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import ServeConfig
from checkpointd.daemon import users
from checkpointd.daemon.jobs import VOTED_MAX, SaveJobs
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel
from checkpointd.daemon.roots.root_monitor import RootMonitor
from checkpointd.daemon.served_roots import ServedRoots
from checkpointd.daemon.users import check_unnamed, check_users, looks_as, warn_of_shut_out
from checkpointd.errors import SidecarFullError, UsageError
from checkpointd.pipeline.root import own_root
from checkpointd.pipeline.shard import Shard
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.users import User
from tests.unit.daemon.conftest import N1, Daemon, RawClient, answered, put_start, serving, shard_of, until

ALICE, BOB, TEAM = 12345, 12346, 12400


def test_user_2_root_names_whom_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match=r"runs as root and no user was named.*--uid 1000, .*--group.*; --uid 0 "):
        check_unnamed()
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    check_unnamed()


def test_user_2_the_capabilities_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "missing_capabilities", lambda: ["CAP_SETGID", "CAP_SETUID"])
    check_users([os.geteuid()])
    with pytest.raises(UsageError, match=f"cannot serve user {BOB}:.* CAP_SETGID and CAP_SETUID.*one daemon for each user"):
        check_users([os.geteuid(), BOB])


def test_user_2_more_than_ones_own_rights_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(users, "missing_capabilities", list)
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    check_users([ALICE])
    assert caplog.messages == []
    check_users([0, ALICE, BOB])
    assert caplog.messages[0] == f"serves user 0, {BOB}, with their rights at their roots"
    assert caplog.messages[1].startswith("serves root: ")


@pytest.mark.root
def test_user_2_a_daemon_of_root_does_not_start_unless_it_is_told_whom_to_serve(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "checkpointd", "serve", "--root", str(tmp_path)]
    done = subprocess.run([*command, "--socket", str(tmp_path / "s" / "socket")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--uid 0 lets root's own jobs use it" in " ".join(done.stderr.split())


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user gets to: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="checkpointd-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.mark.root
def test_users_who_cannot_open_the_socket_are_named_at_the_start(public: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = public / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    for mode, group, shut in ((0o600, 0, True), (0o660, TEAM, False), (0o666, 0, False)):
        caplog.clear()
        path.chmod(mode)
        os.chown(path, -1, group)
        warn_of_shut_out(str(path), [0, ALICE])
        assert bool(caplog.messages) is shut
        assert all(f"user {ALICE} cannot open the socket {path}" in said and "give --group" in said for said in caplog.messages)
    public.chmod(0o600)
    warn_of_shut_out(str(path), [ALICE])
    assert f"{public} has mode 0600" in caplog.messages[-1]


def test_looks_are_made_as_the_owner_and_not_as_whoever_joined(tmp_path: Path) -> None:
    alice, bob = User(ALICE, 1, (7,)), User(BOB, 2)
    owned = os.stat_result([0o755, 1, 1, 1, ALICE, 9, 0, 0, 0, 0])
    assert looks_as(owned, [alice, bob], [ALICE, BOB]) == alice
    assert looks_as(owned, [bob], [ALICE, BOB]) == User(ALICE, 9)
    assert looks_as(owned, [alice, bob], [BOB]) == bob
    assert looks_as(None, [alice, None], [ALICE]) is None
    assert looks_as(tmp_path.stat(), [bob], [os.geteuid(), BOB]) is None


@pytest.mark.root
def test_user_2_nothing_is_done_with_roots_rights_for_a_user_who_is_not_named(tmp_path: Path) -> None:
    """Not even looking: what was in doubt there would be decided, and written, by root."""
    for name, owner in (("alices", ALICE), ("strangers", 23456)):
        (tmp_path / name / "log").mkdir(parents=True)
        (tmp_path / name / "log" / "root").touch()
        os.chown(tmp_path / name, owner, owner)
    assert ServedRoots([str(tmp_path)], uids=[ALICE]).found() == [str(tmp_path / "alices")]
    assert len(ServedRoots([str(tmp_path)], uids=[ALICE, 0]).found()) == 2
    for owner in ((tmp_path / "strangers").stat(), None):
        with pytest.raises(UsageError, match="name the owner with --uid"):
            looks_as(owner, [], [ALICE])


@pytest.mark.root
async def test_a_lock_file_with_a_second_name_is_left_as_it_is(tmp_path: Path) -> None:
    """It may be another one's file, under a name of the user's."""
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "root").mkdir()
    os.chown(tmp_path / "root", ALICE, ALICE)
    os.link(tmp_path / "secret", tmp_path / "root" / "lock")
    disk = OsDisk()
    lock = await disk.locked(str(tmp_path / "root" / "lock"))
    await lock.release()
    await disk.close()
    assert (tmp_path / "secret").stat().st_uid == 0


def test_one_user_cannot_fill_the_daemon_with_saves() -> None:
    jobs = SaveJobs()
    config = ServeConfig(socket="/s", roots=("/r",), uids=(ALICE, BOB), clients_max=4)
    for number in range(config.user_clients * VOTED_MAX):
        job: Any = SimpleNamespace(root="/r", uid=ALICE, info=SimpleNamespace(rank=number), has_voted=False, is_in_spool=False)
        jobs._live["/r", "n", ALICE, str(number), "", number] = job
    with pytest.raises(SidecarFullError, match=f"128 of user {ALICE} and 128 in all"):
        jobs.check_room("/r", 1000, ALICE, config)
    jobs.check_room("/r", 0, BOB, config)


async def test_each_user_of_a_root_has_a_store_of_its_own(tmp_path: Path) -> None:
    roots = ServedRoots([str(tmp_path)])
    root = str(tmp_path / "job")
    stores = [roots.store(root, user) for user in (None, User(ALICE, ALICE), User(ALICE, ALICE, (7,)), User(ALICE, ALICE))]
    assert stores[3] is stores[1]
    assert len({id(store) for store in stores}) == 3
    await roots.close()


# --- a daemon of root --------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user reaches: pytest's own are for their owner alone."""
    made = Path(tempfile.mkdtemp(prefix="checkpointd-test-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def victim(folder: Path) -> Iterator[Path]:
    """A directory of root's, in which nothing is read and nothing changes."""
    made = folder / "victim"
    made.mkdir(mode=0o700)
    (made / "secret").write_text("SECRETHASH")
    (made / "secret").chmod(0o600)
    yield made
    assert [(path.name, path.read_text()) for path in made.iterdir()] == [("secret", "SECRETHASH")]


@pytest.fixture
def root(folder: Path) -> Path:
    """Alice's; Bob has a directory beside it."""
    for uid in (ALICE, BOB):
        (folder / "served" / str(uid)).mkdir(parents=True)
        os.chown(folder / "served" / str(uid), uid, uid)
        (folder / "served" / str(uid)).chmod(0o700)
    return folder / "served" / str(ALICE) / "run"


@pytest.fixture
async def daemon(folder: Path, root: Path) -> AsyncIterator[Daemon]:
    """It serves both users, and listens where they reach it."""
    where = folder / "sidecar"
    settings = {"roots": (str(root.parents[1]),), "uids": (ALICE, BOB), "grace_s": 0.0}
    async with serving(folder, socket=str(where / "socket"), **settings) as running:
        os.chmod(where, 0o755)
        os.chmod(running.path, 0o666)
        yield running


def connected(path: str, uid: int, groups: Sequence[int]) -> socket.socket:
    """A connection of another user: of a thread that has taken its ids, which no other thread of this process does."""
    made = list[socket.socket]()
    numbers = (159, 149, 147) if platform.machine() == "aarch64" else (116, 119, 117)
    libc = ctypes.CDLL(None, use_errno=True)

    def connect() -> None:
        assert libc.syscall(numbers[0], len(groups), (ctypes.c_uint32 * len(groups))(*groups)) == 0
        for number in numbers[1:]:
            assert libc.syscall(number, uid, uid, uid) == 0
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        made.append(connection)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    return made[0]


@asynccontextmanager
async def client_of(daemon: Daemon, uid: int, groups: Sequence[int] = ()) -> AsyncIterator[RawClient]:
    channel = Channel(connected(daemon.path, uid, groups))
    try:
        await channel.send(wire.Hello(protocols=wire.PROTOCOLS, release="test", role="rank"))
        received = await channel.receive()
        assert received is not None
        assert isinstance(received.message, wire.Welcome), received.message
        channel.allow_frames(received.message.frame_bytes_max)
        yield RawClient(channel, received.message)
    finally:
        channel.close()


async def begun(root: Path, uid: int = ALICE) -> None:
    """Let the user's own process begin start 1 there."""
    async with PosixStore(root, user=User(uid, uid)) as store:
        await put_start(store, 1, N1)


def below(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def owners(root: Path) -> set[tuple[int, int]]:
    """Whose all that is at a root is."""
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in [root, *below(root)]}


async def ready(client: RawClient, root: Path, shard: Shard) -> None:
    await client.join(root)
    client.root = ""  # the record of the start is there, written by its own user
    await client.begin(1)
    await client.slot(0, shard)
    await client.layout(0, shard)


async def saved(client: RawClient, root: Path) -> wire.PhaseEntered:
    """How a save of the client ends."""
    shard = shard_of()
    await ready(client, root, shard)
    await client.whole_save(1, shard)
    return await client.outcome(1)


@pytest.mark.root
async def test_user_1_what_is_saved_for_a_user_is_that_users(daemon: Daemon, root: Path) -> None:
    await begun(root)
    async with client_of(daemon, ALICE) as client:
        assert (await saved(client, root)).phase == Phase.COMMITTED
    assert owners(root) == {(ALICE, ALICE)}
    assert (root / "latest").read_text() == "global_step1\n"


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o700, 0o755])
async def test_user_1_nobody_joins_a_root_that_the_kernel_keeps_them_from(daemon: Daemon, root: Path, mode: int) -> None:
    """Not to have a say in it, either: whoever joined held up a restart there, and pushed the snapshot out of the tier."""
    await begun(root)
    before = below(root)
    os.chmod(root.parent, mode)
    async with client_of(daemon, BOB) as client:
        for place in (root, root.parent / "new" / "run"):
            await client.send(wire.Join(root=str(place), rank=0, world_size=1))
            assert "this user may not write there" in (await client.refused()).message
        await client.join(root.parents[1] / str(BOB) / "new" / "run")
    assert daemon.hub.ranks_at(str(root)) == []
    assert below(root) == before


async def team_root(root: Path, uid: int) -> Path:
    """A root beside `root` at which all of a group may write; `uid` has begun its first start."""
    team = root.parents[1] / "team"
    team.mkdir()
    os.chown(team, 0, TEAM)
    team.chmod(0o2770)
    async with PosixStore(team, user=User(uid, uid, (TEAM,))) as store:
        await put_start(store, 1, N1)
    return team


@pytest.mark.root
async def test_user_1_a_clients_groups_count(daemon: Daemon, root: Path) -> None:
    team = await team_root(root, BOB)
    async with client_of(daemon, BOB, groups=[TEAM]) as client:
        assert (await saved(client, team)).phase == Phase.COMMITTED
    assert ((team / "latest").stat().st_uid, (team / "latest").stat().st_gid) == (BOB, TEAM)


@pytest.mark.root
@pytest.mark.parametrize("name", ["global_step1", ".checkpointd/lock", ".checkpointd/tmp"])
async def test_user_1_no_save_leaves_the_root_through_a_link(daemon: Daemon, root: Path, victim: Path, name: str) -> None:
    """A tag: chunks would be written there. The lock: an empty file of root's would be made."""
    await begun(root)
    if (root / name).is_dir():
        shutil.rmtree(root / name)
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(victim / "new" if name.endswith("lock") else victim)
    async with client_of(daemon, ALICE) as client:
        ended = await saved(client, root)
    if ended.phase != Phase.COMMITTED:
        assert ended.error is not None
        assert f"{root}/{name} is a symbolic link" in ended.error.message
    else:
        assert name.endswith("lock")  # the checkpoint is whole, and `latest` could not be moved
        assert not (root / "latest").exists()


@pytest.mark.root
async def test_user_1_a_root_that_was_exchanged_for_a_link_leads_nowhere(daemon: Daemon, root: Path, victim: Path) -> None:
    await begun(root)
    shard = shard_of()
    async with client_of(daemon, ALICE) as client:
        await ready(client, root, shard)
        await answered(client)
        os.rename(root, f"{root}-away")
        os.symlink(victim, root)
        await client.whole_save(1, shard)
        ended = await client.outcome(1)
    assert ended.phase == Phase.FAILED
    assert ended.error is not None
    assert f"{root} is a symbolic link" in ended.error.message


@pytest.mark.root
async def test_user_1_a_pointer_that_is_a_link_tells_nothing(daemon: Daemon, root: Path, victim: Path) -> None:
    await begun(root)
    (root / "latest").symlink_to(victim / "secret")
    async with client_of(daemon, ALICE) as client:
        await client.join(root)
        await RootMonitor(daemon.hub).look(str(root))
    problem = daemon.hub.root_scans[str(root)].problem
    assert problem is not None
    assert f"{root}/latest is a symbolic link" in problem.message
    assert "SECRETHASH" not in problem.message


@pytest.mark.root
async def test_a_root_is_looked_after_with_its_owners_rights(daemon: Daemon, root: Path) -> None:
    """Nobody who joins it as well can keep the daemon from seeing what it holds."""
    await begun(root)
    os.chmod(root.parent, 0o755)
    os.chmod(root, 0o777)
    async with client_of(daemon, ALICE) as alice, client_of(daemon, BOB) as bob:
        assert (await saved(alice, root)).phase == Phase.COMMITTED
        await bob.join(root, rank=1, world_size=2)
        await asyncio.wait_for(RootMonitor(daemon.hub).look(str(root)), 60)
    look = daemon.hub.root_scans[str(root)]
    assert (look.problem, look.latest) == (None, "global_step1")


@pytest.mark.root
async def test_what_one_user_of_a_team_says_answers_no_save_of_another_one(daemon: Daemon, root: Path) -> None:
    """Nor does a save that it began under the same name hold up, or end, the other one's."""
    team = await team_root(root, ALICE)
    async with client_of(daemon, BOB, groups=[TEAM]) as bob, client_of(daemon, ALICE, groups=[TEAM]) as alice:
        await ready(bob, team, shard_of())
        await bob.save(1)
        await answered(bob)
        assert (await saved(alice, team)).phase == Phase.COMMITTED


@pytest.mark.root
async def test_nobody_begins_a_start_whose_record_they_may_not_read(
    daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.05)
    team = await team_root(root, ALICE)
    (team / "log").chmod(0o700)
    async with client_of(daemon, ALICE, groups=[TEAM]) as alice, client_of(daemon, BOB, groups=[TEAM]) as bob:
        await ready(bob, team, shard_of())
        refused = (await bob.refused()).message
        assert "does not see that the job began there: looking at 'log/root'" in refused
        assert "permission is missing" in refused
        await bob.save(1)
        assert "send begin first" in (await bob.refused()).message
        assert (await saved(alice, team)).phase == Phase.COMMITTED


async def held_steps(client: RawClient) -> list[int | None]:
    """The steps of the snapshots that the daemon says it holds for the client, then those for other ranks of its root."""
    await client.send(wire.Look())
    joined = await client.next(wire.Joined)
    return [held.step for held in (*joined.held, *joined.beside)]


@pytest.mark.root
async def test_users_of_one_root_have_snapshots_of_their_own(daemon: Daemon, root: Path) -> None:
    """TIER-1: nobody's is shown or given to another one, nor pushed out by a newer one, nor let go when another one ends."""
    team, shard = await team_root(root, ALICE), shard_of()
    async with client_of(daemon, ALICE, groups=[TEAM]) as alice, client_of(daemon, BOB, groups=[TEAM]) as bob:
        await saved(alice, team)
        await ready(bob, team, shard)
        assert await held_steps(bob) == []
        await bob.whole_save(2, shard, attempt="00000001-1")
        await bob.phase(2, Phase.STAGED)
        assert (await held_steps(alice), await held_steps(bob)) == ([1], [2])
        await bob.send(wire.Fetch(tag="global_step1", attempt="00000001-0"))
        assert (await bob.refused()).code == "NotFoundError"
        async with client_of(daemon, BOB, groups=[TEAM]) as beside:
            await beside.join(team, rank=1, world_size=2)
            assert await held_steps(beside) == [2]
            await beside.send(wire.Fetch(tag="global_step1", attempt="00000001-0", rank=0))
            assert (await beside.refused()).code == "NotFoundError"
        await bob.send(wire.Leave())
        assert (await held_steps(alice), await held_steps(bob)) == ([1], [])
    async with client_of(daemon, ALICE, groups=[TEAM]) as again:
        assert [held.step for held in (await again.join(team)).held] == [1]


@pytest.mark.root
async def test_a_snapshot_is_let_go_whoever_else_is_at_its_root(daemon: Daemon, root: Path) -> None:
    """Its own trainer has gone: another user's, of the same rank, does not come back for it."""
    team = await team_root(root, ALICE)
    async with client_of(daemon, BOB, groups=[TEAM]) as bob:
        await bob.join(team)
        async with client_of(daemon, ALICE, groups=[TEAM]) as alice:
            await saved(alice, team)
            [kept] = daemon.hub.tier
            assert kept.timer is None
        await until(lambda: kept.timer is not None)
