"""The spool on a real disk: names, locks and room."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.errors import UsageError
from checkpointd.pipeline.spool.places import DiskPlace, FileClaim, hold, name_of
from checkpointd.store.posix.users import User

TAKES = """
import sys, time
from checkpointd.pipeline.spool.places import FileClaim
claim = FileClaim.of(sys.argv[1])
print(claim is not None, flush=True)
sys.stdin.read()
"""


def test_a_name_is_readable_and_another_one_for_each_root_and_user() -> None:
    one, two = name_of("/mnt/ckpts/run3", None), name_of("s3://bucket/run3", None)
    assert one.startswith("mnt-ckpts-run3-")
    assert two.startswith("bucket-run3-")
    assert len({one, two, name_of("/mnt/ckpts/run3", User(5, 5)), name_of("/mnt/ckpts/run3", User(6, 6))}) == 4
    options = name_of("s3://bucket/run3?endpoint=http://10.0.0.5:9000&retry_s=60", None)
    assert options.startswith("bucket-run3-")
    assert "endpoint" not in options
    assert options != two, "another server may have a bucket of this name"
    assert options == name_of("s3://bucket/run3?endpoint=http://10.0.0.5:9000&retry_s=600&checksum=sha256", None)
    assert name_of("/", None).startswith("root-")
    assert "/" not in name_of("/ä/../x y", None)


def test_spool_3_a_claim_ends_with_its_process_and_is_one_process_s(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text("x")
    command = [sys.executable, "-c", TAKES, str(record)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert FileClaim.of(str(record)) is None
        other.kill()
        other.wait()
    claim = FileClaim.of(str(record))
    assert claim is not None
    assert FileClaim.of(str(record)) is None, "nor a second time in this process"
    claim.release()
    again = FileClaim.of(str(record))
    assert again is not None
    again.release()
    record.unlink()
    assert FileClaim.of(str(record)) is None


def test_spool_3_a_forked_child_that_lives_on_holds_no_lock(tmp_path: Path) -> None:
    """Workers of a DataLoader are forked, and may outlive a trainer that was killed."""
    record = tmp_path / "record"
    record.write_text("x")
    claim, held = FileClaim.of(str(record)), hold(str(tmp_path), alone=True)
    assert claim is not None
    (read, write), (running, runs) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.write(runs, b"x")
        os.read(read, 1)  # until the parent has looked, or has ended
        os._exit(0)
    os.close(read)
    os.close(runs)
    try:
        assert os.read(running, 1) == b"x"
        claim.release()
        held.release()
        again = FileClaim.of(str(record))
        assert again is not None
        again.release()
        hold(str(tmp_path), alone=True).release()
    finally:
        os.close(write)
        os.close(running)
        os.waitpid(child, 0)


def test_a_forked_child_that_ends_a_claim_closes_no_file_of_its_own(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text("x")
    claim = FileClaim.of(str(record))
    assert claim is not None
    child = os.fork()
    if not child:
        try:
            taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(claim.descriptor + 1)]
            claim.release()
            for descriptor in taken:
                os.fstat(descriptor)
        except BaseException:
            os._exit(1)
        os._exit(0 if claim.descriptor in taken else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    claim.release()


async def test_a_daemon_needs_no_descriptor_for_each_shard_that_waits(tmp_path: Path) -> None:
    place = DiskPlace(str(tmp_path), alone=True)
    place.open("r", None)
    for number in range(300):
        (tmp_path / "r" / f"{number}").write_text("x")
    before = os.listdir("/proc/self/fd")
    claims = [await place.claim("r", f"{number}") for number in range(300)]
    assert None not in claims
    assert len(os.listdir("/proc/self/fd")) < len(before) + 50, "threads may open some"


async def test_the_room_counts_all_files_of_the_spool_and_no_others_beside_them(tmp_path: Path) -> None:
    place, name = DiskPlace(str(tmp_path / "spool")), name_of("/mnt/run1", None)
    place.open(name, None)
    (tmp_path / "spool" / name / "a").write_bytes(bytes(1000))
    (tmp_path / "spool" / name / "b").mkdir()
    (tmp_path / "spool" / name / "b" / "c").write_bytes(bytes(24))
    (tmp_path / "spool" / "datasets").mkdir()
    (tmp_path / "spool" / "datasets" / "d").write_bytes(bytes(5000))
    room = await place.room()
    assert room.used == 1024
    assert 0 < room.free <= room.total


def test_nodespool_2_one_daemon_or_several_trainers(tmp_path: Path) -> None:
    one, two = hold(str(tmp_path), alone=False), hold(str(tmp_path), alone=False)
    with pytest.raises(UsageError, match="or trainers without a sidecar, uses the spool"):
        hold(str(tmp_path), alone=True)
    one.release()
    two.release()
    daemon = hold(str(tmp_path), alone=True)
    with pytest.raises(UsageError, match="a sidecar uses the spool"):
        hold(str(tmp_path), alone=False)
    daemon.release()


def test_a_file_system_without_locks_is_not_taken_for_another_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        UsageError,
        match=r"cannot be locked: .*No locks available: the file system grants no locks.*A disk of the node itself has locks",
    ):
        hold(str(tmp_path), alone=True)


def test_a_spool_must_be_a_directory_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        DiskPlace(str(tmp_path / "file" / "spool"))
    with pytest.raises(UsageError, match="cannot be made"):
        DiskPlace(str(tmp_path / "file"))
