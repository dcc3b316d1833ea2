"""The checks that judge figures: each with figures for every verdict."""

from __future__ import annotations

import resource
import tomllib
from pathlib import Path

import pytest

from checkpointd.doctor import machine, memory, software, space
from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.doctor.memory import MachineMemory
from checkpointd.doctor.space import FreeSpace

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
UNLIMITED = resource.RLIM_INFINITY


def state(total: int, *, nodes: int | None = None) -> StateSize:
    return StateSize(total_bytes=total, node_bytes=total // (nodes or 1), source="as you say", share_known=nodes is not None)


def room(free: int, *, every: int = 1000 * GIB, inodes: int = 10_000, all_inodes: int = 20_000) -> FreeSpace:
    return FreeSpace(free, every, inodes, all_inodes)


@pytest.mark.parametrize(
    ("free_gib", "level", "words"),
    [
        (0, "fail", "nothing can be written"),
        (79, "fail", "not one checkpoint fits"),
        (159, "warn", "keep fewer"),
        (165, "note", "less than 5 %"),
        (300, "ok", ""),
    ],
)
def test_free_space_for_two_checkpoints_of_80_gib(free_gib: int, level: str, words: str) -> None:
    found = space.free_space(room(free_gib * GIB), state(80 * GIB), 2)
    assert found.level == level
    assert words in found.fix


def test_free_space_counts_every_copy() -> None:
    assert space.free_space(room(300 * GIB), state(80 * GIB), 3).level == "ok"
    assert space.free_space(room(300 * GIB), state(80 * GIB), 4).level == "warn"


def test_free_space_without_a_size_asks_for_it() -> None:
    found = space.free_space(room(GIB), None, 2)
    assert found.level == "note"
    assert "--state-bytes" in found.fix


def test_inodes() -> None:
    assert space.inodes(room(GIB, inodes=31), 2).level == "fail"
    assert space.inodes(room(GIB, inodes=32), 2).level == "ok"
    assert space.inodes(room(GIB, inodes=0, all_inodes=0), 2).level == "ok"


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "nodes", "level", "words"),
    [
        (MachineMemory(100 * GIB, 90 * GIB, 100 * GIB), 1, "ok", ""),
        (MachineMemory(100 * GIB, 50 * GIB, 100 * GIB), 1, "note", "the trainer itself"),
        (MachineMemory(70 * GIB, 60 * GIB, 70 * GIB), 1, "fail", "more memory"),
        (MachineMemory(70 * GIB, 60 * GIB, 70 * GIB), None, "warn", "--nodes"),
        (MachineMemory(70 * GIB, 60 * GIB, 70 * GIB), 2, "ok", ""),
        (MachineMemory(1000 * GIB, 900 * GIB, 70 * GIB), 1, "fail", "cgroup"),
        (MachineMemory(1000 * GIB, 900 * GIB, 90 * GIB), 1, "ok", ""),
    ],
)
def test_two_snapshots_of_40_gib(found: MachineMemory, nodes: int | None, level: str, words: str) -> None:
    judged = memory.fits(found, state(40 * GIB, nodes=nodes))
    assert judged.level == level
    assert words in judged.fix
    assert ("cgroup" in judged.seen) == (found.allowed < found.total)


def test_memory_without_a_size_asks_for_it() -> None:
    assert "--state-bytes" in memory.fits(MachineMemory(GIB, GIB, GIB), None).fix


@pytest.mark.parametrize(
    ("limit", "gpu", "level"),
    [
        (UNLIMITED, True, "ok"),
        (8 << 20, False, "ok"),
        (8 << 20, True, "warn"),
        (80 * GIB, True, "ok"),
        (79 * GIB, True, "warn"),
    ],
)
def test_locked_memory_matters_where_cuda_pins(limit: int, gpu: bool, level: str) -> None:
    assert memory.locked(state(40 * GIB), limit=limit, gpu=gpu).level == level


def test_overcommit() -> None:
    assert [memory.overcommit(mode).level for mode in ("0", "1", "2", None)] == ["ok", "ok", "note", "ok"]


# --- machine and software ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "level"),
    [
        ("5.3.0-generic", "fail"),
        ("5.4.0", "note"),
        ("5.13.19", "note"),
        ("5.14.0-1.el9", "ok"),
        ("6.18.5", "ok"),
        ("?", "note"),
    ],
)
def test_kernel(release: str, level: str) -> None:
    assert machine.kernel(release).level == level


@pytest.mark.parametrize(("soft", "level"), [(70, "fail"), (100, "warn"), (256, "ok"), (65536, "ok"), (UNLIMITED, "ok")])
def test_open_files(soft: int, level: str) -> None:
    assert machine.open_files(soft, UNLIMITED).level == level


def test_open_files_says_how_far_it_can_be_raised() -> None:
    assert "up to 4096 without privileges" in machine.open_files(100, 4096).fix
    assert "privileges" not in machine.open_files(100, 100).fix


def test_backlog() -> None:
    assert [machine.backlog(text).level for text in ("128", "4096", None, "x")] == ["note", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, "note"), ("2.9.1", "fail"), ("2.10.0", "ok"), ("2.13.0+cpu", "ok"), ("1.13.1", "fail"), ("git", "ok")],
)
def test_torch(version: str | None, level: str) -> None:
    assert software.torch(version).level == level


def test_the_least_torch_is_that_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch>={'.'.join(map(str, software.TORCH_LEAST))}" in extras["torch"]


def test_libraries_that_are_missing_or_broken_are_named() -> None:
    found = software.libraries(("msgspec", "no_such_library"))
    assert found.level == "fail"
    assert "no_such_library: ModuleNotFoundError" in found.seen
    assert "msgspec" not in found.seen
    assert software.serve_libraries(("no_such_library",)).level == "note"


def test_a_codec_that_loses_bytes_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointd import codec

    assert software.codecs().level == "ok"
    decode = codec.decode

    def forgetful(stored: memoryview, *, codec: str, raw_size: int, out: memoryview) -> None:
        decode(stored, codec=codec, raw_size=raw_size, out=out)
        if codec == "planes":
            out[-1] ^= 1

    monkeypatch.setattr(codec, "decode", forgetful)
    found = software.codecs()
    assert found.level == "fail"
    assert found.seen.endswith("planes")


def test_wrong_checksums_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointd.codec.checksum.xxh3_64", lambda _: 0)
    assert "checksums" in software.codecs().seen


def test_what_this_machine_is_made_of_is_judged_without_an_error() -> None:
    findings: list[Finding] = [*machine.here(), *software.here(), memory.memfd(), memory.populate()]
    assert {finding.level for finding in findings} <= {"ok", "note", "warn"}
    found = memory.measured()
    assert found.total > found.available > 0
    assert found.total >= found.allowed > 0


def test_what_a_sidecar_can_forbid_itself() -> None:
    assert machine.sandbox(7, seccomp=True).level == "ok"
    assert machine.sandbox(0, seccomp=True).level == "note"
    assert "Landlock 1 forbids links between directories" in machine.sandbox(1, seccomp=True).seen
    assert "no Landlock and no seccomp" in machine.sandbox(0, seccomp=False).seen
