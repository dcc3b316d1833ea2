"""`checkpointd doctor` on file systems and machines that are unfit in earnest: each fault is found, and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpointd.doctor.examine import Question, examine
from checkpointd.doctor.finding import Finding
from tests.faults import strace_faults
from tests.faults.mounts import MIB, ext4_image, ramfs, remount, tmpfs

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("mounts")]


def examined(root: Path, *, state_bytes: int | None = None) -> dict[str, Finding]:
    """The findings at `root` by check, whose tries must have left nothing."""
    before = everything(root)
    found = examine(Question(root=str(root), state_bytes=state_bytes))
    assert everything(root) == before
    assert found.fit == all(finding.level != "fail" for finding in found.findings)
    return {finding.check: finding for finding in found.findings}


def everything(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*")}


def failed(findings: dict[str, Finding]) -> set[str]:
    return {check for check, finding in findings.items() if finding.level == "fail"}


# --- file systems ------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_root_that_is_mounted_read_only(tmp_path: Path) -> None:
    with ext4_image(64 * MIB, tmp_path) as mounted:
        remount(mounted.path, "ro")
        findings = examined(mounted.path / "run1")
        assert failed(findings) == {"root", "mount-options"}
        assert "read-only" in findings["root"].fix
        assert "EROFS" in findings["root"].seen


@pytest.mark.root
def test_a_file_system_without_direct_io() -> None:
    with ramfs() as path:
        findings = examined(path)
        assert findings["direct-io"].level == "note"
        assert "page cache" in findings["direct-io"].fix
        assert findings["file-system"].level == "warn"


@pytest.mark.root
def test_a_full_disk() -> None:
    with tmpfs(MIB) as path:
        (path / "full").write_bytes(bytes(MIB - 16384))
        findings = examined(path, state_bytes=8 * MIB)
        assert {"free-space", "direct-io"} <= failed(findings)
        assert "free some space" in findings["direct-io"].fix or "ENOSPC" in findings["direct-io"].seen
        assert "not one checkpoint fits" in findings["free-space"].fix


# --- system calls that fail --------------------------------------------------------------------------------------

SIZE = ("--state-bytes", "1M")
PROGRAM = "import sys; from checkpointd.cli import run; sys.exit(run(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("calls", "fault", "check", "words"),
    [
        ("link,linkat", "error=EPERM", "hard-links", "has hard links"),
        ("link,linkat", "error=EOPNOTSUPP", "hard-links", "has hard links"),
        ("fsync", "error=EIO", "fsync-file", "nothing can be made durable"),
        ("flock", "error=ENOLCK", "locks", "mount with locking"),
        ("rename", "error=EIO", "rename", "kernel log"),
        ("memfd_create", "error=EPERM", "memfd", "seccomp"),
        ("fallocate", "error=EDQUOT", "reservation", "raise the quota"),
        ("fallocate", "error=ENOSPC", "reservation", "look for a quota"),
    ],
)
def test_a_system_call_that_is_refused(tmp_path: Path, calls: str, fault: str, check: str, words: str) -> None:
    log = tmp_path / "strace.log"
    prefix = strace_faults.prefix(calls=calls, on=[], fault=fault, log=log)
    findings = asked([*prefix, sys.executable, "-c", PROGRAM, "doctor", str(tmp_path / "root"), *SIZE, "--json"], code=1)
    assert findings[check]["level"] == "fail"
    assert words in findings[check]["fix"]
    assert "(INJECTED)" in log.read_text()
    assert not (tmp_path / "root").exists()


def asked(command: Sequence[str], *, code: int) -> dict[str, Any]:
    """The findings that a process of its own prints as JSON, by check."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


# --- limits ------------------------------------------------------------------------------------------------------


def test_a_small_limit_on_the_size_of_a_file(tmp_path: Path) -> None:
    command = [
        "prlimit",
        f"--fsize={4 * MIB}",
        sys.executable,
        "-c",
        PROGRAM,
        "doctor",
        str(tmp_path),
        "--state-bytes",
        "8M",
        "--json",
    ]
    findings = asked(command, code=1)
    assert findings["reservation"]["level"] == "fail"
    assert "ulimit -f" in findings["reservation"]["fix"]
