"""The memory that a process may use: what the machine has, or what a control group of either version leaves of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointd import memory_limit

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process(folder: Path, groups: str, *mounts: tuple[str, str, str, str]) -> Path:
    """A directory as /proc has it: `groups`, and (type, mounted group, place, options) of file systems."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    lines = (f"30 20 0:1 {root} {place} rw - {kind} none {options}\n" for kind, root, place, options in mounts)
    (proc / "mountinfo").write_text("21 20 0:9 / /proc rw,relatime shared:3 - proc proc rw\n" + "".join(lines))
    return proc


def limited(folder: Path, **limits: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, limit in limits.items():
        (folder / f"memory.{name}").write_text(f"{limit}\n")
    return folder


def test_version_2_with_the_groups_above(tmp_path: Path) -> None:
    top = limited(tmp_path / "with\\040space".replace("\\040", " "))
    limited(top / "a", max="700", high="900")
    limited(top / "a" / "b", max="max", high="800")
    place = str(top).replace(" ", "\\040")
    proc = process(tmp_path, "0::/a/b\n", ("cgroup2", "/", place, "rw,nsdelegate"))
    assert sorted(memory_limit.cgroup_limits(proc)) == [700, 800, 900]
    assert memory_limit.memory_bytes(proc) == 700


def test_version_1(tmp_path: Path) -> None:
    top = limited(tmp_path / "memory", limit_in_bytes=str((1 << 63) - 4096))
    limited(top / "a", limit_in_bytes="600")
    cpu = limited(tmp_path / "cpu" / "a", limit_in_bytes="1")
    groups = "5:cpu,cpuacct:/a\n4:memory:/a\n0::/other\n"
    proc = process(tmp_path, groups, ("cgroup", "/", str(cpu.parent), "rw,cpu,cpuacct"), ("cgroup", "/", str(top), "rw,memory"))
    assert sorted(memory_limit.cgroup_limits(proc)) == [600, (1 << 63) - 4096]
    assert memory_limit.memory_bytes(proc) == 600


@pytest.mark.parametrize("told", ["/docker/7", "/../../docker/7", "/"], ids=["as the host sees it", "from above", "as its own"])
def test_a_container(tmp_path: Path, told: str) -> None:
    """The group that is mounted is its own, however it is told."""
    top = limited(tmp_path / "cgroup", max="500")
    proc = process(tmp_path, f"0::{told}\n", ("cgroup2", "/docker/7" if told == "/docker/7" else "/", str(top), "rw"))
    assert memory_limit.memory_bytes(proc) == 500


def test_without_control_groups(tmp_path: Path) -> None:
    assert memory_limit.memory_bytes(tmp_path) == PHYSICAL
    assert memory_limit.memory_bytes(process(tmp_path, "")) == PHYSICAL


def test_a_mount_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """Such as a disk with a label in Latin-1, mounted beside the control groups."""
    top = limited(tmp_path / "cgroup", max="500")
    proc = process(tmp_path, "0::/\n", ("cgroup2", "/", str(top), "rw"))
    with open(proc / "mountinfo", "ab") as file:
        file.write(b"31 20 8:1 / /media/caf\xe9 rw - ext4 /dev/sdb1 rw\n")
    assert memory_limit.memory_bytes(proc) == 500


def test_unescaped_names() -> None:
    assert memory_limit.unescaped(r"/mnt/with\040blank\134and/日本\011") == "/mnt/with blank\\and/日本\t"


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[Path]:
    """A control group of this machine with `limit` bytes: the file that a process is written to."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, name = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    group = parent / f"checkpointd-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"this control group has no limit on memory: {error}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


@pytest.mark.root
def test_a_real_group() -> None:
    with real_group(400 << 20) as processes:
        code = (
            f"import os; open({str(processes)!r}, 'w').write(str(os.getpid()))\n"
            "from checkpointd.config import ServeConfig\n"
            "print(ServeConfig(socket='/s', roots=('/r',)).memory_bytes_max)"
        )
        told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert int(told.stdout) == 200 << 20
