"""What other users can do to a store, and what a store can do with another user's rights: by processes of real users."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from checkpointd.errors import StoreError, UnreadableError
from checkpointd.store.posix import users
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.threads import Threads
from checkpointd.store.posix.users import User
from tests.unit.store.posix.run_as_user import run_as

pytestmark = pytest.mark.root

ALICE, BOB, TEAM = 12345, 12346, 12400
HOLD = "fd = os.open(argv[0], getattr(os, argv[1]))\nfcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\nreturn 'held'"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user reaches: pytest's own are for their owner alone."""
    made = Path(tempfile.mkdtemp(prefix="checkpointd-test-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def directory(path: Path, owner: int, mode: int, group: int | None = None) -> Path:
    path.mkdir()
    os.chown(path, owner, owner if group is None else group)
    path.chmod(mode)
    return path


# --- the lock ----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def disk() -> AsyncIterator[OsDisk]:
    made = OsDisk()
    yield made
    await made.close()


async def lock_once(disk: OsDisk, path: Path) -> int:
    """The mode of the lock at `path` after it was held."""
    lock = await disk.locked(str(path))
    await lock.release()
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("flags", ["O_RDONLY", "O_RDWR"])
async def test_who_may_only_read_a_root_cannot_hold_its_lock(disk: OsDisk, folder: Path, flags: str) -> None:
    assert await lock_once(disk, folder / "lock") == 0o600
    assert run_as(HOLD, folder / "lock", flags, uid=ALICE)[0] == "PermissionError"


async def test_a_lock_that_readers_could_hold_is_mended(disk: OsDisk, folder: Path) -> None:
    (folder / "lock").touch(mode=0o644)
    (folder / "lock").chmod(0o644)
    assert run_as(HOLD, folder / "lock", "O_RDONLY", uid=ALICE) == "held"
    assert await lock_once(disk, folder / "lock") == 0o600
    assert run_as(HOLD, folder / "lock", "O_RDONLY", uid=ALICE)[0] == "PermissionError"


async def test_users_of_one_group_that_share_a_directory_share_the_lock(disk: OsDisk, folder: Path) -> None:
    shared = directory(folder / "shared", 0, 0o775, TEAM)
    assert await lock_once(disk, shared / "lock") == 0o660
    assert run_as(HOLD, shared / "lock", "O_RDWR", uid=ALICE, groups=[TEAM]) == "held"
    assert run_as(HOLD, shared / "lock", "O_RDONLY", uid=BOB)[0] == "PermissionError"


async def test_where_everybody_may_write_everybody_may_lock(disk: OsDisk, folder: Path) -> None:
    assert await lock_once(disk, directory(folder / "public", 0, 0o1777) / "lock") == 0o666


async def test_a_lock_that_root_made_is_the_directorys_owners(disk: OsDisk, folder: Path) -> None:
    own = directory(folder / "alice", ALICE, 0o755)
    await lock_once(disk, own / "lock")
    assert run_as(HOLD, own / "lock", "O_RDWR", uid=ALICE) == "held"


async def test_a_reader_does_not_hold_up_a_save(folder: Path) -> None:
    """The whole of it: `latest` moves while somebody who may only read tries to hold the lock."""
    async with PosixStore(folder / "root") as store:
        assert await store.put_if_match("latest", None, b"1")
        lock = folder / "root" / ".checkpointd" / "lock"
        assert run_as(HOLD, lock, "O_RDONLY", uid=ALICE)[0] == "PermissionError"
        assert await store.put_if_match("latest", b"1", b"2")


# --- the rights of another user ----------------------------------------------------------------------------------


async def test_a_store_of_a_user_writes_as_that_user(folder: Path) -> None:
    own = directory(folder / "alice", ALICE, 0o700)
    async with PosixStore(own / "run", anchor="/", user=User(ALICE, ALICE)) as store:
        assert await store.put_if_match("latest", None, b"1")
        writer = await store.open_writer("tag/00000001-0/00000.chunks", size_hint=1 << 20)
        await writer.write_at(0, bytes(1 << 20))
        await writer.finish(1 << 20)
    made = [own / "run", *(own / "run").rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(ALICE, ALICE)}
    assert os.geteuid() == 0
    assert (folder / "alice" / "run").exists()  # this thread has kept its rights


async def test_the_kernel_refuses_a_user_what_is_another_users(folder: Path) -> None:
    own = directory(folder / "alice", ALICE, 0o700)
    (own / "object").write_bytes(b"alice's")
    async with PosixStore(own, anchor="/", user=User(BOB, BOB)) as store:
        with pytest.raises(UnreadableError, match="EACCES"):
            await store.get("object")
        with pytest.raises(StoreError, match="EACCES"):
            await store.put("object", b"bob's")
        with pytest.raises(StoreError, match="EACCES"):
            await store.delete("object")
    assert (own / "object").read_bytes() == b"alice's"


async def test_a_users_groups_count(folder: Path) -> None:
    shared = directory(folder / "shared", 0, 0o2770, TEAM)
    async with PosixStore(shared, user=User(BOB, BOB, (TEAM,))) as store:
        await store.put("object", b"1")
    assert ((shared / "object").stat().st_uid, (shared / "object").stat().st_gid) == (BOB, TEAM)
    async with PosixStore(shared, user=User(BOB, BOB)) as store:
        with pytest.raises(StoreError, match="EACCES"):
            await store.put("other", b"1")


async def test_a_thread_of_a_user_has_its_ids_and_no_capability() -> None:
    threads = Threads(1, "test", User(ALICE, ALICE, (TEAM,)))

    def status() -> bytes:
        return Path(f"/proc/self/task/{threading.get_native_id()}/status").read_bytes()

    found = dict(line.split(":\t", 1) for line in (await threads.run(status)).decode().splitlines() if ":\t" in line)
    threads.close()
    assert (found["CapEff"], found["CapPrm"]) == ("0" * 16, "0" * 16)
    assert (found["Uid"].split()[3], found["Gid"].split()[3], found["Groups"].split()) == (str(ALICE), str(ALICE), [str(TEAM)])


def test_who_may_not_take_a_users_rights_does_nothing(folder: Path) -> None:
    """Every call is an error, and is not made with the rights that there are."""
    code = (
        "import asyncio\nfrom checkpointd.store.posix.users import User, missing_capabilities\n"
        "async def main():\n    async with PosixStore(argv[0], user=User(12346, 12346)) as store:\n"
        "        await store.put('object', b'1')\n"
        "assert missing_capabilities() == ['CAP_SETGID', 'CAP_SETUID']\nasyncio.run(main())"
    )
    place = directory(folder / "public", 0, 0o777)
    kind, message = run_as(code, place, uid=ALICE)
    assert (kind, "[EPERM]" in message) == ("StoreError", True), message
    assert list(place.iterdir()) == []


def test_root_lacks_nothing() -> None:
    assert users.missing_capabilities() == []
