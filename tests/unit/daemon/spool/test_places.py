"""The spool on a real disk: names, locks and room."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointd.daemon.spool.places import DiskPlace, hold, name_of
from checkpointd.errors import UsageError
from checkpointd.store.posix.users import User

HOLDS = """
import sys, threading
from checkpointd.daemon.spool.places import hold
hold(sys.argv[1])
print("held", flush=True)
threading.Event().wait()
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


def test_spool_3_one_daemon_at_a_time_holds_a_spool_until_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="another daemon uses the spool"):
            hold(str(tmp_path))
        other.kill()
        other.wait()
    os.close(hold(str(tmp_path)))


def test_a_file_system_without_locks_is_not_taken_for_another_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        UsageError,
        match=r"cannot be locked: .*No locks available: the file system grants no locks.*A disk of the node itself has locks",
    ):
        hold(str(tmp_path))


def test_a_spool_must_be_a_directory_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        DiskPlace(str(tmp_path / "file" / "spool"))
    with pytest.raises(UsageError, match="cannot be made"):
        DiskPlace(str(tmp_path / "file"))
