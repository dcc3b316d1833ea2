"""What mountinfo says of a path, and what the doctor makes of it."""

from __future__ import annotations

import pytest

from checkpointd.doctor.mounts import Mount, file_system, mount_of, mount_options

INFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 22 0:26 / /mnt rw - tmpfs tmpfs rw,size=1024k
31 30 0:27 / /mnt/ckpts rw,noatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2,hard,local_lock=none
32 22 0:28 / /mnt/with\040blank rw - xfs /dev/sdb1 rw,attr2
33 31 0:29 / /mnt/ckpts rw - lustre mgs@tcp:/fs rw,flock
34 22 0:30 / /mnt/hidden ro - ext4 /dev/sdc1 rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/home/run1", "ext4", "/"),
        ("/", "ext4", "/"),
        ("/mnt", "tmpfs", "/mnt"),
        ("/mnt/ckptsother", "tmpfs", "/mnt"),
        ("/mnt/ckpts/run1", "lustre", "/mnt/ckpts"),
        ("/mnt/with blank/run1", "xfs", "/mnt/with blank"),
    ],
)
def test_the_innermost_and_last_mount_counts(path: str, kind: str, point: str) -> None:
    found = mount_of(path, INFO)
    assert found is not None
    assert (found.kind, found.point) == (kind, point)


def test_options_are_those_of_the_mount_and_of_its_file_system() -> None:
    found = mount_of("/mnt/hidden/run1", INFO)
    assert found is not None
    assert found.options == {"ro", "rw"}


def test_without_mountinfo_there_is_a_note() -> None:
    assert mount_of("/x", "") is None
    assert file_system(None).level == "note"


def mount(kind: str, *options: str) -> Mount:
    return Mount("/mnt/ckpts", kind, "source", frozenset(options))


@pytest.mark.parametrize(
    ("kind", "level", "words"),
    [
        ("ext4", "ok", "ranks on other nodes do not see it"),
        ("nfs4", "ok", "network"),
        ("lustre", "ok", "network"),
        ("tmpfs", "warn", "memory"),
        ("overlay", "warn", "container"),
        ("vfat", "fail", "hard links"),
        ("fuse.s3fs", "fail", "hard links"),
        ("fuse.sshfs", "note", "user space"),
    ],
)
def test_each_kind_of_file_system(kind: str, level: str, words: str) -> None:
    found = file_system(mount(kind))
    assert found.level == level
    assert words in found.seen
    assert bool(found.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("options", "level", "words"),
    [
        (["rw", "relatime"], "ok", ""),
        (["rw", "nobarrier"], "warn", "power cut"),
        (["rw", "local_lock=all"], "warn", "two nodes"),
        (["rw", "soft"], "warn", "hard"),
        (["soft", "ro"], "fail", "read-only"),
    ],
)
def test_options_that_break_a_promise(options: list[str], level: str, words: str) -> None:
    found = mount_options(mount("nfs4", *options))
    assert found.level == level
    assert words in found.fix


def test_all_risky_options_are_named_the_worst_first() -> None:
    found = mount_options(mount("nfs4", "soft", "nolock", "ro"))
    assert found.level == "fail"
    assert found.seen.startswith("mounted with ro, ")
    assert "nolock" in found.seen
    assert "remount" in found.fix
    assert "`hard`" in found.fix
